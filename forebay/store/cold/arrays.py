"""The arrays of a cold form: names, shapes, and how they are cut into objects and chunks along their first axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    path: str,
    dtype: np.dtype[Any] | str,
    shape: tuple[int, ...],
    dimensions: tuple[str, ...],
    **attributes: Any,
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
