"""Where each sample lies: a large array that is checked piece by piece where it is touched, so that opening does not grow.

A large mapped array, checked piece by piece where it is touched: opening it costs nothing that grows with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError
from forebay.store.held import AnyFolder
from forebay.store.layout import Array, Ints
from forebay.store.metadata import check_file

FILE_NAME = "slots.npy"


SLOTS_A_CHUNK = 2**16
"""Slots that are hashed together: 512 KiB, 20 us."""


_HEADER_BYTES = 128
"""Of a .npy file of one axis; never parsed, since what it says follows from the number of samples."""


SUMS = "chunks_xxh3_64"
"""Of the file's entry in metadata.json. Without it the file is checked whole when it is opened."""


def sums_entry(slots: Array) -> dict[str, list[str]]:
    """Returns what the file's entry in metadata.json has on top: the xxh3-64 of every chunk, none where there is only one.

    slots: int64 [num_samples].
    """
    count = _num_chunks(len(slots))
    return {SUMS: [_sum(slots, chunk) for chunk in range(count)]} if count > 1 else {}


class Slots:
    """The slots of a cache, int64 [num_samples]. Threads may share it.

    at: memory of all of them, to be read where `require` has been asked first. A memoryview gives Python ints at a third of the
    cost of numpy's scalars.
    """

    def __init__(self, folder: AnyFolder, entry: Mapping[str, Any], *, length: int, verify: bool) -> None:
        """Maps the file, whose size is checked, and with `verify` its content: at first touch where its entry has sums.

        Raises CacheCorruptError where the file is missing or not the one that the entry describes.
        """
        self.path = folder / FILE_NAME
        sums = entry.get(SUMS)
        check_file(self.path, entry, verify=verify and sums is None)
        size = int(entry["size_bytes"])
        if size != _HEADER_BYTES + 8 * length:
            raise CacheCorruptError(
                f"{self.path} holds int64 [{(size - _HEADER_BYTES) // 8}], its metadata says int64 [{length}]; "
                "run: forebay preprocess CONFIG --rebuild"
            )
        if sums is not None and len(sums) != _num_chunks(length):
            raise CacheCorruptError(
                f"{self.path}: {len(sums)} {SUMS} in its metadata, wanted {_num_chunks(length)} for {length} slots; "
                "run: forebay preprocess CONFIG --rebuild"
            )
        self._array = self._mapped(length) if length else np.frombuffer(b"", np.int64)
        self.at = self._array.data
        self._sums: list[str] = sums or []
        self._unchecked = set(range(len(self._sums))) if verify else set()

    def require(self, index: int) -> None:
        """Raises CacheCorruptError where the slots around `index` are not those that were written."""
        chunk = index // SLOTS_A_CHUNK
        if chunk in self._unchecked:
            self._check(chunk)

    def all(self) -> Array:
        """Returns all slots, read-only, after checking them."""
        for chunk in sorted(self._unchecked):
            self._check(chunk)
        return self._array

    def _mapped(self, length: int) -> Array:
        with self.path.open("rb", buffering=0) as file:
            return np.asarray(np.memmap(file, np.dtype("<i8"), "r", _HEADER_BYTES, (length,)))

    def _check(self, chunk: int) -> None:
        computed = _sum(self._array, chunk)
        if computed != self._sums[chunk]:
            raise CacheCorruptError(
                f"{self.path} slots from {chunk * SLOTS_A_CHUNK} on: stored xxh3-64 {self._sums[chunk]}, computed {computed}; "
                "run: forebay preprocess CONFIG --rebuild"
            )
        self._unchecked.discard(chunk)


def _num_chunks(length: int) -> int:
    return -(-length // SLOTS_A_CHUNK)


def _sum(slots: Array, chunk: int) -> str:
    return xxhash.xxh3_64_hexdigest(slots[chunk * SLOTS_A_CHUNK : (chunk + 1) * SLOTS_A_CHUNK].data)


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
