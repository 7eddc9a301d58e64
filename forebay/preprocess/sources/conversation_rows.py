"""The rows that the parts of a conversation source gave: put together, and those that are candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config import SourceConfig
from forebay.preprocess.sources.conversation_part import Part
from forebay.preprocess.sources.eligible import apply_filters
from forebay.preprocess.sources.ids import unique_ids
from forebay.preprocess.sources.naming import path_stem
from forebay.preprocess.sources.rows import REJECTED_SCHEMA, Kind, Manifest, joined, rejections, row_table
from forebay.store.sources import SourceFile

Array = np.ndarray[Any, Any]
_KINDS: tuple[Kind, ...] = ("excluded", "failed")


def listed_rows(parts: Sequence[Part]) -> pa.Table:
    """Returns all rows: PART_ROWS with `row`, `group`, and `offset`, the place of a row in its file; images as references."""
    group = np.repeat([part.group for part in parts], [len(part.rows) for part in parts]).astype(np.int32)
    bases = np.cumsum([0, *(len(part.images) for part in parts)])
    tables = [_with_base(part.rows, base) for part, base in zip(parts, bases[:-1].tolist(), strict=True)]
    row = np.arange(len(group), dtype=np.int64)
    starts = np.searchsorted(group, group)
    columns = {"row": pa.array(row), "group": pa.array(group), "offset": pa.array(row - starts)}
    if not tables:
        return pa.table(columns)
    table = pa.concat_tables(tables)
    return pa.table(columns | {name: table[name] for name in table.column_names})


def flattened(lists: Any) -> tuple[Array, Array]:
    """Returns offsets int64 [rows + 1] and values of a column of lists, whatever it was sliced from."""
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.concatenate(([0], np.cumsum(lengths))), pc.list_flatten(lists).to_numpy(zero_copy_only=False)


def candidate_rows(rows: pa.Table, manifests: Sequence[SourceFile], source: SourceConfig) -> Manifest:
    """Returns the rows that are conversations, with the columns of speech that ids and filters look at, and `images`."""
    stems = pa.array([path_stem(file.path.name) for file in manifests], pa.large_string())
    derived = joined(stems.take(rows["group"].combine_chunks()), "/", rows["offset"])
    rows = rows.set_column(
        rows.schema.get_field_index("sample_id"), "sample_id", pc.coalesce(rows["sample_id"], derived)
    )
    unusable = rows.filter(rows["reason"].is_valid())
    if len(unusable):
        rows = rows.filter(rows["reason"].is_null())
    rejected = [
        rejections(part["row"], part["sample_id"], kind=kind, reason=part["reason"], message=part["message"])
        for kind in _KINDS
        if len(part := unusable.filter(pc.equal(unusable["kind"], kind)))
    ]
    names = ("row", "sample_id", "explicit_id", "group", "offset", "text")
    table = row_table({**{name: rows[name] for name in names}, "file": rows["group"]}, num_rows=len(rows))
    manifest = Manifest(
        files=tuple(manifests),
        rows=table.append_column("images", rows["images"]),
        rejected=pa.concat_tables([REJECTED_SCHEMA.empty_table(), *rejected]),
    )
    return apply_filters(unique_ids(manifest), source)


def _with_base(rows: pa.Table, base: int) -> pa.Table:
    lists = rows["images"].combine_chunks()
    offsets, values = flattened(lists)
    shifted = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values + np.int64(base), pa.int32()))
    return rows.set_column(rows.schema.get_field_index("images"), "images", shifted)
