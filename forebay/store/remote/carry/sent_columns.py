"""Facts of a store about all samples of a cache at once: a run begins without asking every shard for them.

A plan needs the digest of the samples' ids, a run's log their languages and sources. In a cache these stand shard by
shard, the ids beside the recordings: a node that begins would download everything first. A push puts them beside the
cache as one object, which is no file of the cache: without it, or where it is damaged, the shards are asked.

A shard of a store as a file of this machine with everything in it but its large values: those are holes.

What a seal asks of a shard (which rows failed, ids, languages, lengths) is a few kilobytes beside the recordings. The
columns that are read are compared with their CRC-32 as ever; a column that lies in a hole never is what was sealed.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from forebay.errors import RemoteError, RemoteMissingError
from forebay.store.files import write_all
from forebay.store.layout import Array, FieldSpec
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.node import WantedFile
from forebay.store.shard import ShardEntry

if TYPE_CHECKING:
    import pyarrow as pa


logger = logging.getLogger(__name__)

NAME = "columns.bin"
"""Beside metadata.json, in a store and in its mirror: a checksum and a parquet file."""

MAX_VALUES = 1 << 16
"""Different values of a column that is told; ids and texts have more."""

_CHECKSUM_BYTES = 16
_ABOUT = b"forebay"


@dataclass(frozen=True, kw_only=True)
class ToldColumns:
    """ids_digest: of the samples' ids in their order. table: a row a sample, of text columns with few values."""

    ids_digest: str
    table: pa.Table

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a column, sorted, and which one each sample has; None: it is not told."""
        if name not in self.table.column_names:
            return None
        column = self.table.column(name).combine_chunks().dictionary_encode()
        names, codes = column.dictionary.to_pylist(), column.indices.to_numpy()
        order = sorted(range(len(names)), key=names.__getitem__)
        moved = np.zeros(len(names), np.int32)
        moved[order] = np.arange(len(order))
        return [names[code] for code in order], moved[codes]


def dump_columns(key: str, ids_digest: str, columns: dict[str, tuple[list[str], Array]]) -> bytes:
    """Returns the object of a cache. columns: as `categories` gives them; those of many values are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(values, pa.string()))
        for name, (values, codes) in columns.items()
        if len(values) <= MAX_VALUES
    }
    about = json.dumps({"key": key, "ids_digest": ids_digest}).encode("ascii")
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays).replace_schema_metadata({_ABOUT: about}), buffer, compression="zstd")
    body = buffer.getvalue()
    return xxhash.xxh3_128_digest(body) + body


def parse_columns(data: bytes, *, key: str, num_samples: int) -> ToldColumns:
    """Returns what an object tells of the cache of a key. Raises ValueError where it is damaged or of another one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    body = data[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_CHECKSUM_BYTES]:
        raise ValueError("its checksum is another one than that of its bytes")
    try:
        table = pq.read_table(io.BytesIO(body))
        about = json.loads((table.schema.metadata or {})[_ABOUT])
        found, ids_digest = str(about["key"]), str(about["ids_digest"])
    except (pa.ArrowException, LookupError, TypeError) as err:
        raise ValueError(f"it is not what a push writes: {err!r}") from err
    if found != key or (table.num_columns and table.num_rows != num_samples):
        raise ValueError(f"it is of {table.num_rows} samples of the cache {found}, wanted {num_samples} of {key}")
    return ToldColumns(ids_digest=ids_digest, table=table)


def told_columns(mirror: Mirror, *, key: str, num_samples: int) -> ToldColumns | None:
    """Returns what the store tells of a cache, which this node then keeps; None where it tells nothing."""
    path = mirror.folder / NAME
    try:
        data = path.read_bytes() if path.is_file() else mirror.bucket.read(NAME)
        told = parse_columns(data, key=key, num_samples=num_samples)
    except RemoteMissingError:
        return None
    except (RemoteError, ValueError) as err:
        logger.warning("%s/%s is left out, and every shard is asked instead: %s", mirror.url, NAME, err)
        path.unlink(missing_ok=True)
        return None
    mirror.node.keep(path, WantedFile(name=NAME, size_bytes=len(data), is_kept=True), data)
    return told


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
