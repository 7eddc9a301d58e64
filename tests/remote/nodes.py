"""A node without a network: objects are files of a folder, and every request for one is a line in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.config.remote import RemoteConfig, Url
from forebay.errors import RemoteError
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.holdings import MIRRORS
from forebay.store.remote.node.node import WantedFile

URL = Url("s3", "bucket", "data")


class FolderBucket(Bucket):
    """Objects that are the files of a folder. `requests` of all processes are kept beside the folder."""

    def __init__(self, folder: Path, *, piece_bytes: int = 64 * 1024, pause_s: float = 0.0) -> None:
        super().__init__(URL, RemoteConfig())
        self.folder, self.piece_bytes, self.pause_s = folder, piece_bytes, pause_s
        self.fail_at: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def requests(self) -> list[tuple[str, int]]:
        """Name and first byte of every request, in their order."""
        log = self.folder.with_suffix(".log")
        lines = log.read_text().splitlines() if log.exists() else []
        return [(name, int(start)) for name, start in (line.rsplit(" ", 1) for line in lines)]

    def stream(self, name: str, *, start: int = 0, stop: int | None = None, etag: str = "") -> Iterator[bytes]:
        assert stop is None, "the node's cache streams to the end"
        with open(self.folder.with_suffix(".log"), "a") as log:
            log.write(f"{name} {start}\n")
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            while piece := file.read(self.piece_bytes):
                if self.fail_at is not None and file.tell() > self.fail_at:
                    raise RemoteError(f"{self.url / name}: the connection was reset")
                time.sleep(self.pause_s)
                yield piece

    def add(self, name: str, size_bytes: int, *, seed: int = 0, number: int = -1) -> WantedFile:
        """Puts an object of random bytes."""
        data = np.random.default_rng(seed + len(name) + 1_000 * max(number, 0)).bytes(size_bytes)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return WantedFile(name=name, size_bytes=size_bytes, xxh3_128=xxhash.xxh3_128_hexdigest(data), number=number)

    def shards(self, num: int, *, size_bytes: int) -> list[WantedFile]:
        """Puts the shards of a group."""
        return [self.add(f"text/{i:05d}.tdz", size_bytes, number=i) for i in range(num)]


def mirror_of(node: Path, bucket: Bucket, *, bound_bytes: int = 10**9, url: Url = URL, **settings: Any) -> Mirror:
    """Returns a mirror under a node's folder that asks `bucket`."""
    config = RemoteConfig(shard_dir=str(node), cache_size_gb=bound_bytes / 1e9, **settings)
    mirror = Mirror.at(url, config)
    mirror.__dict__["bucket"] = bucket
    return mirror


def disk_bytes(node: Path) -> int:
    """Returns what all files below the mirrors of a node take of the disk."""
    total = 0
    for folder, _, names in os.walk(node / MIRRORS):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def files(node: Path) -> set[str]:
    """Returns the names of the shards and partial files that are there, without their mirror."""
    return {
        path.relative_to(node / MIRRORS).as_posix().split("/", 1)[1]
        for path in (node / MIRRORS).glob("*/*/*")
        if path.is_file()
    }


def main() -> None:
    """`python -m tests.remote.nodes NODE OBJECTS PAUSE_S NAME SIZE HASH`: downloads one object into a mirror."""
    node, objects, pause_s, name, size, xxh3_128 = sys.argv[1:]
    bucket = FolderBucket(Path(objects), pause_s=float(pause_s))
    mirror = mirror_of(Path(node), bucket)
    print("ready", flush=True)
    sys.stdin.readline()
    path = mirror.require(WantedFile(name=name, size_bytes=int(size), xxh3_128=xxh3_128))
    assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == xxh3_128
    print("done", flush=True)


if __name__ == "__main__":
    main()
