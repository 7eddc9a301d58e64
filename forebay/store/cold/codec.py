"""One object of a zarr array: chunks, each compressed by zstd with a checksum, and an index of where each lies.

Layout: the zarr v3 codec `sharding_indexed`, index at the end: offset and size of each chunk as little-endian uint64,
2^64 - 1 for a chunk that is not there, then the CRC-32C of these numbers. zarr writes the same bytes; encoded here, an
object costs what zstd costs, and half of what it costs through zarr's event loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.errors import MissingExtraError
from forebay.extras import install_line
from forebay.store.cold.arrays import ColdArray
from forebay.store.layout import Array

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
    """Returns the rows from `start` to `stop` of the array, which lie in its object of this index.

    Raises DamagedError.
    """
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
