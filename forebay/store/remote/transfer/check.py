"""Whether a cache in a store is what was sealed: by a listing, or byte for byte, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import xxhash

from forebay.errors import RemoteMissingError
from forebay.store.metadata import FILE_NAME as METADATA
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.transfer.columns import NAME as COLUMNS

_MEND = "push the cache again from a machine that has it whole: forebay cache push"


def check_sizes(bucket: Bucket, files: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Returns what is wrong with the files of a cache by their names and sizes, and what is there beside them.

    files: entries by name. A web server lists nothing: each file is asked for, and nothing else is known.
    """
    found = _sizes(bucket, files)
    problems = []
    for name, entry in files.items():
        if (size := found.pop(name, None)) is None:
            problems.append(f"{bucket.url / name} is missing; {_MEND}")
        elif size != entry["size_bytes"]:
            problems.append(f"{bucket.url / name} has {size} bytes, its metadata says {entry['size_bytes']}; {_MEND}")
    for name in (METADATA, COLUMNS):
        found.pop(name, None)
    return problems, [f"{bucket.url}/{name} does not belong to this cache" for name in sorted(found)]


def check_bytes(bucket: Bucket, files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, str | None]]:
    """Yields the bytes of each file, which is read to its end, and what is wrong with it; in no order."""
    with ThreadPoolExecutor(bucket.settings.max_concurrent) as threads:
        futures = [threads.submit(_check_file, bucket, name, entry) for name, entry in files.items()]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _sizes(bucket: Bucket, files: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    if bucket.url.scheme not in ("http", "https"):
        return {found.name: found.size_bytes for found in bucket.objects()}
    with ThreadPoolExecutor(bucket.settings.max_concurrent) as threads:
        sizes = zip(files, threads.map(lambda name: _size(bucket, name), files), strict=True)
        return {name: size for name, size in sizes if size is not None}


def _size(bucket: Bucket, name: str) -> int | None:
    try:
        return bucket.info(name).size_bytes
    except RemoteMissingError:
        return None


def _check_file(bucket: Bucket, name: str, entry: Mapping[str, Any]) -> tuple[int, str | None]:
    state, size = xxhash.xxh3_128(), 0
    try:
        for piece in bucket.stream(name):
            state.update(piece)
            size += len(piece)
    except RemoteMissingError:
        return 0, f"{bucket.url / name} is missing; {_MEND}"
    if (found := state.hexdigest()) == entry["xxh3_128"]:
        return size, None
    return 0, f"{bucket.url / name}: stored xxh3-128 {entry['xxh3_128']}, computed {found}; {_MEND}"
