"""The row table of a cache as a pyarrow table, single columns of it, and the digest of the ids.

A cache of a store is asked for what its push wrote down beside it, so that no shard is downloaded for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import CacheCorruptError
from forebay.store.layout import (
    NULL_TEXT,
    ROW_BITS,
    ROW_MASK,
    TEXT,
    Array,
    FieldSpec,
    Group,
    Ints,
    ListedItems,
    sorted_categories,
)
from forebay.store.open_shards import CheckedArray, OpenShards, no_such_row
from forebay.store.shard import Shard

if TYPE_CHECKING:
    import pyarrow as pa

    from forebay.store.remote.small_files import ToldColumns


@dataclass(frozen=True, kw_only=True)
class SampleColumns:
    """The stored columns of a cache that have a row a sample, handed out in the order of the samples.

    fields: those of the row table. num_shards: of each group. slots: int64 [num_samples]. shard: opens one.
    no_such_row: gives the error for a sample (index, slot) whose slot leads nowhere.
    """

    fields: Mapping[str, FieldSpec]
    num_shards: int
    slots: Array
    shard: Callable[[Group, int], Shard]
    no_such_row: Callable[[int, int], CacheCorruptError]

    def column(self, name: str, made: Callable[[pa.Array], pa.Array] = lambda chunk: chunk) -> pa.ChunkedArray:
        """Returns a field of every sample. Bytes of a string that are no UTF-8 are written as escapes (`\\xff`).

        made: what is kept of the samples of a shard; beside it a single shard is in memory.
        """
        field = self.fields[name]
        convert = (_nullable_strings if field.nullable else _strings) if field.dtype == "str" else _numbers
        kind = pa.large_string() if field.dtype == "str" else pa.from_numpy_dtype(field.numpy_dtype)
        chunks, order = [], [np.zeros(0, np.int64)]
        for number, samples, rows in by_shard(self.slots, self.num_shards, no_such_row=self.no_such_row):
            shard = self.shard(field.group, number)
            if (is_lost := rows >= shard.entry.rows).any():
                index = int(samples[np.argmax(is_lost)])
                raise self.no_such_row(index, int(self.slots[index]))
            chunks.append(made(convert(*shard.column(name)).take(pa.array(rows))))
            shard.drop_pages()
            order.append(samples)
        found, places = pa.chunked_array(chunks, made(pa.array([], kind)).type).combine_chunks(), np.concatenate(order)
        del chunks
        pa.default_memory_pool().release_unused()  # as much as the column
        is_sorted = bool((np.diff(places) > 0).all())
        return pa.chunked_array([found if is_sorted else found.take(pa.array(np.argsort(places)))])


def by_shard(
    slots: Array, num_shards: int, *, no_such_row: Callable[[int, int], CacheCorruptError]
) -> Iterator[tuple[int, Ints, Ints]]:
    """Yields each shard with samples: its number, these, their rows in it. no_such_row: of `SampleColumns`."""
    shards = slots >> ROW_BITS
    order = np.argsort(shards, kind="stable")
    bounds = np.searchsorted(shards[order], np.arange(num_shards + 1))
    if lost := [*order[: bounds[0]].tolist(), *order[bounds[-1] :].tolist()]:
        raise no_such_row(min(lost), int(slots[min(lost)]))
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        own = order[bounds[number] : bounds[number + 1]]
        yield number, own, slots[own] & ROW_MASK


def row_table(columns: Mapping[str, Callable[[], Any]], names: Collection[str] | None = None) -> pa.Table:
    """Returns one row a sample, in sample order. columns: of `row_columns`. names: those wanted; None: all of them."""
    return pa.table({name: make() for name, make in columns.items() if names is None or name in names})


def row_columns(
    columns: SampleColumns, lengths: Mapping[str, Array], *, rate_hz: int | None
) -> dict[str, Callable[[], Any]]:
    """Returns what makes each column of the row table: `index`, the table fields, `duration_s`, and the lengths.

    rate_hz: of the audio that `num_audio_samples` counts; None: there is no `duration_s`.
    """
    made: dict[str, Callable[[], Any]] = {"index": lambda: pa.array(np.arange(len(columns.slots)))}
    made |= {name: partial(columns.column, name) for name in sorted(columns.fields, key="sample_id".__ne__)}
    if rate_hz is not None:
        made["duration_s"] = lambda: pa.array(np.asarray(lengths["num_audio_samples"]) / rate_hz)
    return made | {name: partial(pa.array, np.asarray(values)) for name, values in lengths.items()}


def rate_of(folder: Path, constants: Mapping[str, Any], lengths: Mapping[str, Array]) -> int:
    """Returns the sample rate of a cache with audio; CacheCorruptError for a signed document that has none."""
    rate = constants.get("sample_rate_hz")
    if not isinstance(rate, int) or rate < 1 or "num_audio_samples" not in lengths:
        raise CacheCorruptError(
            f"{folder}: its metadata.json is none that forebay writes: sample_rate_hz is {rate!r:.60}, lengths are "
            f"{', '.join(lengths)}; run: forebay preprocess CONFIG --rebuild"
        )
    return rate


def categories(columns: SampleColumns, name: str) -> tuple[list[str], Array] | None:
    """Returns a table field's different values, sorted, and which one each sample has, int32 [num_samples].

    None without such a field. Reads that field alone. Values are texts, numbers as they are written, a null as "".
    """
    if name not in columns.fields:
        return None
    column = columns.column(name, lambda chunk: as_texts(chunk).dictionary_encode()).combine_chunks()
    return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())


def as_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column as texts: numbers as they are written, a null as the empty text."""
    return column.cast(pa.large_string()).fill_null("")


