"""`make demo-remote`: a store on this machine, and two nodes that work on what lies in it.

The first node reads raw data from a bucket and puts a cache there. The second has nothing but the URL, and trains.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.objects.beside import Beside
from benchmarks.objects.server import ACCESS_KEY, REGION, SECRET_KEY, Bucket

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/demo_remote.toml"
BUCKET = "demo"
RAW = ROOT / "demo" / "speech"


class Node:
    """A machine of its own as far as forebay sees: other folders, and the same store."""

    def __init__(self, name: str, folder: Path, endpoint: str) -> None:
        self._name, self._folder = name, folder / name
        found = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": ACCESS_KEY, "SECRET_ACCESS_KEY": SECRET_KEY}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        access = {f"AWS_{key}": value for key, value in {**found, "REGION": REGION}.items()}
        self._environment = {**kept, **access, "XDG_CACHE_HOME": str(self._folder), "PYTHONPATH": str(ROOT)}

    def run(self, *arguments: str) -> None:
        """Runs `forebay ARGUMENTS` here. Its failure is this process's."""
        print(f"\n{self._name} $ forebay {shlex.join(arguments)}", flush=True)
        ended = subprocess.run(
            [sys.executable, "-m", "forebay", *arguments], cwd=ROOT, env=self._environment, check=False
        )
        if ended.returncode:
            sys.exit(ended.returncode)

    def say_what_is_kept(self) -> None:
        """Prints how much of the store is on this node."""
        shards = list((self._folder / "forebay").rglob("*.tdz"))
        size_mb = sum(path.stat().st_size for path in shards) / 1e6
        print(f"{self._name} keeps {len(shards)} shard files, {size_mb:.1f} MB", flush=True)


def main() -> None:
    """Runs the demo."""
    started_s = time.monotonic()
    with Beside() as store, tempfile.TemporaryDirectory() as folder:
        _fill(store.make_bucket(BUCKET))
        print(f"a store answers at {store.endpoint}, with raw data at s3://{BUCKET}/raw", flush=True)
        first, second = (Node(f"node-{number}", Path(folder), store.endpoint) for number in (1, 2))
        first.run("preprocess", CONFIG, "--no-progress")
        first.run("train", CONFIG, f"--set=train.output_dir={folder}/node-1/runs")
        store.clear()
        second.run("inspect", CONFIG, "--no-progress")
        second.run("cache", "warm", CONFIG, "--steps", "4", "--no-progress")
        second.say_what_is_kept()
        second.run("train", CONFIG, f"--set=train.output_dir={folder}/node-2/runs")
        second.say_what_is_kept()
        _say_traffic(store)
    print(f"\n{time.monotonic() - started_s:.0f} s", flush=True)


def _fill(bucket: Bucket) -> None:
    """Puts the recordings of the demo and their manifest into a bucket."""
    for path in sorted([*RAW.glob("*.tar"), RAW / "train.parquet"]):
        bucket.put(f"raw/{path.name}", path.read_bytes())


def _say_traffic(store: Beside) -> None:
    """Prints what the second node has asked the store for."""
    traffic = store.traffic()
    gets = {key: count for (method, key), count in traffic.requests.items() if method == "GET"}
    shards = [count for key, count in gets.items() if key.endswith(".tdz")]
    raw_mb = sum(traffic.bytes_of(key) for key in gets if key.startswith("raw/")) / 1e6
    print(
        f"\nnode-2 has asked {sum(shards)} times for the {len(shards)} shard files of the cache, and has read "
        f"{raw_mb:.1f} MB of raw data"
    )


if __name__ == "__main__":
    main()
