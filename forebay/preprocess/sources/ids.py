"""Sample ids made unique, without losing a sample whose id was only derived from a file name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.preprocess.sources.naming import path_stem
from forebay.preprocess.sources.rows import ROW_SCHEMA, Manifest, rejections

Array = np.ndarray[Any, Any]


def unique_ids(manifest: Manifest) -> Manifest:
    """Returns the manifest with every sample id once.

    An id derived from a file name that an earlier group already has gets its group's name in front (`b/000.tar` and clip
    `x`: `b/000/x`). Any other second occurrence fails as `duplicate_id`. An id depends on earlier rows only, so that
    growth at the end renames nothing.
    """
    rows = manifest.rows
    ids = rows["sample_id"].combine_chunks()
    seen = _first_rows(ids)
    again = seen != np.arange(len(rows))
    if not again.any():
        return manifest
    group = rows["group"].to_numpy()
    renamed = again & ~rows["explicit_id"].to_numpy() & (group != group[seen])
    if renamed.any():
        stems = pa.array([_stem(file.name) for file in manifest.files], pa.large_string())
        new = pc.binary_join_element_wise(stems.take(pa.array(group[renamed])), ids.filter(pa.array(renamed)), "/")
        ids = pc.replace_with_mask(ids, pa.array(renamed), new)
        seen = _first_rows(ids)
        again = seen != np.arange(len(rows))
    rows = rows.set_column(ROW_SCHEMA.get_field_index("sample_id"), ROW_SCHEMA.field("sample_id"), ids)
    twice = rows.filter(pa.array(again))
    message = pc.binary_join_element_wise(
        "sample id ", twice["sample_id"], " occurs before, at position ",
        pc.cast(pa.array(rows["row"].to_numpy()[seen[again]]), pa.large_string()), "",
    )  # fmt: skip
    failed = rejections(twice["row"], twice["sample_id"], kind="failed", reason="duplicate_id", message=message)
    return Manifest(
        files=manifest.files,
        rows=rows.filter(pa.array(~again)),
        rejected=pa.concat_tables([manifest.rejected, failed]),
        absent=manifest.absent,
    )


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