def strings_digest(column: pa.ChunkedArray) -> str:
    """Returns the xxh3-128 of strings and their lengths, 32 hex digits, however they are chunked. None may be null."""
    lengths, texts = xxhash.xxh3_128(), xxhash.xxh3_128()
    for chunk in column.cast(pa.large_binary()).chunks:
        offsets = np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        lengths.update(np.ascontiguousarray(np.diff(offsets)).data)
        data = chunk.buffers()[2]
        if data is not None and len(offsets):
            texts.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
    lengths.update(texts.digest())
    return lengths.hexdigest()


def _strings(values: Array, offsets: Array) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(values.tobytes())]
    array = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        # A tar may name its members in any bytes; a table, and the parquet file made of it, holds UTF-8 alone.
        data, ends = values.tobytes(), offsets.tolist()
        texts = [data[a:b].decode("utf-8", "backslashreplace") for a, b in itertools.pairwise(ends)]
        return pa.array(texts, pa.large_string())
    return array


def _nullable_strings(values: Array, offsets: Array) -> pa.Array:
    starts = offsets[:-1]
    is_null = np.diff(offsets) == len(NULL_TEXT)
    is_null[is_null] = values[starts[is_null]] == NULL_TEXT[0]
    if not is_null.any():
        return _strings(values, offsets)
    import pyarrow.compute as pc  # not at import: it makes 286 functions

    # The texts without those bytes, and then the nulls at their places.
    kept = np.ones(len(values), bool)
    kept[starts[is_null]] = False
    moved = offsets - np.concatenate(([0], np.cumsum(is_null)))
    return pc.if_else(pa.array(is_null), pa.scalar(None, pa.large_string()), _strings(values[kept], moved))


def _numbers(values: Array, offsets: Array) -> pa.Array:
    return pa.array(_present(values, offsets), mask=np.diff(offsets) == 0)


