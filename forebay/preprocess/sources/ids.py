"""Sample ids made unique, without losing a sample whose id was only derived from a file name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.preprocess.sources.naming import path_stem
from forebay.preprocess.sources.rows import ROW_SCHEMA, WHOLE_FILE, Manifest, joined, rejections, storable

Array = np.ndarray[Any, Any]


def unique_ids(manifest: Manifest) -> Manifest:
    """Returns the manifest with every sample id once.

    An id derived from a file name that an earlier row already has becomes another: with its group's name in front where
    that row is of another group (`b/000.tar` and clip `x`: `b/000/x`), else its member or file name in full, or its row
    number in an `hf` file. Any other second occurrence, the same clip among them, fails as `duplicate_id`.
    An id depends on earlier rows only, so that growth at the end renames nothing.
    """
    rows = manifest.rows
    ids = rows["sample_id"].combine_chunks()
    seen = _first_rows(ids)
    if not (seen != np.arange(len(rows))).any():
        return manifest
    ids = _renamed(manifest, ids, seen)
    seen = _first_rows(ids)
    again = seen != np.arange(len(rows))
    rows = rows.set_column(ROW_SCHEMA.get_field_index("sample_id"), ROW_SCHEMA.field("sample_id"), ids)
    twice = rows.filter(pa.array(again))
    position = pa.array(rows["row"].to_numpy()[seen[again]])
    hint = "; give the rows of the manifest a sample_id of their own"
    message = joined("sample id ", twice["sample_id"], " occurs before, at position ", position, hint)
    failed = rejections(twice["row"], twice["sample_id"], kind="failed", reason="duplicate_id", message=message)
    return dataclasses.replace(
        manifest, rows=rows.filter(pa.array(~again)), rejected=pa.concat_tables([manifest.rejected, failed])
    )


def _renamed(manifest: Manifest, ids: pa.Array, seen: Array) -> pa.Array:
    """The ids, with another one for every derived id that stands for another clip before."""
    rows = manifest.rows
    chosen = np.flatnonzero((seen != np.arange(len(rows))) & ~rows["explicit_id"].to_numpy())
    later, earlier = rows.take(pa.array(chosen)), rows.take(pa.array(seen[chosen]))
    same_clip = _all_equal(later, earlier, ("file", "member", "offset"))
    same_group = _all_equal(later, earlier, ("group",))
    stems = pa.array([_stem(file.name) for file in manifest.files], pa.large_string())
    names = pa.array([storable(file.name) for file in manifest.files], pa.large_string())
    group, file = later["group"].combine_chunks(), later["file"].combine_chunks()
    in_full = pc.case_when(
        pc.make_struct(pc.not_equal(later["size"], WHOLE_FILE), pc.not_equal(file, group)),
        later["member"],
        names.take(file),
        joined(stems.take(group), "/", later["offset"]),
    )
    new = pc.if_else(same_group, in_full, joined(stems.take(group), "/", later["sample_id"]))
    mask = np.zeros(len(rows), bool)
    mask[chosen] = ~(same_group & same_clip)
    return pc.replace_with_mask(ids, pa.array(mask), new.combine_chunks().filter(pa.array(mask[chosen])))


def _all_equal(left: pa.Table, right: pa.Table, names: Sequence[str]) -> Array:
    equal = np.ones(len(left), bool)
    for name in names:
        equal &= np.asarray(pc.equal(left[name], right[name]))
    return equal


def _first_rows(ids: pa.Array) -> Array:
    """Position of the first row with the same id, for every row."""
    encoded = ids.dictionary_encode()
    if len(encoded.dictionary) == len(ids):
        return np.arange(len(ids))
    codes = encoded.indices.to_numpy()
    # Codes are given in the order in which values first appear: each new maximum is a first row.
    first = np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))
    return np.asarray(first[codes])


def _stem(name: str) -> str:
    parts = [part for part in path_stem(name).split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)
