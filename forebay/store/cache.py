"""An opened cache: a sealed folder, read through one mapping a shard. Opening and reading change nothing on disk."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forebay.errors import CacheCorruptError, CacheError, CacheMismatchError
from forebay.store.cache_document import checked_fields
from forebay.store.layout import FORMAT_VERSION, GROUPS, FieldSpec, Group
from forebay.store.metadata import check_file, load_array, read_metadata
from forebay.store.shard import OUT_OF_HANDLES, Shard, ShardEntry, shard_fields
from forebay.store.shard_table import entry_of, shard_name, table_dtype

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Verify = Literal["touch", "open", "never"]


ROW_BITS = 32
"""A slot is `shard << ROW_BITS | row`."""


def open_cache(path: str | os.PathLike[str], *, verify: Verify = "touch", max_open_shards: int = 256) -> Cache:
    """Returns the cache of a sealed folder.

    verify: `touch` checks the xxh3-64 of a sample at its first read in this process; `open` hashes every file now, at the
        speed of the disk, and no sample later (a process that gets the cache by pickle does it again); `never` trusts the disk.
    max_open_shards: mappings held open at once, the least recently used is closed first.
    Raises CacheNotFoundError, CacheIncompleteError, CacheCorruptError or CacheMismatchError; never returns a cache that is
    not whole.
    """
    return Cache(Path(path).absolute(), verify=verify, max_open_shards=max_open_shards)


class Cache:
    """Samples of a sealed cache, by index. Threads may share it; a forked child may go on using it; a pickle opens it anew.

    fields: specification by field name. lengths: int32 [num_samples] by name: `num_samples` (audio samples), `num_frames`
    (feature frames), `num_tokens`. constants: what collating needs (feature kind, prompt kind, pad ids, tables).
    """

    def __init__(self, folder: Path, *, verify: Verify, max_open_shards: int) -> None:
        self.folder = folder
        self.metadata = read_metadata(folder, format_version=FORMAT_VERSION)
        specs = checked_fields(folder, self.metadata)
        self.key: str = self.metadata["key"]
        self.recipe_key: str = self.metadata["recipe_key"]
        self.constants: Mapping[str, Any] = self.metadata["constants"]
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in specs}
        self._group_fields = {group: shard_fields(specs, group) for group in GROUPS}
        self._tables = {group: self._load_table(group) for group in GROUPS}
        self._length: int = self.metadata["num_samples"]
        # A wrong slot would hand out another sample, whose own hash is right.
        is_checked = verify != "never"
        self._slots = self._load("slots.npy", np.dtype("<i8"), (self._length,), verify=is_checked)
        self._verified = np.full(self._length, verify != "touch")
        self._verify: Verify = verify
        self._max_open_shards = max_open_shards
        self._open: OrderedDict[tuple[Group, int], Shard] = OrderedDict()
        if verify == "open":
            for path, entry in self.files():
                check_file(path, entry, verify=True)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Cache({str(self.folder)!r}, key={self.key[:16]}, num_samples={self._length})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.key, self._verify, self._max_open_shards)

    @cached_property
    def lengths(self) -> Mapping[str, Array]:
        """int32 [num_samples] by name; checked against their checksum when first asked for."""
        names = self.metadata["length_names"]
        table = self._load("lengths.npy", np.dtype("<i4"), (len(names), self._length), verify=True)
        return {name: table[i] for i, name in enumerate(names)}

    def read(self, index: int) -> dict[str, Array]:
        """Returns the tensor fields of one sample as read-only views [n, *shape] of the mapping.

        Raises IndexError outside the cache, CacheCorruptError where the bytes are not those that were written.
        """
        index = self._position(index)
        slot = int(self._slots[index])
        sample: dict[str, Array] = {}
        try:
            for group in GROUPS:
                shard = self.shard(group, slot >> ROW_BITS)
                values = shard.row(slot & ((1 << ROW_BITS) - 1))
                if not self._verified[index]:
                    shard.check_row(slot & ((1 << ROW_BITS) - 1), values)
                sample.update(values)
        except IndexError as err:
            raise self._no_such_row(index, slot) from err
        self._verified[index] = True
        return sample

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample, without the row table: about 2 us."""
        slot = int(self._slots[self._position(index)])
        try:
            return self.shard("media", slot >> ROW_BITS).string("sample_id", slot & ((1 << ROW_BITS) - 1))
        except IndexError as err:
            raise self._no_such_row(index, slot) from err

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns the tensor fields of one sample as torch tensors that are copies, never aliases of the mapping."""
        import torch

        return {name: torch.from_numpy(value.copy()) for name, value in self.read(index).items()}

    def shard(self, group: Group, index: int) -> Shard:
        """Returns an opened shard of a field group."""
        key = (group, index)
        # No lock: each of these is one operation under the GIL, and a lock held by another thread at a fork would stay
        # locked in the child. Two threads that miss together map the shard twice, and the later mapping is dropped: with
        # `setdefault`, since replacing a value unmaps the old one, without the GIL, in the middle of OrderedDict's work.
        shard = self._open.get(key)
        if shard is not None:
            with contextlib.suppress(KeyError):
                self._open.move_to_end(key)
            return shard
        if not 0 <= index < self.num_shards:
            raise IndexError(f"shard {index} of {self.num_shards}")
        shard = self._open.setdefault(key, self._opened(group, index))
        while len(self._open) > self._max_open_shards:
            with contextlib.suppress(KeyError):
                self._open.popitem(last=False)
        return shard

    def _opened(self, group: Group, index: int) -> Shard:
        """Maps a shard; where the machine has no handle left, half of those that are open here are closed first, for good."""
        while True:
            try:
                path = self.folder / shard_name(group, index)
                return Shard(path, entry_of(self._tables[group], index), self._group_fields[group])
            except CacheError as err:
                cause, num_open = err.__cause__, len(self._open)
                if not (isinstance(cause, OSError) and cause.errno in OUT_OF_HANDLES and num_open):
                    raise
            self._max_open_shards = max(1, num_open // 2)
            logger.warning("%s: out of handles, at most %d shards are kept open", self.folder, self._max_open_shards)
            while len(self._open) > num_open // 2:
                with contextlib.suppress(KeyError):
                    self._open.popitem(last=False)

    def shard_entries(self, group: Group) -> list[tuple[Path, ShardEntry]]:
        """Returns file and entry of every shard of a group."""
        table = self._tables[group]
        return [(self.folder / shard_name(group, i), entry_of(table, i)) for i in range(len(table))]

    def files(self) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        """Yields every file but metadata.json with its `size_bytes` and `xxh3_128`."""
        for name, entry in self.metadata["files"].items():
            yield self.folder / name, entry
        for group in GROUPS:
            for path, shard in self.shard_entries(group):
                yield path, {"size_bytes": shard.size_bytes, "xxh3_128": shard.xxh3_128}

    @property
    def num_shards(self) -> int:
        """Shards of each group."""
        return len(self._tables[GROUPS[0]])

    @property
    def slots(self) -> Array:
        """int64 [num_samples]: where each sample lies, `shard << 32 | row`."""
        return self._slots

    @cached_property
    def samples(self) -> pa.Table:
        """The row table: one row a sample with every table field, duration and lengths. Built once, about 1 us a cell."""
        from forebay.store.row_table import row_table

        return row_table(self)

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a text field (`language`, `source`), sorted, and which one each sample has.

        The latter is int32 [num_samples]. None where the cache has no such field.
        """
        from forebay.store.row_table import categories

        return categories(self, name)

    def _no_such_row(self, index: int, slot: int) -> CacheCorruptError:
        return CacheCorruptError(
            f"{self.folder / 'slots.npy'}: sample {index} is said to lie in shard {slot >> ROW_BITS}, row "
            f"{slot & ((1 << ROW_BITS) - 1)}, which is not there; run: forebay preprocess CONFIG --rebuild"
        )

    def _position(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of a cache with {self._length} samples ({self.folder})")
        return index % self._length

    def _load(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, verify: bool = False) -> Array:
        array = load_array(self.folder, name, self.metadata["files"][name], verify=verify)
        if array.dtype != dtype or array.shape != shape:
            raise CacheCorruptError(
                f"{self.folder / name} holds {array.dtype} {list(array.shape)}, its metadata says {dtype} {list(shape)}"
            )
        return array

    def _load_table(self, group: Group) -> Array:
        name, rows = f"{group}.npy", self.metadata["num_shards"]
        return self._load(name, table_dtype(len(self._group_fields[group])), (rows,), verify=True)

    def require_key(self, key: str) -> None:
        """Raises CacheMismatchError where this is not the cache of `key`."""
        if self.key != key:
            raise CacheMismatchError(f"{self.folder}: key is {self.key[:16]}, wanted {key[:16]}")


def _reopen(folder: Path, key: str, verify: Verify, max_open_shards: int) -> Cache:
    cache = open_cache(folder, verify=verify, max_open_shards=max_open_shards)
    cache.require_key(key)
    return cache
