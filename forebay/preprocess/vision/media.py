"""What both modalities of images share: images and texts one by one, and what rows have of their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import SampleError
from forebay.preprocess.modality import Coder, Listing, Read, Values
from forebay.preprocess.vision.headers import MEDIA_ROWS, images_of
from forebay.rows.kept_columns import values_of
from forebay.rows.shared_images import flattened
from forebay.store.layout import Array, Group
from forebay.store.shard import Shard
from forebay.task_map import mark

RowOf = Mapping[str, Any]
"""The columns of one row of a task, as Python values."""


def each_image(
    rows: pa.Table, read: Read, columns: Sequence[str], make: Callable[[RowOf, bytes], Values]
) -> Iterator[Values]:
    """Yields the media fields of every image in order; of one that fails, table fields, `failure` and `message`.

    columns: what `make` wants of a row beside its place and id. make: (row, encoded bytes) -> the fields of an image;
    raises SampleError.
    """
    known = ["sample_id", "file", "offset", "size", "hash"]
    for position, row in enumerate(rows.select([*known, *columns]).to_pylist()):
        mark(position)
        values: Values = {"image_hash": row["hash"]}
        try:
            values |= make(row, read(row["file"], row["offset"], row["size"]))
        except SampleError as err:
            values |= _failed(err)
        yield values


def each_text(
    rows: pa.Table, names: Sequence[str], columns: Sequence[str], make: Callable[[RowOf], Values]
) -> Iterator[Values]:
    """Yields the text fields of every row in order; of one that fails, table fields, `failure` and `message`.

    names: source names by the `file` column. columns: what `make` wants of a row beside its id and text. make: row ->
    its fields; raises SampleError.
    """
    known = ["sample_id", "file", "text", "image_names", MEDIA_ROWS]
    for position, (row, kept) in enumerate(
        zip(rows.select([*known, *columns]).to_pylist(), values_of(rows), strict=True)
    ):
        mark(position)
        values: Values = {**kept, "sample_id": row["sample_id"], "text": row["text"], "images": row["image_names"]}
        values["source"] = names[row["file"]]
        try:
            values |= make(row)
            values[MEDIA_ROWS] = np.array(row[MEDIA_ROWS], np.int32)
        except SampleError as err:
            values |= _failed(err)
        yield values


def _failed(err: SampleError) -> Values:
    return {"failure": err.reason, "message": str(err)}


def row_reasons(media: Shard | None, text: Shard, why: Coder) -> Array:
    """Returns why rows are no samples: for the first of their images that failed, else for their text."""
    assert media is not None
    failed = why.column(media, "failure")
    reasons = why.column(text, "failure")
    if failed.any():
        values, offsets = text.column(MEDIA_ROWS)
        of_images = failed[values]
        rows = np.repeat(np.arange(len(reasons)), np.diff(offsets))[of_images != 0]
        bad, first = np.unique(rows, return_index=True)
        reasons[bad] = np.where(reasons[bad], reasons[bad], of_images[of_images != 0][first])
    return reasons


def of_rows(text: Shard, numbers: Array) -> Array:
    """Returns the sum, for every row of a text shard, of the numbers of its images. numbers: int64 [media rows]."""
    values, offsets = text.column(MEDIA_ROWS)
    sums = np.concatenate(([0], np.cumsum(numbers[values])))
    return np.asarray(sums[offsets[1:]] - sums[offsets[:-1]])


def used_by(listing: Listing, rows: pa.Table, *, group: Group, position: int) -> tuple[str, list[str]]:
    """Returns what to call a row of a task, and the ids of the samples that need it; see `Modality.used_by`."""
    name = rows["sample_id"][position].as_py()
    if group == "text":
        return f"sample {name!r}", [name]
    images = images_of(listing.manifest)["hash"]
    number = pc.index(images, rows["hash"][position].as_py()).as_py()
    offsets, flat = flattened(listing.rows["images"])
    owners = np.unique(np.searchsorted(offsets, np.flatnonzero(flat == number), side="right") - 1)
    return f"image {name!r}", listing.rows["sample_id"].take(pa.array(owners)).to_pylist()
