"""The rows that the parts of a conversation source gave: put together, and those that are candidates.

Rows that share images brought together; images by content. Pure arithmetic over numbers of rows and images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig
from forebay.preprocess.sources.eligible import apply_filters
from forebay.preprocess.sources.naming import path_stem
from forebay.preprocess.sources.rows import REJECTED_SCHEMA, Kind, Manifest, joined, rejections, row_table, unique_ids
from forebay.preprocess.sources.vision.part import Part
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile

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


def share_groups(files: Array, offsets: Array, images: Array) -> Array:
    """Returns int64 [rows]: rows of one file that share an image, also by way of others, have one number.

    Numbers are those of the first row of a group. A row without images is a group of its own. Rows of other files join
    nothing: what a file's rows are must not depend on the files beside it.

    files: int [rows], rising. offsets, images: the images of row i are `images[offsets[i] : offsets[i + 1]]`.
    """
    rows = np.repeat(np.arange(len(files), dtype=np.int64), np.diff(offsets))
    groups = np.arange(len(files), dtype=np.int64)
    if not len(images):
        return groups
    keys = files[rows].astype(np.int64) * (int(images.max()) + 1) + images
    _, nodes = np.unique(keys, return_inverse=True)
    first = np.full(nodes.max() + 1, len(files), np.int64)
    np.minimum.at(first, nodes, rows)
    same_row = np.flatnonzero(rows[1:] == rows[:-1])
    labels = _components(len(first), nodes[same_row], nodes[same_row + 1])
    lowest = np.full(len(first), len(files), np.int64)
    np.minimum.at(lowest, labels, first)
    groups[rows] = lowest[labels[nodes]]
    return groups


def first_uses(values: Array) -> tuple[Array, Array]:
    """Returns (the different values in order of first appearance, for every value its place among them), int64."""
    unique, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    places = np.empty(len(unique), np.int64)
    places[order] = np.arange(len(unique))
    return unique[order], places[inverse.reshape(-1)]


def _components(count: int, left: Array, right: Array) -> Array:
    """The lowest node that each of `count` nodes is connected with, by edges (left, right).

    Every round hooks each component's root under its lowest neighbour and shortens all paths; as a component is joined to
    another in any two rounds, there are at most 2 log2(count).
    """
    labels = np.arange(count, dtype=np.int64)
    while True:
        low = np.minimum(labels[left], labels[right])
        hooked = labels.copy()
        np.minimum.at(hooked, labels[left], low)
        np.minimum.at(hooked, labels[right], low)
        while np.any((jumped := hooked[hooked]) != hooked):
            hooked = jumped
        if np.array_equal(hooked, labels):
            return labels
        labels = hooked
