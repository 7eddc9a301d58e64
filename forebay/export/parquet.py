"""Parquet: a row a sample, every table field and every tensor; a row group is a run of samples of one shard."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.export.samples import Samples
from forebay.store.filling import Summed
from forebay.store.layout import Array, FieldSpec

ABOUT = b"forebay"
"""The key of the schema's metadata under which our own stands, as JSON."""

_GROUP_BYTES = 64 * 1024 * 1024
"""A row group holds no more values than this, or one sample. A writer has about eight times as much in memory."""


def write_parquet(samples: Samples, start: int, file: Summed, *, max_bytes: int) -> Generator[int]:
    """Writes samples from a place on, until the file has `max_bytes` after a row group; yields where it stands.

    A tensor [n] is a list, a tensor [n, k] a list of fixed-size lists; `patches` of images are such a list an image.
    float16 is halffloat. The schema's metadata hold `Samples.about` as JSON under `forebay`.
    """
    writer = None
    try:
        for at, table in _groups(samples, start, max_bytes=min(max_bytes, _GROUP_BYTES)):
            if writer is None:
                writer = _opened(file, table.schema.with_metadata({ABOUT: json.dumps(samples.about())}))
            writer.write_table(table.cast(writer.schema), row_group_size=len(table))
            yield at
            if file.size_bytes >= max_bytes:
                return
    finally:
        if writer is not None:
            writer.close()


def _opened(file: Summed, schema: pa.Schema) -> pq.ParquetWriter:
    # A dictionary of floats only costs time, and so do the largest and smallest value of a tensor.
    plain = [field.name for field in schema if not pa.types.is_list(field.type)]
    texts = [name for name in plain if pa.types.is_large_string(schema.field(name).type)]
    return pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=texts, write_statistics=plain)


def _groups(samples: Samples, start: int, *, max_bytes: int) -> Iterator[tuple[int, pa.Table]]:
    """Yields a table for each row group, and where the samples behind its last begin."""
    specs = samples.tensors
    for run in samples.runs(start):
        first, held, size = 0, [], 0
        for place, index in enumerate(run.indices.tolist()):
            values = samples.read(index)
            held.append(values)
            size += sum(_size(values[spec.name]) for spec in specs)
            if size >= max_bytes or place + 1 == len(run.indices):
                table = run.table.slice(first, len(held))
                for spec in specs:
                    table = table.append_column(spec.name, _column(spec, [each[spec.name] for each in held]))
                yield run.start + place + 1, table
                first, held, size = place + 1, [], 0


def _size(values: Any) -> int:
    return sum(each.nbytes for each in values) if isinstance(values, tuple) else int(values.nbytes)


def _column(spec: FieldSpec, values: Sequence[Any]) -> pa.Array:
    if isinstance(values[0], tuple):
        images = [image for of_sample in values for image in of_sample]
        return _lists(list(map(len, values)), _tensors(spec, images))
    return _tensors(spec, values)


def _tensors(spec: FieldSpec, values: Sequence[Array]) -> pa.Array:
    flat = np.concatenate([np.zeros((0, *spec.shape), spec.numpy_dtype), *values])
    made = pa.array(flat.reshape(-1))
    for size in reversed(spec.shape):
        made = pa.FixedSizeListArray.from_arrays(made, size)
    return _lists(list(map(len, values)), made)


def _lists(lengths: Sequence[int], values: pa.Array) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)
