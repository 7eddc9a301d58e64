"""The command `forebay fetch`: an evaluation set, or any prefix of a store, as files of a folder of this machine."""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.options import DONE, FAILED, command, on_disk, printed
from forebay.config.load import read_remote
from forebay.config.url import parse_url
from forebay.errors import ConfigError

_GB = 1_000_000_000


def add_fetch(commands: Any) -> None:
    """Adds `forebay fetch URL --output DIR`."""
    summary = "bring an evaluation set, or any prefix of a store, into a folder; checked, and goes on"
    parser = command(commands, "fetch", _fetch, summary, has_caches=False)
    parser.add_argument("url", metavar="URL", help="a folder of a store, an object, or a manifest (.json)")
    parser.add_argument("--output", metavar="DIR", type=on_disk, required=True, help="the folder; made if missing")
    parser.add_argument("--prefix", metavar="P", default="", help="only what begins with P below the URL: hi_")
    parser.add_argument("--overwrite", action="store_true", help="replace files that have other bytes")
    parser.add_argument("--max-size-gb", type=float, default=100.0, metavar="N", help="refuse more; default: 100")
    parser.add_argument("--max-files", type=int, default=100_000, metavar="N", help="refuse more; default: 100000")
    parser.add_argument("--ignore-etags", action="store_true", help="an etag of S3 is no MD5 here: KMS, SSE-C")
    parser.add_argument("--dry-run", action="store_true", help="say what would be downloaded, and download nothing")
    parser.add_argument(
        "--set", action="append", default=[], metavar="remote.FIELD=VALUE", help="how the store is asked"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _fetch(options: argparse.Namespace) -> int:
    from forebay.store.remote.fetch.fetch import fetch
    from forebay.store.remote.fetch.listing import Bounds, FetchOptions
    from forebay.tar.listed import check_members

    for name in ("max_size_gb", "max_files"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, wanted more than 0")
    asked = FetchOptions(
        prefix=options.prefix,
        bounds=Bounds(size_bytes=int(options.max_size_gb * _GB), files=options.max_files),
        overwrite=options.overwrite,
        etags=not options.ignore_etags,
        dry_run=options.dry_run,
        progress=not options.no_progress,
    )
    settings = read_remote(options.set)
    report = fetch(parse_url(options.url), options.output, settings, asked, examine=check_members)
    printed(options, report)
    return FAILED if report.refused else DONE
