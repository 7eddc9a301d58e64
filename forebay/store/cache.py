"""An opened cache: a sealed folder, read through one mapping a shard. Opening and reading change nothing on disk.

Checks come when they cost least. At open: metadata and shard tables, each by its own checksum. At first touch: slots
piece by piece, and size and both ends of a shard. At the first read in a process: a sample (xxh3-64). When it is read:
a table column (CRC-32). `forebay.store.seal` compares everything. No checksum proves who wrote a document, so
`forebay.store.metadata` and `forebay.store.key` check its values too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from forebay.errors import CacheCorruptError, CacheError, CacheMismatchError, CacheReplacedError, ConfigError
from forebay.store.by_hand import ByHand
from forebay.store.held import ORIGIN, HeldFile, HeldFolder
from forebay.store.image.stored_items import stored_items
from forebay.store.layout import (
    CHOICES,
    ROW_BITS,
    ROW_MASK,
    TEXT,
    Array,
    Constants,
    FieldSpec,
    Group,
    Ints,
    ListedItems,
)
from forebay.store.metadata import check_file, checked_fields, groups_of, items_files, load_array, read_metadata
from forebay.store.open_shards import SLOTS, CheckedArray, OpenShards, ShardFiles, no_such_row, open_slots
from forebay.store.shard import Shard, ShardEntry, row_of, rows_of, shard_fields, shard_name, table_dtype
from forebay.store.shared_disk import look_anew
from forebay.store.source import Sample, SampleBatch

if TYPE_CHECKING:
    import pyarrow as pa

    from forebay.config.remote import RemoteConfig
    from forebay.store.remote.mirror import Mirror
    from forebay.store.remote.node.node import WantedFile
    from forebay.store.row_table import AllSamples

T = TypeVar("T")
Verify = Literal["touch", "open", "never"]
_MAX_OPEN_SHARDS = 1_000
"""In one process: the kernel limits mappings (`vm.max_map_count`, 65,530), and other libraries map too."""


def open_cache(
    path: str | os.PathLike[str],
    *,
    verify: Verify = "touch",
    max_open_shards: int = 256,
    remote: RemoteConfig | None = None,
) -> Cache:
    """Returns the cache of a sealed folder, or of a URL.

    verify: `touch` checks the xxh3-64 of a sample at its first read in this process; `open` hashes every file now, at
        the speed of the disk, and no sample later (a process that gets the cache by pickle does it again); `never`
        trusts the disk.
    max_open_shards: mappings held open at once, 1 to 1,000; the least recently used is closed first.
    remote: how the store of a URL is asked, and where this node keeps its shards; None: the defaults of `[remote]`.
    Raises ConfigError for another number, and CacheNotFoundError, CacheIncompleteError, CacheCorruptError or
    CacheMismatchError; never returns a cache that is not whole. Where it is rebuilt while it is open, this cache goes
    on with what it was; see `Cache`.
    """
    if not 1 <= max_open_shards <= _MAX_OPEN_SHARDS:
        raise ConfigError(
            f"max_open_shards is {max_open_shards}, wanted 1 to {_MAX_OPEN_SHARDS}; set loader.max_open_shards"
        )
    folder = _folder(os.fspath(path), remote)
    while True:
        try:
            return Cache(folder.absolute(), verify=verify, max_open_shards=max_open_shards)
        except CacheReplacedError:  # while it was being opened
            look_anew(folder)


def _folder(text: str, remote: RemoteConfig | None) -> Path:
    if ":/" not in text:  # no URL, and nothing of stores is loaded
        return Path(text)
    from forebay.config.remote import RemoteConfig, url_or_path
    from forebay.store.remote.mirror import cache_folder

    return cache_folder(url_or_path(text), remote or RemoteConfig())


def _mirror_of(folder: Path) -> Mirror | None:
    if not os.path.lexists(folder / ORIGIN):
        return None
    from forebay.store.remote.mirror import Mirror

    return Mirror.of(folder)


class Cache(ByHand):
    """Samples of a sealed cache, by index. Threads and forked children may share it; a pickle opens it anew.

    fields: specification by field name. groups: their names, text last. listed: those whose items samples list; of
    every other group a sample has one item, which lies where its text lies. lengths:
    int32 [num_samples] by name: `num_audio_samples`, `num_frames` (feature frames), `num_tokens`. constants: what
    collating needs (feature kind, prompt kind, pad ids, tables).

    A rebuild puts another folder at the same path. A cache that is open goes on reading the folder that it opened,
    which is removed when nobody has it open any more. On a file system without locks it may be removed earlier: then a
    shard that was not mapped yet is that of the new folder where it is the same, else CacheReplacedError.
    """

    def __init__(self, folder: Path, *, verify: Verify, max_open_shards: int) -> None:
        self.folder = folder
        self._held = HeldFolder(folder)
        self.mirror = _mirror_of(folder)
        self.metadata = read_metadata(self._held)
        specs = checked_fields(folder, self.metadata)
        self.key: str = self.metadata["key"]
        self.recipe_key: str = self.metadata["recipe_key"]
        self.constants = Constants(self.metadata["constants"])
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in specs}
        shapes = groups_of(folder, self.metadata)
        self.groups = tuple(shapes)
        fields = {group: shard_fields(specs, group) for group in self.groups}
        self._files = ShardFiles(
            folder=self._held,
            mirror=self.mirror,
            fields=fields,
            tables={
                group: self._load(f"{group}.npy", table_dtype(len(fields[group])), (shape.num_shards,), verify=True)
                for group, shape in shapes.items()
            },
            listed=[group for group, shape in shapes.items() if shape.is_listed],
            # No method of this cache: it would live on until the collector of circles comes by.
            reopen=partial(_reopened, folder, verify=verify),
        )
        self._length: int = self.metadata["num_samples"]
        # A wrong slot would hand out another sample, whose own hash is right.
        self._slots = self._open_slots(SLOTS, self._length, is_checked=verify != "never")
        self._listed = {
            group: self._open_items(group, shape.num_items, is_checked=verify != "never")
            for group, shape in shapes.items()
            if shape.num_items is not None
        }
        # A memoryview gives Python ints at a third of the cost of numpy's scalars.
        self._slot_at = self._slots.array.data
        # Of zeros only the pages that are touched cost anything: opening must not grow with the number of samples.
        self._was_mended: set[int] = set()
        self._verified = (np.zeros if verify == "touch" else np.ones)(self._length, np.uint8).data
        self._stored = stored_items(self.metadata, folder=folder)
        self._verify: Verify = verify
        self._open = OpenShards(self._files, most=max_open_shards)
        self._columns = self._open.columns
        if self.mirror is not None:
            self.mirror.check_bound(
                sum(int(table["size_bytes"].max(initial=0)) for table in self._files.tables.values())
            )
        if verify == "open":
            for file, entry in self.files():
                check_file(file, entry, verify=True)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Cache({self.place!r}, key={self.key[:16]}, num_samples={self._length})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.key, self._length, self._verify, self._open.most)

    @property
    def place(self) -> str:
        """The URL or else the folder, by which any node can open the cache."""
        return str(self.folder if self.mirror is None else self.mirror.url)

    @cached_property
    def lengths(self) -> Mapping[str, Array]:  # type: ignore[override]  # mypy takes it for read-only
        """int32 [num_samples] by name; checked against their checksum when first asked for."""
        names = self.metadata["length_names"]
        table = self._load("lengths.npy", np.dtype("<i4"), (len(names), self._length), verify=True)
        return {name: table[i] for i, name in enumerate(names)}

    @property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer that made the texts, None without one."""
        found = (self.metadata["recipe"].get("text") or {}).get("tokenizer")
        return found if isinstance(found, str) else None

    @property
    def processor(self) -> str | None:
        """Digest of the processor that made the images, None without one."""
        found = (self.metadata["recipe"].get("vision") or {}).get("processor")
        return found if isinstance(found, str) else None

    def read(self, index: int) -> dict[str, Any]:
        """Returns the tensor fields of one sample as read-only views [n, *shape] of the mapping.

        Of a field of items that samples list it has a tuple of arrays, one an item. So of patches, whatever their
        codec: `patches`, uint8 [n, 3 * patch_size^2] each, and `image_grid_thw` int32 [items, 3]. Of images as their
        processor gives them: the fields of its form, as stored (codes, where the form has a table).
        Raises IndexError outside the cache, CacheCorruptError where the bytes are not those that were written.
        """
        if not 0 <= index < self._length:
            index = self._position(index)
        is_verified = self._verified[index]
        if not is_verified:
            self._slots.require(index)
        slot = self._slot_at[index]
        number, row = slot >> ROW_BITS, slot & ROW_MASK
        try:
            if not is_verified:
                for group in self._files.together:
                    shard = self._open.get(group, number)
                    shard.check_row(row, [*shard.row(row).values()])
            sample = row_of(self._columns.get(number) or self._open.columns_of(number), row)
            for group in self._listed:
                sample = self._with_items(group, index, sample, is_verified=bool(is_verified))
        except IndexError as err:
            raise no_such_row(self.folder, index, slot) from err
        except CacheCorruptError as err:
            if self.mirror is None:
                raise
            if index in self._was_mended:
                what = str(err).partition("; run: ")[0]
                raise CacheCorruptError(f"{what}, as {self.mirror.url} has it; push the cache again") from err
            self._was_mended.add(index)
            self.mirror.mend(itertools.chain.from_iterable(map(self.unit_files, self.units_of(np.array([index])))))
            return self.read(index)
        self._verified[index] = 1
        return sample

    def read_batch(self, indices: Sequence[int]) -> SampleBatch | None:
        """See `SampleSource`: without listed items that are decoded. The first read of a sample is that of `read`."""
        is_plain = all(stored.is_as_stored for stored in self._stored.values())
        if not is_plain or not indices or not 0 <= min(indices) <= max(indices) < self._length:
            return None
        verified, kept = self._verified, self._columns
        try:
            new = [place for place, index in enumerate(indices) if not verified[index]]
            for place in new:
                if self._listed:  # items are read one by one
                    self.read(indices[place])
                else:
                    self._slots.require(indices[place])
            slots = self._slots.array[indices]
            numbers, rows = (slots >> ROW_BITS).tolist(), (slots & ROW_MASK).tolist()
            shards = [kept.get(number) or self._open.columns_of(number) for number in numbers]
            found: dict[str, list[Any]] = rows_of(shards, rows)
            for place in () if self._listed else new:
                self._check_row(numbers[place], rows[place], [found[name][place] for name in found])
                verified[indices[place]] = 1
            for group in self._listed:
                found |= self._stored[group].of_batch(self._listed_columns(group, np.asarray(indices)))
        except (IndexError, CacheError):  # met again, and named, by `read`
            return None
        return SampleBatch(found, len(indices))

    def _check_row(self, number: int, row: int, values: Sequence[Array]) -> None:
        """Raises CacheCorruptError where what the groups of a sample hold is not what was written."""
        start = 0
        for group in self._files.together:
            shard = self._open.get(group, number)
            stop = start + len(shard.tensors)
            shard.check_row(row, values[start:stop])
            start = stop

    def _listed_columns(self, group: Group, indices: Ints) -> dict[str, list[Any]]:
        """Returns of each field of a group a tuple a sample, an array an item; IndexError where not one has an item."""
        offsets, slots = (checked.array for checked in self._listed[group])
        starts, stops = offsets[indices], offsets[indices + 1]
        if not 0 <= starts.min() <= stops.max() <= len(slots) or (starts > stops).any():
            raise IndexError(group)
        items = ListedItems(offsets, slots).of(indices)
        shards = [self._open.get(group, number).tensors for number in (items.slots >> ROW_BITS).tolist()]
        bounds = list(itertools.pairwise(items.offsets.tolist()))
        flat = rows_of(shards, (items.slots & ROW_MASK).tolist())
        return {name: [tuple(arrays[start:stop]) for start, stop in bounds] for name, arrays in flat.items()}

    def _with_items(self, group: Group, index: int, sample: dict[str, Any], *, is_verified: bool) -> dict[str, Any]:
        slots = self.items_of(group, index)
        rows = []
        for slot in slots:
            try:
                # Checksums prove no good will: a number below 0 would count from the end.
                shard, row = self._open.get(group, slot >> ROW_BITS), slot & ROW_MASK
                if row >= shard.entry.rows:
                    raise IndexError(row)
            except IndexError as err:
                raise self._no_item(group, index, f"it names shard {slot >> ROW_BITS}, row {slot & ROW_MASK}") from err
            values = shard.row(row)
            if not is_verified:
                shard.check_row(row, [*values.values()])
            rows.append(values)
        try:
            return self._stored[group].sample(sample, rows)
        except ValueError as err:
            raise self._no_item(group, index, str(err)) from err

    def items_of(self, group: Group, index: int) -> list[int]:
        """Returns the slots of the items of a group that a sample lists, checked against their sums."""
        offsets, slots = self._listed[group]
        offsets.require(index)
        offsets.require(index + 1)
        start, stop = offsets.array[index : index + 2].tolist()
        if not 0 <= start <= stop <= len(slots.array):
            raise self._no_item(group, index, f"its items are {start} to {stop} of {len(slots.array)}")
        slots.require_range(start, stop)
        found: list[int] = slots.array[start:stop].tolist()
        return found

    def items(self, group: Group) -> ListedItems:
        """Returns which items of a group every sample lists; all of them checked."""
        offsets, slots = (array.whole() for array in self._listed[group])
        if len(offsets) and not (offsets[0] == 0 and offsets[-1] == len(slots) and (np.diff(offsets) >= 0).all()):
            raise self._no_item(group, 0, "the lists of items do not follow each other")
        return ListedItems(offsets, slots)

    def _counted(self, group: Group) -> ListedItems:
        """Returns those that numbers of the row table are of."""
        return self.items(group).first() if CHOICES in self.constants.of(group) else self.items(group)

    @property
    def listed(self) -> tuple[Group, ...]:
        """The groups whose items samples list."""
        return tuple(self._listed)

    def shards_of(self, indices: Ints) -> Ints:
        """Returns the number of the shard of text in which each sample lies; about 50 ns a sample."""
        self._slots.require_all(indices)
        found: Ints = self._slots.array[indices] >> ROW_BITS
        return found

    def unit_count(self, group: Group) -> int:
        """Returns how many shards a group has."""
        return self._files.count(group)

    @property
    def num_units(self) -> int:
        """The number of units, each fetched and kept as one: the shards of a row together, and each other shard."""
        return self.num_shards + sum(map(self._files.count, self._listed))

    def units_of(self, indices: Ints) -> Ints:
        """Returns the units that hold these samples and their items, each once, rising."""
        found = [self.shards_of(indices)]
        for group, (offsets, slots) in self._listed.items():
            first = self._files.first_units[group]
            offsets.require_all(np.concatenate((indices, indices + 1)))
            items = ListedItems(offsets.array, slots.array).places(indices)
            slots.require_all(items)
            found.append(np.clip(slots.array[items] >> ROW_BITS, 0, self._files.count(group) - 1) + first)
        return np.unique(np.concatenate(found))

    def unit_shards(self, unit: int) -> list[tuple[Group, int]]:
        """Returns group and number of each shard of a unit."""
        if unit < self.num_shards:
            return [(group, unit) for group in self._files.together]
        group = next(g for g in reversed(self._listed) if unit >= self._files.first_units[g])
        return [(group, unit - self._files.first_units[group])]

    def unit_files(self, unit: int) -> list[WantedFile]:
        """Returns what the shards of a unit are called in a store, and how they are known there."""
        return [self.wanted(*shard) for shard in self.unit_shards(unit)]

    def unit_bytes(self, counted: Callable[[Ints], Ints]) -> Ints:
        """Returns what each unit takes: int64 [num_units]. counted: sizes of files -> what they take of a disk."""
        sizes = {group: counted(self._files.tables[group]["size_bytes"]) for group in self.groups}
        together = sum((sizes[group] for group in self._files.together), np.zeros(self.num_shards, np.int64))
        return np.concatenate([together, *(sizes[group] for group in self._listed)])

    def will_need(self, indices: Iterable[int]) -> None:
        """Asks the kernel to read these samples' pages into memory, and returns before it has; about 2 us a sample.

        For disks that are slower than the loop. What cannot be had is met again, with its error, where it is read.
        """
        for index in indices:
            with contextlib.suppress(CacheError, IndexError):
                index = self._position(index)
                slot = self._slot_at[index]
                places = [(group, slot) for group in self._files.together]
                places += [(group, item) for group in self._listed for item in self.items_of(group, index)]
                for group, place in places:
                    if self._is_here(group, place >> ROW_BITS):
                        self._open.get(group, place >> ROW_BITS).will_need(place & ROW_MASK)

    def _is_here(self, group: Group, number: int) -> bool:
        return self.mirror is None or (group, number) in self._open or self.mirror.has(self.wanted(group, number))

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample, without the row table: about 2 us."""
        index = self._position(index)
        self._slots.require(index)
        slot = self._slot_at[index]
        if (spec := self.fields.get("sample_id")) is None:
            raise CacheMismatchError(f"{self.place} has no field sample_id; run: forebay preprocess CONFIG --rebuild")
        try:
            shard = self._open.get(spec.group, slot >> ROW_BITS)
            return self._mended(lambda: shard.string("sample_id", slot & ROW_MASK), groups=(spec.group,))
        except IndexError as err:
            raise no_such_row(self.folder, index, slot) from err

    def text_of(self, index: int) -> tuple[Sample, str]:
        """See `SampleSource`."""
        index = self._position(index)
        self._slots.require(index)
        slot = self._slot_at[index]
        shard, row = self._open.get(TEXT, slot >> ROW_BITS), slot & ROW_MASK
        found = shard.row(row)
        shard.check_row(row, [*found.values()])
        return found, shard.string("text", row)

    def joined(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """See `ByHand`."""
        for stored in self._stored.values():
            sample = stored.joined(sample)
        return dict(sample)

    def shard(self, group: Group, index: int) -> Shard:
        """Returns an opened shard of a field group."""
        return self._open.get(group, index)

    def wanted(self, group: Group, index: int) -> WantedFile:
        """Returns what a shard is called in a store, and how it is known there."""
        return self._files.wanted(group, index)

    def shard_entries(self, group: Group) -> list[tuple[Path, ShardEntry]]:
        """Returns file and entry of every shard of a group."""
        count = self._files.count(group)
        return [(self.folder / shard_name(group, i), self._files.entry(group, i)) for i in range(count)]

    def files(self) -> Iterator[tuple[HeldFile, Mapping[str, Any]]]:
        """Yields every file but metadata.json with its `size_bytes` and `xxh3_128`."""
        for name, entry in self.metadata["files"].items():
            yield self._held / name, entry
        for group in self.groups:
            for index, (_, shard) in enumerate(self.shard_entries(group)):
                sums = {"size_bytes": shard.size_bytes, "xxh3_128": shard.xxh3_128}
                yield self._files.file(group, index, self._open), sums

    @property
    def num_shards(self) -> int:
        """Shards of text, and of each group in which a sample has one item of its own."""
        return self._files.count(TEXT)

    @property
    def slots(self) -> Array:
        """int64 [num_samples]: where each sample lies, `shard << 32 | row`; all of them checked."""
        return self._slots.whole()

    def by_shard(self, most: int | None = None) -> Iterator[tuple[int, Ints, Ints]]:
        """Yields each shard with samples: its number, these, and their rows in it. most: of the first samples alone."""
        from forebay.store.row_table import by_shard

        yield from by_shard(self.slots[:most], self.num_shards, no_such_row=partial(no_such_row, self.folder))

    @cached_property
    def samples(self) -> pa.Table:
        """The row table, a row a sample: every table field, duration and lengths. Built once, about 1 us a cell."""
        return self.table()

    def table(self, names: Collection[str] | None = None) -> pa.Table:
        """See `SampleSource`; only what the columns hold is read."""
        from forebay.store.row_table import row_table

        columns = self._row_columns()
        if unknown := set(names or ()) - columns.keys():
            raise KeyError(f"{self.place} has no columns {', '.join(sorted(unknown))}; it has {', '.join(columns)}")
        return self._mended(lambda: row_table(columns, names), groups=self.groups)

    @property
    def column_names(self) -> list[str]:
        """The columns of the row table, none of which is read."""
        return list(self._row_columns())

    def _row_columns(self) -> dict[str, Callable[[], Any]]:
        constants = self.constants if "num_audio_samples" in self.lengths else None
        of_items = (field for field in self.fields.values() if field.group in self._listed and field.role == "table")
        listed = {field: partial(self._counted, field.group) for field in of_items if field.dtype != "str"}
        return self._all_samples.row_columns(dict(self.lengths), constants=constants, listed=listed)

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """See `SampleSource`."""
        return self._mended(lambda: self._all_samples.categories(name), groups=self.groups)

    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order, all of which are read; the key if there are none."""
        return self._mended(self._all_samples.ids_digest, groups=self.groups)

    def told(self) -> bytes:
        """Returns what a store is to tell of all samples at once, see `ToldColumns`."""
        return self._all_samples.dump()

    @cached_property
    def _all_samples(self) -> AllSamples:
        from forebay.store.row_table import AllSamples

        groups = self._files.together
        fields = [
            field for group in groups for field in self.fields.values() if (field.group, field.role) == (group, "table")
        ]
        return AllSamples(
            key=self.key, fields={field.name: field for field in fields}, slots=self._slots, shards=self._open
        )

    def _no_item(self, group: Group, index: int, what: str) -> CacheCorruptError:
        return CacheCorruptError(
            f"{self.folder}: sample {index}, {group}: {what}; run: forebay preprocess CONFIG --verify, or --rebuild"
        )

    def _open_slots(self, name: str, length: int, *, is_checked: bool) -> CheckedArray:
        entry, mend = self.metadata["files"][name], None if self.mirror is None else self.mirror.mend_small
        return self._mended(lambda: open_slots(self._held, name, entry, length=length, verify=is_checked, mend=mend))

    def _open_items(self, group: Group, num_items: int, *, is_checked: bool) -> tuple[CheckedArray, CheckedArray]:
        offsets, slots = items_files(group)
        return (
            self._open_slots(offsets, self._length + 1, is_checked=is_checked),
            self._open_slots(slots, num_items, is_checked=is_checked),
        )

    def _position(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of a cache with {self._length} samples ({self.place})")
        return index % self._length

    def _load(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, verify: bool = False) -> Array:
        array = self._mended(lambda: load_array(self._held, name, self.metadata["files"][name], verify=verify))
        if array.dtype != dtype or array.shape != shape:
            raise CacheCorruptError(
                f"{self.folder / name} holds {array.dtype} {list(array.shape)}, its metadata says {dtype} {list(shape)}"
            )
        return array

    def _mended(self, load: Callable[[], T], *, groups: Collection[Group] = ()) -> T:
        """Returns what is loaded; damaged files of a store are fetched again, shards of `groups` too."""
        try:
            return load()
        except CacheCorruptError:
            if self.mirror is None:
                raise
            self.mirror.mend_small()
            self.mirror.mend(self.wanted(group, i) for group in groups for i in range(self._files.count(group)))
            return load()

    def require_key(self, key: str) -> None:
        """Raises CacheMismatchError where this is not the cache of `key`."""
        if self.key != key:
            raise CacheMismatchError(f"{self.place}: key is {self.key[:16]}, wanted {key[:16]}")


def _reopened(folder: Path, *, verify: Verify) -> ShardFiles:
    return open_cache(folder, verify=verify, max_open_shards=1)._files


def _reopen(folder: Path, key: str, num_samples: int, verify: Verify, max_open_shards: int) -> Cache:
    """Opens a pickled cache. One that was rebuilt since has the same samples in the same order, whatever its layout."""
    cache = open_cache(folder, verify=verify, max_open_shards=max_open_shards)
    cache.require_key(key)
    if len(cache) != num_samples:
        raise CacheReplacedError(
            f"{folder} was replaced: it has {len(cache)} samples, the cache that was pickled had {num_samples}; "
            "open it again"
        )
    return cache
