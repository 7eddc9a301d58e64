"""The row table of a cache as a pyarrow table."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import CacheCorruptError
from forebay.store.cache import Cache
from forebay.store.layout import ROW_BITS, Array, FieldSpec, Group


def row_table(cache: Cache) -> pa.Table:
    """Returns one row a sample, in sample order: `index`, the table fields, `duration_s`, and the lengths.

    Of samples without audio the only length is `num_tokens`, and there is no `duration_s`.
    Bytes of a string that are no UTF-8 are written as escapes (`\\xff`).
    """
    columns: dict[str, Any] = {"index": pa.array(np.arange(len(cache)))}
    order = _slot_order(cache)
    for group in cache.groups:
        for field in cache.fields.values():
            if (
                field.group == group
                and field.role == "table"
                and field.name not in columns
                and _is_of_samples(cache, group)
            ):
                columns[field.name] = _column(cache, field).take(order)
    lengths = dict(cache.lengths)
    if cache.constants.get("features") == "none" and "num_tokens" in lengths:
        lengths = {"num_tokens": lengths["num_tokens"]}
    elif "media_rows" not in cache.metadata:
        columns["duration_s"] = pa.array(_audio_samples(cache) / cache.constants["sample_rate_hz"])
    columns.update({name: pa.array(np.asarray(values)) for name, values in lengths.items()})
    return pa.table(columns)


def _audio_samples(cache: Cache) -> Array:
    """Returns how long each clip is. Raises CacheCorruptError for a signed document that says nothing of it."""
    rate = cache.constants.get("sample_rate_hz")
    if not isinstance(rate, int) or rate < 1 or "num_audio_samples" not in cache.lengths:
        raise CacheCorruptError(
            f"{cache.folder}: its metadata.json is none that forebay writes: sample_rate_hz is {rate!r:.60}, lengths are "
            f"{', '.join(cache.lengths)}; run: forebay preprocess CONFIG --rebuild"
        )
    return np.asarray(cache.lengths["num_audio_samples"])


def _is_of_samples(cache: Cache, group: Group) -> bool:
    """Whether a group has a row a sample: the media rows of a vision cache are images, each of several samples."""
    return group == "text" or "media_rows" not in cache.metadata


def categories(cache: Cache, name: str) -> tuple[list[str], Array] | None:
    """Returns the different values of a text field, sorted, and which one each sample has, int32 [num_samples].

    None where the cache has no such field. Reads that field alone: a fraction of the cost of the whole row table.
    """
    field = cache.fields.get(name)
    if field is None or not _is_of_samples(cache, field.group):
        return None
    column = _column(cache, field).dictionary_encode().combine_chunks()
    return sorted_categories(column.dictionary.to_pylist(), column.indices.take(_slot_order(cache)).to_numpy())


def sorted_categories(names: list[str], codes: Array) -> tuple[list[str], Array]:
    """Returns the names that occur, sorted, and the codes that point into them, int32."""
    used = sorted(np.unique(codes).tolist(), key=names.__getitem__)
    moved = np.zeros(len(names), np.int32)
    moved[used] = np.arange(len(used))
    return [names[code] for code in used], moved[codes]


def ids_digest(cache: Cache) -> str:
    """Returns the digest of the sample ids of a cache, in sample order, see `strings_digest`; reads that field alone."""
    field = cache.fields.get("sample_id")
    if field is None:
        return cache.key
    return strings_digest(_column(cache, field).take(_slot_order(cache)))


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


def _slot_order(cache: Cache) -> pa.Array:
    """Where each sample stands in the concatenation of all shards, rows that failed included."""
    rows = np.array([cache.shard("text", i).entry.rows for i in range(cache.num_shards)], np.int64)
    starts = np.cumsum(rows) - rows
    shards, places = np.asarray(cache.slots) >> ROW_BITS, np.asarray(cache.slots) & ((1 << ROW_BITS) - 1)
    is_there = (shards >= 0) & (shards < len(rows))
    is_there[is_there] &= places[is_there] < rows[shards[is_there]]
    if not is_there.all():
        cache.read(int(np.argmin(is_there)))  # raises, with its name
    return pa.array(starts[shards] + places)


def _column(cache: Cache, field: FieldSpec) -> pa.ChunkedArray:
    chunks = []
    for index in range(cache.num_shards):
        values, offsets = cache.shard(field.group, index).column(field.name)
        chunks.append(_strings(values, offsets) if field.dtype == "str" else _numbers(values, offsets))
    kind = pa.large_string() if field.dtype == "str" else pa.from_numpy_dtype(field.numpy_dtype)
    return pa.chunked_array(chunks, type=kind)


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


def _numbers(values: Array, offsets: Array) -> pa.Array:
    present = np.diff(offsets) > 0
    result = np.zeros(len(present), values.dtype)
    result[present] = values[offsets[:-1][present]]
    return pa.array(result, mask=~present)
