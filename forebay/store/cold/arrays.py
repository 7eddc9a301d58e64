"""The arrays of a cold form: names, shapes, and their objects: chunks along the first axis. Nothing here needs zarr.

The root's `zarr.json` is written last: with it the cold form is whole. What was begun is known by the group `files`.

An object has chunks, each compressed by zstd with a checksum, and an index of them, as the zarr v3 codec
`sharding_indexed` lays it out: at the end offset and size of each chunk as little-endian uint64, 2^64 - 1 for a chunk
that is not there, then the CRC-32C of these numbers. zarr writes the same bytes; encoded here, an object costs what
zstd costs, and half of what it costs through zarr's event loop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from forebay.errors import CacheMismatchError, MissingExtraError
from forebay.extras import install_line
from forebay.store.key import SHORT
from forebay.store.layout import Array

CHUNK_BYTES = 256 * 1024
"""Values that are compressed together: reading one sample decompresses so much, or twice that."""
SHARD_BYTES = 32 * 1024 * 1024
"""Values that are one object (zarr calls it a shard): what a thread holds at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdArray:
    """One array. chunk_rows: rows that are compressed together. chunks: so many of these are one object, at most.

    dimensions: their names; xarray wants one length for one name.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dimensions: tuple[str, ...]
    chunk_rows: int
    chunks: int
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def shard_rows(self) -> int:
        """Rows of one object; the last has fewer."""
        return self.chunk_rows * self.chunks

    @property
    def num_shards(self) -> int:
        """Objects of the array. What has no bytes has none."""
        return -(-self.shape[0] // self.shard_rows) if self.row_bytes else 0

    def rows(self, index: int) -> tuple[int, int]:
        """Returns the first row of an object and the row after its last."""
        start = index * self.shard_rows
        return start, min(start + self.shard_rows, self.shape[0])

    def name(self, index: int) -> str:
        """Returns the name of an object below the root."""
        return f"{self.path}/c/{index}" + "/0" * (len(self.shape) - 1)


def cold_array(
    path: str, dtype: np.dtype[Any] | str, shape: tuple[int, ...], dimensions: tuple[str, ...], **attributes: Any
) -> ColdArray:
    """Returns an array of these rows, cut into chunks of CHUNK_BYTES and objects of SHARD_BYTES."""
    dtype = np.dtype(dtype).newbyteorder("<")
    row_bytes = max(1, dtype.itemsize * math.prod(shape[1:]))
    chunk_rows = max(1, min(CHUNK_BYTES // row_bytes, shape[0]))
    chunks = max(1, min(SHARD_BYTES // (chunk_rows * row_bytes), -(-shape[0] // chunk_rows)))
    return ColdArray(
        path=path,
        dtype=dtype,
        shape=shape,
        dimensions=dimensions,
        chunk_rows=chunk_rows,
        chunks=chunks,
        attributes=attributes,
    )


ROOT = "zarr.json"
BEGUN = "files/zarr.json"
FORM_VERSION = 1
"""The newest form that is written and read."""
_ABOUT = "forebay"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The parts of a cold form, and how they lie: two of equal marks have the same names with the same values.

    metadata: xxh3-128 of metadata.json. level: of zstd. chunk_bytes, shard_bytes: values compressed, and one object.
    """

    key: str
    metadata: str
    level: int
    chunk_bytes: int
    shard_bytes: int
    form_version: int = FORM_VERSION

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes of a group that is marked."""
        return {_ABOUT: asdict(self)}

    def __str__(self) -> str:
        return f"the zarr form of the cache of key {self.key[:SHORT]}"


def pull_hint(data: bytes, where: object) -> str | None:
    """Returns what to do with a cold form that was named as a cache; None where a root's document is of none."""
    mark = mark_of(data, where)
    return (
        None if mark is None else f"{where} is {mark}, nothing reads samples of it; run: forebay cache pull {where} DIR"
    )


