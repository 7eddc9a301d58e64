"""A shard of a store as a file of this machine with everything in it but its large values: those are holes.

What a seal asks of a shard (which rows failed, ids, languages, lengths) is a few kilobytes beside the recordings. The
columns that are read are compared with their CRC-32 as ever; a column that lies in a hole never is what was sealed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from forebay.store.files import write_all
from forebay.store.layout import FieldSpec
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.shard import ShardEntry

_GAP_BYTES = 256 * 1024
"""A smaller hole is downloaded: a request more takes as long as so many bytes."""

Range = tuple[int, int]
"""First byte, and the one after the last."""


def skeleton_ranges(entry: ShardEntry, fields: Sequence[FieldSpec], *, kept: Collection[str]) -> list[Range]:
    """Returns the ranges of a shard's file that hold all but the values of its tensor fields.

    fields: of the shard, as `shard_fields` gives them. kept: tensor fields whose values are wanted too.
    """
    holes = []
    for field, (start, count, _) in zip(fields, entry.spans, strict=True):
        size = count * math.prod(field.shape) * field.numpy_dtype.itemsize
        if field.role == "tensor" and field.name not in kept and size >= _GAP_BYTES:
            holes.append((start, start + size))
    ranges, at = [], 0
    for start, stop in sorted(holes):
        ranges.append((at, start))
        at = stop
    return [*ranges, (at, entry.size_bytes)]


def fetch_skeleton(bucket: Bucket, name: str, path: Path, ranges: Sequence[Range], *, etag: str) -> int:
    """Makes a file of these ranges of an object, with holes elsewhere, and returns the bytes that were downloaded.

    The last range ends where the object does. etag: of the version that is wanted. Raises RemoteMissingError,
    RemoteReplacedError, RemoteError.
    """
    with open(path, "wb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            write_all(file, bucket.read_range(name, start, stop, etag=etag))
        file.truncate(ranges[-1][1])
    return sum(stop - start for start, stop in ranges)