def listed_numbers(name: str, shards: Iterable[Shard], items: ListedItems) -> pa.Array:
    """Returns a number of the items that each sample lists: of none a null, of several their mean, or if it is whole
    a null.
    """
    columns, means, counts = [], np.zeros(0), np.diff(items.offsets)
    for shard in shards:
        columns.append(_present(*shard.column(name)))
        shard.drop_pages()
    places = np.cumsum([0, *map(len, columns)])[items.slots >> ROW_BITS] + (items.slots & ROW_MASK)
    if columns:
        values = np.concatenate(columns)
        sums = np.bincount(np.repeat(np.arange(len(counts)), counts), values[places], len(counts))
        means = (sums / np.maximum(counts, 1)).astype(values.dtype)
    return pa.array(means, mask=counts == 0 if means.dtype.kind == "f" else counts != 1)


def _present(values: Array, offsets: Array) -> Array:
    """Returns the number of each row, 0 of one that has none. values, offsets: of `Shard.column`."""
    present = np.diff(offsets) > 0
    result = np.zeros(len(present), values.dtype)
    result[present] = values[offsets[:-1][present]]
    return result


@dataclass(kw_only=True)
class AllSamples:
    """The samples of a cache of this `key`, in their order. fields: of the row table. slots: where each sample lies."""

    key: str
    fields: Mapping[str, FieldSpec]
    slots: CheckedArray
    shards: OpenShards

    def row_columns(
        self,
        lengths: Mapping[str, Array],
        *,
        constants: Mapping[str, Any] | None,
        listed: Mapping[FieldSpec, Callable[[], ListedItems]],
    ) -> dict[str, Callable[[], Any]]:
        """Returns what makes each column of the row table.

        constants: of a cache whose lengths count audio. listed: numbers of the items that samples list, and which.
        """
        rate_hz = None if constants is None else rate_of(self.shards.folder, constants, lengths)
        made = row_columns(self._columns(), lengths, rate_hz=rate_hz)
        texts = [name for name, field in self.fields.items() if field.dtype == "str"]
        # A length counts all items of a sample, as num_audio_samples does its clips; it is no number of one of them.
        of_items = {field: items for field, items in listed.items() if field.name not in lengths}
        made |= {field.name: partial(self._listed, field, items) for field, items in of_items.items()}
        return made | {name: partial(self._texts, name, made[name]) for name in texts}

    def _listed(self, field: FieldSpec, items: Callable[[], ListedItems]) -> pa.Array:
        shards = (self.shards.get(field.group, number) for number in range(self.shards.files.count(field.group)))
        return listed_numbers(field.name, shards, items())

    def _texts(self, name: str, make: Callable[[], Any]) -> pa.ChunkedArray:
        """Returns a column of texts: as the store tells it, else as the shards hold it."""
        if self._told is None or name not in self._told.table.column_names:
            return make()
        import pyarrow as pa

        return self._told.table.column(name).cast(pa.large_string())

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a text field, sorted, and which one each sample has; None: no such field."""
        if self._told is not None and (found := self._told.categories(name)) is not None:
            return found
        return categories(self._columns(), name)

    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order, all of which are read; the key if there are none."""
        if self._told is not None:
            return self._told.ids_digest
        return strings_digest(self._columns().column("sample_id")) if "sample_id" in self.fields else self.key

    def dump(self) -> bytes:
        """Returns what a store is to tell of all samples at once, see `ToldColumns`."""
        from forebay.store.remote.small_files import dump_columns

        names = [name for name, field in self.fields.items() if field.dtype == "str"]
        found = {name: self.categories(name) for name in names if name not in ("sample_id", "text")}
        columns = {name: values for name, values in found.items() if values is not None}
        return dump_columns(self.key, self.ids_digest(), columns)

    @cached_property
    def _told(self) -> ToldColumns | None:
        """The facts that the store tells of all samples at once."""
        mirror = self.shards.files.mirror
        if mirror is None:
            return None
        from forebay.store.remote.small_files import told_columns

        return told_columns(mirror, key=self.key, num_samples=len(self.slots.array))

    def _columns(self) -> SampleColumns:
        return SampleColumns(
            fields=self.fields,
            num_shards=self.shards.files.count(TEXT),
            slots=self.slots.whole(),
            shard=self.shards.get,
            no_such_row=lambda index, slot: no_such_row(self.shards.folder, index, slot),
        )
