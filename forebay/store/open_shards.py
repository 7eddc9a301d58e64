"""The shards of a cache as files, the bounded set that is mapped, and flat arrays that are checked where touched."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError, CacheError, CacheReplacedError
from forebay.store.held import AnyFile, AnyFolder, HeldFile, HeldFolder
from forebay.store.layout import ROW_BITS, ROW_MASK, TEXT, Array, FieldSpec, Group, Ints
from forebay.store.metadata import check_file
from forebay.store.shard import OUT_OF_HANDLES, Shard, ShardEntry, TensorColumns, entry_of, shard_name

if TYPE_CHECKING:
    from forebay.store.remote.mirror import Mirror
    from forebay.store.remote.node.node import WantedFile
    from forebay.store.remote.node.shared import Holder

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ShardFiles:
    """Where the shards of a cache lie, and what its shard tables say of them.

    folder: the cache, held. mirror: of its URL, None for a cache of this machine. fields, tables: by group. listed:
    groups whose items samples list. reopen: gives the shards of the cache that stands at the folder's path by now.
    """

    folder: HeldFolder
    mirror: Mirror | None
    fields: Mapping[Group, tuple[FieldSpec, ...]]
    tables: Mapping[Group, Array]
    listed: Collection[Group]
    reopen: Callable[[], ShardFiles]

    def __post_init__(self) -> None:
        self._successor: ShardFiles | None = None
        self.together = tuple(group for group in self.tables if group not in self.listed)
        """Groups in which a sample lies in the same shard and row: its text, and what has one item a row."""
        first, self.first_units = self.count(TEXT), dict.fromkeys(self.together, 0)
        """The unit of the first shard of each group: what is fetched and kept as one, see `Cache.units_of`."""
        for group in self.listed:
            self.first_units[group] = first
            first += self.count(group)

    def count(self, group: Group) -> int:
        """Returns how many shards a group has."""
        return len(self.tables[group])

    def entry(self, group: Group, index: int) -> ShardEntry:
        """Returns what the table says of a shard."""
        return entry_of(self.tables[group], index)

    def wanted(self, group: Group, index: int) -> WantedFile:
        """Returns what a shard is called in a store, and how it is known there."""
        from forebay.store.remote.node.node import WantedFile

        entry = self.entry(group, index)
        name, number = shard_name(group, index), self.first_units[group] + index
        return WantedFile(name=name, size_bytes=entry.size_bytes, xxh3_128=entry.xxh3_128, number=number)

    def file(self, group: Group, index: int, holder: Holder) -> HeldFile:
        """Returns the file of a shard, which is there when it is asked for. holder: who keeps it mapped."""
        if self.mirror is None:
            return self.folder / shard_name(group, index)
        return self.mirror.file(self.folder, self.wanted(group, index), holder)

    def opened(self, group: Group, index: int, holder: Holder) -> Shard:
        """Returns a shard, mapped. Raises what `Shard` does."""
        entry = self.entry(group, index)
        try:
            return Shard(self.file(group, index, holder), entry, self.fields[group])
        except (CacheCorruptError, CacheReplacedError):  # a rebuild or repair has perhaps made it again
            successor = self._standing()
            if successor is None or not successor.has(group, index, entry):
                raise
        return successor.opened(group, index, holder)

    def has(self, group: Group, index: int, entry: ShardEntry) -> bool:
        """Whether this shard is in its place here too."""
        return group in self.tables and index < self.count(group) and self.entry(group, index) == entry

    def _standing(self) -> ShardFiles | None:
        """Returns the shards of the cache that stands in this one's place by now, if another one does."""
        if self._successor is None and self.folder.is_replaced():
            with contextlib.suppress(CacheError):
                self._successor = self.reopen()
        return self._successor


class OpenShards:
    """The shards that are mapped, at most so many of them. Threads and forked children may share it."""

    def __init__(self, files: ShardFiles, *, most: int) -> None:
        """Maps nothing yet. most: mappings kept at once; the least recently used is closed first."""
        self.files, self.most = files, most
        self.folder = files.folder.path
        self.columns: dict[int, TensorColumns] = {}
        """By number, of the shards of all groups that lie together; filled where every shard may stay open."""
        self._is_bounded = sum(map(len, files.tables.values())) > most
        self._shards: OrderedDict[tuple[Group, int], Shard] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, key: tuple[Group, int]) -> bool:
        return key in self._shards

    def get(self, group: Group, index: int) -> Shard:
        """Returns an opened shard of a field group; IndexError where there is none of this number."""
        key = (group, index)
        # No lock: each of these is one operation under the GIL, and a lock held by another thread at a fork would stay
        # locked in the child. Two threads that miss together map the shard twice, and the later mapping is dropped:
        # with `setdefault`, since replacing a value unmaps the old one, without the GIL, in the middle of OrderedDict's
        # work.
        shard = self._shards.get(key)
        if shard is not None:
            if self._is_bounded:
                with contextlib.suppress(KeyError):
                    self._shards.move_to_end(key)
            return shard
        if not 0 <= index < self.files.count(group):
            raise IndexError(f"shard {index} of {self.files.count(group)}")
        shard = self._shards.setdefault(key, self._opened(group, index))
        self._close_down_to(self.most)
        return shard

    def columns_of(self, number: int) -> TensorColumns:
        """Returns the tensor columns of the shards that lie together, text last; kept where every one may stay open."""
        columns = tuple(column for group in self.files.together for column in self.get(group, number).tensors)
        return columns if self._is_bounded else self.columns.setdefault(number, columns)

    def let_go(self, name: str | None) -> None:
        """Closes mappings of a shard, or the older half of all (None); what was handed out keeps its mapping."""
        if name is None:
            num_kept = len(self._shards) // 2
            self.columns.clear()
            self._close_down_to(num_kept)
            return
        for group, number in [key for key in self._shards.copy() if shard_name(*key) == name]:
            self.columns.pop(number, None)
            self._shards.pop((group, number), None)

    def _opened(self, group: Group, index: int) -> Shard:
        """Maps a shard; where the machine has no handle left, half of the open ones are closed first, for good."""
        while True:
            try:
                return self.files.opened(group, index, self)
            except CacheError as err:
                num_open = len(self._shards)
                # No name on the cause: this frame would hold it, and it this frame, with the callers' shards.
                if not (isinstance(err.__cause__, OSError) and err.__cause__.errno in OUT_OF_HANDLES and num_open):
                    raise
            self.most, self._is_bounded = max(1, num_open // 2), True
            self.columns.clear()  # these views hold mappings too
            mirror = self.files.mirror
            place = self.folder if mirror is None else mirror.url
            logger.warning("%s: out of handles, at most %d shards are kept open", place, self.most)
            self._close_down_to(num_open // 2)

    def _close_down_to(self, number: int) -> None:
        while len(self._shards) > number:
            with contextlib.suppress(KeyError):
                self._shards.popitem(last=False)


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
    """A flat array whose chunks are checked before their first use; `require` comes first. Threads may share it."""

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
        """Takes `array` as it is; CacheCorruptError where there are not as many sums as chunks.

        sums: of `chunk_sums`, None where nothing is checked. again: what a message tells to run. mend: puts right what
        lies under the array, where that can be done.
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

    def require_range(self, start: int, stop: int) -> None:
        """Raises what `require` does, for the items from `start` on, before `stop`."""
        for chunk in range(start // self._chunk_items, -(-stop // self._chunk_items) if start < stop else 0):
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
