"""A group of items as a build sees it: what makes their values, which items rows have, and where shards begin and end.

A row has one item of a group, itself, or lists any number of them. What several rows list is stored once a source file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import SampleError
from forebay.preprocess.workspace import Failure
from forebay.rows.kept_columns import column_of, fields_of
from forebay.rows.listed_frames import frame_files, renumbered
from forebay.rows.listed_media import item_name
from forebay.rows.manifest import LISTS, Manifest, flattened
from forebay.rows.reader import Failures
from forebay.rows.segments import Bounds, reading_order, segment_columns, segment_of
from forebay.rows.source_table import SourceFiles
from forebay.store.image.codec import Codec
from forebay.store.layout import Array, FieldSpec, Group, Ints
from forebay.store.shard import Shard, ShardEntry
from forebay.store.source_files import SourceFile


@dataclass(frozen=True, slots=True)
class Coded:
    """A column of strings: `names[codes[i]]` is that of row i, `names[0]` is empty. codes: int32 [rows]."""

    names: tuple[str, ...]
    codes: Array

    def counts(self, chosen: Array | None = None, weights: Array | None = None) -> Array:
        """Returns how many rows have each name, or the sum of their weights. chosen: bool [rows], those that count."""
        rows = slice(None) if chosen is None else chosen
        return np.bincount(self.codes[rows], None if weights is None else weights[rows], len(self.names))


@dataclass(slots=True)
class Coder:
    """Numbers for strings, in order of first appearance in all shards that it is asked about; 0 is the empty string."""

    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    def number(self, name: str) -> int:
        """Returns the number of a string."""
        return self._numbers.setdefault(name, len(self._numbers))

    def column(self, shard: Shard, name: str) -> Array:
        """Returns the numbers of a shard's string field, int32 [rows], after checking its CRC-32."""
        values, offsets = shard.column(name)
        rows = len(offsets) - 1
        if not len(values):
            return np.zeros(rows, np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        encoded = pa.Array.from_buffers(pa.large_binary(), rows, buffers).dictionary_encode()
        texts = (data.decode("utf-8", "surrogateescape") for data in encoded.dictionary.to_pylist())
        numbers: Array = np.array([self.number(text) for text in texts], np.int32)
        return np.asarray(numbers[encoded.indices.to_numpy()])

    def coded(self, codes: Array) -> Coded:
        """Returns a column of numbers that were given here."""
        return Coded(tuple(self._numbers), codes)


Values = dict[str, Any]
"""Fields of one item or row; of one that failed its table fields, `failure` and `message`."""


class Read(Protocol):
    """The reader of encoded bytes: (index of the source file, offset, size, stretch) -> those of one item."""

    def __call__(self, file: int, offset: int, size: int, segment: Bounds | None = None, /) -> bytes:
        """Returns the bytes; those of a segment are a WAV."""


Finished = Mapping[Group, Sequence[tuple[Path, ShardEntry]]]
"""File and entry of every shard, by group."""


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a group as they are stored, and those of each row of a listing.

    table: a row an item, in the order in which they are stored: those of each source file by their first mention,
    stretches of a recording in time behind the first of them.
    group: int [items], the source file that each is cut by. different: items of the listing, each once. offsets: int64
    [rows + 1], None where each row is its own item; those of row i are places[offsets[i] : offsets[i + 1]].
    are_choices: a batch has one of a row's items.
    """

    table: pa.Table
    group: Array
    different: int = 0
    offsets: Ints | None = None
    places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    are_choices: bool = False

    @classmethod
    def own(cls, rows: pa.Table) -> Items:
        """Returns the items of rows that are their own."""
        return cls(rows, rows["group"].to_numpy(), len(rows))

    @classmethod
    def listed(cls, rows: pa.Table, column: str, table: pa.Table) -> Items:
        """Returns the items that rows list. column: of lists of places in `table`, each of whose items is different."""
        offsets, flat = flattened(rows[column])
        owner = np.repeat(rows["group"].to_numpy().astype(np.int64), np.diff(offsets))
        count = max(len(table), 1)
        pairs, first, inverse = np.unique(owner * count + flat, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        if segment_columns(table):
            order = order[reading_order(table.take(pa.array(pairs[order] % count)), pairs[order] // count)]
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        stored = pairs[order]
        taken = table.take(pa.array(stored % count))
        return cls(taken, stored // count, len(table), offsets, rank[inverse.reshape(-1)])

    @property
    def is_listed(self) -> bool:
        """Whether rows list their items."""
        return self.offsets is not None

    def of_rows(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Returns the offsets, from 0, and the places of the items of rows [start, stop)."""
        if self.offsets is None:
            return np.arange(stop - start + 1), np.arange(start, stop)
        offsets = self.offsets[start : stop + 1]
        return offsets - offsets[0], self.places[offsets[0] : offsets[-1]]

    def sums(self, numbers: Array) -> Array:
        """Returns the sum of the numbers of each row's items, of choices the largest one. numbers: integers [items]."""
        if self.offsets is None:
            return numbers
        if self.are_choices and len(self.places):  # a row has one at least
            return np.asarray(np.maximum.reduceat(numbers[self.places], self.offsets[:-1]))
        sums = np.concatenate(([0], np.cumsum(numbers[self.places])))
        return np.asarray(sums[self.offsets[1:]] - sums[self.offsets[:-1]])

    def first(self, codes: Array) -> Array:
        """Returns the first code of each row's items that is not 0. codes: int32 [items]."""
        if self.offsets is None:
            return codes
        of_rows = np.zeros(len(self.offsets) - 1, codes.dtype)
        mentioned = codes[self.places]
        rows = np.repeat(np.arange(len(of_rows)), np.diff(self.offsets))[mentioned != 0]
        bad, first = np.unique(rows, return_index=True)
        of_rows[bad] = mentioned[mentioned != 0][first]
        return of_rows


class ItemGroup(Protocol):
    """A group of items: its steps, and what is known of its items. Picklable: a worker keeps what it loaded for one.

    A new kind of item is a class of this form and a line in `GROUPS` of `forebay.preprocess.groups`.
    """

    @property
    def name(self) -> Group:
        """The group's name, as the recipe has it."""

    @property
    def unit(self) -> str:
        """The word for an item: clip, image."""

    @property
    def lists(self) -> str | None:
        """The column of a listing whose rows list their items; None: each row is its own item."""

    @property
    def tells(self) -> bool:
        """Whether prompts are told of its items."""

    @property
    def column(self) -> str:
        """The column of an `hf` source that holds the items."""

    @property
    def max_sample_bytes(self) -> int:
        """The most that one encoded item may have."""

    @property
    def length_names(self) -> tuple[str, ...]:
        """The names of the numbers that `lengths` gives."""

    @property
    def read_values(self) -> frozenset[str]:
        """Tensor fields whose values `lengths` reads; of others it reads how many each item has."""

    @property
    def merge_size(self) -> int | None:
        """How many patches of an image make a token, by side; None of what is not cut into patches."""

    def probe_told(self, place: int) -> Any:
        """Returns what prompts are told of a built-in item, 0 or 1."""

    @property
    def codec(self) -> str | None:
        """How items are stored, where there are several ways of it."""

    def items(self, manifest: Manifest) -> Items:
        """Returns the items of a manifest as they are stored."""

    def checked(self, manifest: Manifest) -> Manifest:
        """Returns a manifest with what the group knows of its items, without rows whose items it refuses."""

    def under(self, codec: Codec) -> Self:
        """Returns the group whose items are stored by a codec, where there are several."""

    def measured(self, constants: Mapping[str, Any]) -> Self:
        """Returns the group that knows its constants: what a worker found need not be found again."""

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of an item, those of the row table among them."""

    def lengths(self, shard: Shard) -> Array:
        """Returns `length_names` of the items of a shard, int64 [names, items]; 0 of one that failed."""

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:
        """Returns what the key of a shard says of its items: the bytes that they are made of, by content.

        hashes: of the source files.
        """

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:
        """Returns what a task needs to make these items, with `sample_id`, what to call one."""

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        """Yields the fields of every item in order; see `Values` for one that fails.

        An item's values depend on that item alone, whatever items are asked for with it.
        """

    def told(self, items: pa.Table) -> list[Any]:
        """Returns what prompts are told of these items."""

    def listed_lengths(self, items: pa.Table, files: Sequence[SourceFile]) -> dict[str, Array]:
        """Returns those of `length_names` that are known before an item is decoded, integers [items]."""

    def check(self, values: Mapping[str, Any], row: pa.Table) -> None:
        """Raises SampleError where a build leaves a row out for what was made of its own item."""

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns a sample with what `samples` gave of its items."""

    @property
    def decoded_name(self) -> str:
        """The name that a plain data set gives the decoded items."""

    def decoded(self, data: bytes, *, sample_id: str) -> Any:
        """Returns an item as a plain data set has it: decoded, without features. Raises SampleError."""

    def constants(self) -> dict[str, Any]:
        """Returns what collating needs and is equal for all samples: kinds, rates, tables."""

    def probe(self) -> str:
        """Returns the xxh3-128 of what the steps give for small built-in inputs."""

    def probed(self) -> Iterator[Values]:
        """Yields what is made of these inputs as `samples` gives it."""

    def estimate_bytes(self, items: pa.Table) -> int:
        """Returns the expected size of these items in bytes, from what the listing knows."""

    def refused(self, lengths: Mapping[str, Array], rows: pa.Table, why: Coder) -> Array:
        """Returns why rows are no samples for what was made of their items: numbers of `why`, 0 for samples.

        lengths: integers [rows] by name. rows: of the listing.
        """

    def refusals(self, lengths: Mapping[str, Array], rows: pa.Table, codes: Array, why: Coder) -> tuple[Failure, ...]:
        """Returns the failures that `refused` found and that need words of their own. codes: of all rows in the end."""

    def summary(self, lengths: Mapping[str, Array], rows: pa.Table, items: Items, keep: Array) -> dict[str, Any]:
        """Returns what metadata.json says of the items of the samples that are kept."""


def item_names(items: pa.Table, files: Sequence[SourceFile]) -> list[str]:
    """Returns what to call some listed items: the file, and the member or the row inside it."""
    return [
        item_name(files[row["file"]], row["member"], offset=row["offset"], size=row["size"], segment=segment_of(row))
        for row in items.select(["file", "member", "offset", "size", *segment_columns(items)]).to_pylist()
    ]


def without(manifest: Manifest, group: Group, refused: Mapping[int, SampleError]) -> Manifest:
    """Returns a manifest without the rows that list a refused item. refused: by place in the items of the group."""
    offsets, flat = flattened(manifest.rows[LISTS[group]])
    is_bad = np.isin(flat, list(refused))
    if not is_bad.any():  # none, or another group has left them out
        return manifest
    rows = np.repeat(np.arange(len(manifest.rows)), np.diff(offsets))
    bad, first = np.unique(rows[is_bad], return_index=True)
    culprits = flat[is_bad][first].tolist()
    left_out = manifest.rows.take(pa.array(bad))
    names = item_names(manifest.items[group].take(pa.array(culprits)), manifest.files)
    reasons = [refused[item].reason for item in culprits]
    messages = [f"{name}: {refused[item]}" for name, item in zip(names, culprits, strict=True)]
    columns = (left_out["row"].to_pylist(), left_out["sample_id"].to_pylist(), reasons, messages)
    found = Failures()
    for row, sample_id, reason, message in zip(*columns, strict=True):
        kind = "excluded" if reason in EXCLUDING else "failed"
        found.add(row, sample_id, reason, message, kind=kind)
    keep = np.ones(len(manifest.rows), bool)
    keep[bad] = False
    return replace(
        manifest,
        rows=manifest.rows.filter(pa.array(keep)),
        rejected=pa.concat_tables([manifest.rejected, found.table()]),
    )


def narrow(rows: pa.Table, files: Sequence[SourceFile]) -> tuple[SourceFiles, pa.Table]:
    """Returns the files that rows use, and a copy of the rows with `file`, and those of frames, renumbered to them.

    A copy: a slice keeps the whole table that it was cut from, and its pickle sends all of it.
    """
    numbers = np.concatenate([rows["file"].to_numpy(), frame_files(rows)])
    used, inverse = np.unique(numbers, return_inverse=True)
    index = rows.column_names.index("file")
    taken = renumbered(rows.take(pa.array(np.arange(len(rows)))), inverse[len(rows) :])
    return SourceFiles.of(files).take(used), taken.set_column(index, "file", pa.array(inverse[: len(rows)], pa.int32()))


def with_group(fields: Sequence[FieldSpec], group: Group) -> tuple[FieldSpec, ...]:
    """Returns fields as those of a group."""
    return tuple(replace(field, group=group) for field in fields)


def values_digest(samples: Iterable[Mapping[str, Any]]) -> str:
    """Returns the xxh3-128 of the names and values of some samples; messages do not count."""
    state = xxhash.xxh3_128()
    for sample in samples:
        for name in sorted(sample):
            value = sample[name]
            if name != "message":
                state.update(f"{name}\0".encode())
                state.update(value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())
    return state.hexdigest()


NO_TEXT = "no_text"
"""Why a row without a text is left out, where its kind of source needs one."""
EXCLUDING = frozenset({"below_step", "empty_text", "label_too_long", "no_phones", NO_TEXT, "too_long", "too_short"})
"""Reasons that say that a good sample is not wanted; all others say that a sample is bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One shard of one group: its items, or rows of the listing, [start, stop), and its key. The unit of work."""

    group: Group
    index: int
    start: int
    stop: int
    key: str

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self.stop - self.start


def cut_rows(groups: Array, *, rows_per_shard: int) -> Iterator[tuple[int, int]]:
    """Yields [start, stop) of every shard: up to `rows_per_shard` consecutive rows of one source file.

    groups: int [rows], the file that each row is cut by (its tar; the manifest, where media are files of their own).
    """
    borders = (np.flatnonzero(np.diff(groups)) + 1).tolist()
    for start, stop in zip([0, *borders], [*borders, len(groups)], strict=True):
        yield from ((a, min(a + rows_per_shard, stop)) for a in range(start, stop, rows_per_shard))


def kept_document(rows: pa.Table) -> dict[str, Any]:
    """Returns what the key of a text shard says of the kept columns of its rows; nothing where there is none."""
    if not (kept := fields_of(rows)):
        return {}
    values = pa.table({field.name: column_of(rows, field.name) for field in kept})
    return {"columns": [[field.name, field.dtype] for field in kept], "column_values": columns_digest(values)}


def columns_digest(rows: pa.Table, files: Array | None = None) -> str:
    """Returns the xxh3-128 of the values alone: arrow's own bytes depend on slicing and chunking."""
    state = xxhash.xxh3_128(np.ascontiguousarray([] if files is None else files, np.int64).tobytes())
    for name in rows.column_names:
        column = rows[name].combine_chunks()
        state.update(f"{name}:{len(column)}\0".encode())
        state.update(np.packbits(column.is_null().to_numpy(zero_copy_only=False)).tobytes())
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            kind = np.int64 if pa.types.is_integer(column.type) else np.float64
            column = column.fill_null(0) if column.null_count else column
            state.update(np.ascontiguousarray(column.to_numpy(), kind).tobytes())
            continue
        # Neither call is free for a column that needs it not, and there are six columns a shard.
        binary = column if column.type == pa.large_string() else column.cast(pa.large_string())
        binary = binary.fill_null("") if binary.null_count else binary
        offsets = np.frombuffer(binary.buffers()[1], np.int64)[binary.offset : binary.offset + len(binary) + 1]
        state.update(np.diff(offsets).tobytes())
        data = binary.buffers()[2]
        state.update(memoryview(data)[offsets[0] : offsets[-1]] if data is not None else b"")
    return state.hexdigest()