def mark_of(data: bytes, where: object) -> Mark | None:
    """Returns the mark of a `zarr.json`, None where it is of no cold form; CacheMismatchError for a newer one."""
    try:
        about = json.loads(data)["attributes"][_ABOUT]
        version = int(about["form_version"])
        if version <= FORM_VERSION:
            numbers = {name: int(about[name]) for name in ("level", "chunk_bytes", "shard_bytes", "form_version")}
            return Mark(key=str(about["key"]), metadata=str(about["metadata"]), **numbers)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    raise CacheMismatchError(
        f"{where}: form_version is {version}, this forebay reads up to {FORM_VERSION}; upgrade forebay", code="FB406"
    )


_ABSENT = np.iinfo(np.uint64).max
_SUM_BYTES = 4


class DamagedError(ValueError):
    """An object is not what was written; the text says where."""


def zarr() -> Any:
    """Returns the module, which is an extra. Raises MissingExtraError."""
    try:
        import google_crc32c  # noqa: F401  # comes with zarr
        import numcodecs  # noqa: F401
        import zarr
    except ImportError as err:
        raise MissingExtraError(
            f"the zarr form of a cache needs zarr, which is not installed; run: {install_line('zarr')}"
        ) from err
    return zarr


def encode(array: ColdArray, rows: Array, *, level: int) -> bytes:
    """Returns the object of these rows, all that it is to hold."""
    import google_crc32c
    from numcodecs import Zstd

    zstd = Zstd(level=level, checksum=True)
    index = np.full((array.chunks, 2), _ABSENT, "<u8")
    parts: list[bytes] = []
    position = 0
    for number, start in enumerate(range(0, len(rows), array.chunk_rows)):
        part = zstd.encode(_whole_chunk(array, rows[start : start + array.chunk_rows]))
        index[number] = position, len(part)
        position += len(part)
        parts.append(part)
    table = index.tobytes()
    return b"".join([*parts, table, google_crc32c.value(table).to_bytes(_SUM_BYTES, "little")])


def _whole_chunk(array: ColdArray, rows: Array) -> Array:
    """The rows of a chunk: in zarr all chunks of an array have one size, whatever the array has."""
    if len(rows) < array.chunk_rows:
        padded = np.zeros((array.chunk_rows, *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        rows = padded
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def decode(array: ColdArray, data: bytes, index: int, *, start: int, stop: int) -> Array:
    """Returns the rows from `start` to `stop` of the array, which lie in this object of it. Raises DamagedError."""
    first = array.rows(index)[0]
    chunks = _index(array, data)
    parts = []
    for number in range((start - first) // array.chunk_rows, -(-(stop - first) // array.chunk_rows)):
        begin = first + number * array.chunk_rows
        rows = _chunk(array, data, chunks, number)
        parts.append(rows[max(start - begin, 0) : stop - begin])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _index(array: ColdArray, data: bytes) -> Array:
    import google_crc32c

    size = 16 * array.chunks
    table = data[-size - _SUM_BYTES : -_SUM_BYTES]
    if len(table) != size:
        raise DamagedError(f"it has {len(data)} bytes, and its index alone has {size + _SUM_BYTES}")
    stored, computed = int.from_bytes(data[-_SUM_BYTES:], "little"), google_crc32c.value(table)
    if stored != computed:
        raise DamagedError(f"index: stored CRC-32C {stored:08x}, computed {computed:08x}")
    return np.frombuffer(table, "<u8").reshape(-1, 2)


def _chunk(array: ColdArray, data: bytes, chunks: Array, number: int) -> Array:
    from numcodecs import Zstd

    offset, size = (int(value) for value in chunks[number])
    if offset + size > len(data):
        raise DamagedError(f"chunk {number} is said to end at {offset + size}, and there are {len(data)} bytes")
    out = np.zeros(array.chunk_rows * array.row_bytes, np.uint8)
    try:
        Zstd().decode(memoryview(data)[offset : offset + size], out)
    except (RuntimeError, ValueError) as err:
        raise DamagedError(f"chunk {number} (bytes {offset} to {offset + size}): {err}") from err
    return out.view(array.dtype).reshape(array.chunk_rows, *array.shape[1:])
