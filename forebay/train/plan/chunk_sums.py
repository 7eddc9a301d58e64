"""A large mapped array, checked piece by piece where it is touched: opening it costs nothing that grows with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError
from forebay.train.plan.interface import Array
from forebay.train.plan.permutation import Ints

CHUNK_ITEMS = 2**13
"""Items that are hashed together: 32 KiB of int32, 3 us. A first batch of 40 samples touches 40 of them."""


def chunk_sums(array: Array) -> Array:
    """Returns the xxh3-64 of every `CHUNK_ITEMS` items of a flat array: uint64 [num_chunks]."""
    sums = [
        xxhash.xxh3_64_intdigest(array[start : start + CHUNK_ITEMS].data) for start in range(0, len(array), CHUNK_ITEMS)
    ]
    return np.array(sums, dtype=np.uint64)


class ChunkCheck:
    """Compares the chunks of a mapped array with their sums, each before its first use in this process."""

    def __init__(self, path: Path, array: Array, sums: Array) -> None:
        self._path, self._array, self._sums = path, array, sums
        self._is_right = np.zeros(len(sums), dtype=bool)

    def __call__(self, places: Ints) -> None:
        """Raises CacheCorruptError, with file and offset, where the bytes at `places` are not those that were written."""
        chunks = places // CHUNK_ITEMS
        for chunk in np.unique(chunks[~self._is_right[chunks]]).tolist():
            start = chunk * CHUNK_ITEMS
            computed = xxhash.xxh3_64_intdigest(self._array[start : start + CHUNK_ITEMS].data)
            if computed != self._sums[chunk]:
                offset = start * self._array.itemsize
                raise CacheCorruptError(
                    f"{self._path}: items from {start} on (byte {offset} of the array): checksum {int(self._sums[chunk]):016x} "
                    f"stored, {computed:016x} computed; delete that folder and run: forebay preprocess CONFIG"
                )
            self._is_right[chunk] = True
