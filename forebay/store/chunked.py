"""A large flat array that is checked chunk by chunk where it is touched: opening it costs nothing that grows with it.

The slots of a cache and the members of a plan are such arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError
from forebay.store.held import AnyFile, AnyFolder
from forebay.store.layout import ROW_BITS, ROW_MASK, Array, Ints
from forebay.store.metadata import check_file

MEMBERS_A_CHUNK = 2**13
"""Members of a plan that are hashed together: 32 KiB, 3 us. A first batch of 40 samples touches 40 chunks."""

SLOTS_A_CHUNK = 2**16
"""Slots that are hashed together: 512 KiB, 20 us."""

SLOTS = "slots.npy"

SUMS = "chunks_xxh3_64"
"""Where the entry of `slots.npy` has the sums; slots of one chunk have none and are checked when opened."""

_HEADER_BYTES = 128
"""Size of a .npy header of one axis; never parsed, since what it says follows from the number of samples."""

_AGAIN = "run: forebay preprocess CONFIG --rebuild"


def chunk_sums(array: Array, chunk_items: int) -> Array:
    """Returns the xxh3-64 of every `chunk_items` items of a flat array: uint64 [num_chunks]."""
    return np.array([_sum(array, start, chunk_items) for start in range(0, len(array), chunk_items)], dtype=np.uint64)


class CheckedArray:
    """A flat array whose chunks are compared with their sums, each before its first use in this process.

    Threads may share it. array: all items, to be read where `require` has been asked first.
    """

    def __init__(
        self,
        path: AnyFile | Path,
        array: Array,
        sums: Array | None,
        *,
        chunk_items: int,
        again: str,
        mend: Callable[[], None] | None = None,
    ) -> None:
        """Takes `array` as it is.

        sums: of `chunk_sums`, None where nothing is to be checked. again: what a message tells the user to run. mend:
        puts right what lies under the array, where that can be done.
        Raises CacheCorruptError where there are not as many sums as chunks.
        """
        self.array = array
        self._path, self._sums, self._chunk_items, self._again, self._mend = path, sums, chunk_items, again, mend
        wanted = -(-len(array) // chunk_items)
        if sums is not None and len(sums) != wanted:
            raise CacheCorruptError(
                f"{path}: {len(sums)} checksums of chunks, wanted {wanted} for {len(array)} items; {again}"
            )
        self._is_right = np.full(wanted, sums is None)

    def require(self, index: int) -> None:
        """Raises CacheCorruptError, with file and offset, where the items around `index` are not those written."""
        chunk = index // self._chunk_items
        if not self._is_right[chunk]:
            self._check(chunk)

    def require_all(self, places: Ints) -> None:
        """Raises what `require` does, for every one of `places`."""
        chunks = places // self._chunk_items
        for chunk in np.unique(chunks[~self._is_right[chunks]]).tolist():
            self._check(chunk)

    def whole(self) -> Array:
        """Returns all items, read-only, after checking them."""
        for chunk in np.flatnonzero(~self._is_right).tolist():
            self._check(chunk)
        return self.array

    def _check(self, chunk: int) -> None:
        assert self._sums is not None
        start, stored = chunk * self._chunk_items, int(self._sums[chunk])
        computed = _sum(self.array, start, self._chunk_items)
        if computed != stored and self._mend is not None:
            self._mend()
            computed = _sum(self.array, start, self._chunk_items)
        if computed != stored:
            raise CacheCorruptError(
                f"{self._path}: items from {start} on (byte {start * self.array.itemsize} of the array): stored "
                f"xxh3-64 {stored:016x}, computed {computed:016x}; {self._again}"
            )
        self._is_right[chunk] = True


def slot_sums(slots: Array) -> dict[str, list[str]]:
    """Returns what the entry of such a file has on top: the sum of every chunk in hex, none where there is only one."""
    sums = chunk_sums(slots, SLOTS_A_CHUNK).tolist()
    return {SUMS: [f"{value:016x}" for value in sums]} if len(sums) > 1 else {}


def open_slots(
    folder: AnyFolder,
    name: str,
    entry: Mapping[str, Any],
    *,
    length: int,
    verify: bool,
    mend: Callable[[], None] | None = None,
) -> CheckedArray:
    """Returns slots of a cache, int64 [length], mapped; the file's size is checked, with `verify` its content too.

    name: of the file: `SLOTS`, or of what samples list (`forebay.store.metadata.items_files`).
    Raises CacheCorruptError where the file is missing or not the one that the entry describes.
    """
    path = folder / name
    check_file(path, entry, verify=verify and length <= SLOTS_A_CHUNK)
    size = int(entry["size_bytes"])
    if size != _HEADER_BYTES + 8 * length:
        found = (size - _HEADER_BYTES) // 8
        raise CacheCorruptError(f"{path} holds int64 [{found}], its metadata says int64 [{length}]; {_AGAIN}")
    sums = _slot_sums(path, entry) if verify and length > SLOTS_A_CHUNK else None
    array = _mapped(path, length) if length else np.frombuffer(b"", np.int64)
    return CheckedArray(path, array, sums, chunk_items=SLOTS_A_CHUNK, again=_AGAIN, mend=mend)


def no_such_row(folder: Path, index: int, slot: int) -> CacheCorruptError:
    """Returns the error for a sample whose slot leads nowhere."""
    return CacheCorruptError(
        f"{folder / SLOTS}: sample {index} is said to lie in shard {slot >> ROW_BITS}, row "
        f"{slot & ROW_MASK}, which is not there; run: forebay preprocess CONFIG --rebuild"
    )


def _slot_sums(path: AnyFile, entry: Mapping[str, Any]) -> Array:
    try:
        return np.array([int(value, 16) for value in entry.get(SUMS, ())], dtype=np.uint64)
    except (ValueError, TypeError, OverflowError) as err:
        raise CacheCorruptError(f"{path}: {SUMS} in its metadata are no sums: {err}; {_AGAIN}") from err


def _mapped(path: AnyFile, length: int) -> Array:
    with path.open("rb", buffering=0) as file:
        return np.asarray(np.memmap(file, np.dtype("<i8"), "r", _HEADER_BYTES, (length,)))


def _sum(array: Array, start: int, chunk_items: int) -> int:
    return xxhash.xxh3_64_intdigest(array[start : start + chunk_items].data)
