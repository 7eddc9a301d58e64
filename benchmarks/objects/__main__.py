"""Runs a command beside an object store of its own: `python -m benchmarks.objects --put demo/speech -- COMMAND`.

The store is moto's, on loopback, behind a proxy. The command finds it in AWS_ENDPOINT_URL. It is gone when the command
has ended, and with it what the command has put there. The exit status is that of the command.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import ObjectServer, environment
from benchmarks.objects.traffic import Traffic


def _options(argv: Sequence[str]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objects", description=__doc__.partition("\n")[0])
    parser.add_argument("--bucket", default="forebay-demo", help="the bucket's name (default: %(default)s)")
    parser.add_argument(
        "--put", type=Path, action="append", default=[], metavar="FOLDER", help="s3://BUCKET/FOLDER/..."
    )
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to each request (default: %(default)s)")
    parser.add_argument("--mb-per-s", type=float, help="bandwidth of the link, in each direction (default: no limit)")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    options = parser.parse_args(argv)
    for folder in options.put:
        if folder.is_absolute() or not folder.is_dir():
            parser.error(f"--put takes a folder of this working directory, and {folder} is none")
    return options


def _report(traffic: Traffic) -> str:
    methods = sorted({exchange.method for exchange in traffic.exchanges})
    counts = (f"{sum(one.method == method for one in traffic.exchanges)} {method}" for method in methods)
    return f"the store saw {', '.join(counts) or 'no request'}; {traffic.sent} bytes down, {traffic.received} up"


def main(argv: Sequence[str]) -> int:
    """Returns the command's exit status."""
    options = _options(argv)
    rate = None if options.mb_per_s is None else options.mb_per_s * 1e6
    with (
        ObjectServer() as server,
        Proxy(server.address, latency_s=options.latency_ms / 1000, bytes_per_s=rate) as proxy,
        tempfile.TemporaryDirectory() as profiles,
    ):
        bucket = server.make_bucket(options.bucket)
        for folder in options.put:
            bucket.put_folder(folder, folder.as_posix())
        status = subprocess.run(options.command, env=environment(proxy.endpoint, profiles=Path(profiles))).returncode
        print(_report(proxy.traffic()), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
