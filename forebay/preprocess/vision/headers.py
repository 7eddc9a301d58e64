"""The images of some rows: which, in which order, under which names, and how large, known from their headers.

Shared by both modalities of images.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from forebay.errors import SampleError
from forebay.preprocess.modality import Listing, narrow
from forebay.rows.image_facts import image_name
from forebay.rows.kept_columns import column_of, names_of, with_kept
from forebay.rows.manifest import Manifest, rejections
from forebay.rows.shared_images import first_uses, flattened
from forebay.store.image.settings import ImageSettings, grid_thw
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile

MEDIA_ROWS = "image_rows"
"""The text field that names the media rows of a sample: its images, in the order of the conversation."""

_GRIDS = {"h": "grid_h", "w": "grid_w"}
_SIZES = {"w": "width", "h": "height"}


@dataclass(frozen=True)
class RowImages:
    """The images of some consecutive rows. used: their numbers in `manifest.images`, each once, in order of first use.

    rows int32 [offsets[i] : offsets[i + 1]]: the places in `used` of the images of row i.
    """

    used: Array
    offsets: Array
    rows: Array

    @classmethod
    def of(cls, rows: pa.Table) -> RowImages:
        """Returns the images of rows of a manifest."""
        offsets, flat = flattened(rows["images"])
        used, places = first_uses(flat)
        return cls(used.astype(np.int64), offsets, places.astype(np.int32))


def media_task_rows(listing: Listing, start: int, stop: int) -> tuple[tuple[SourceFile, ...], pa.Table]:
    """Returns the `media_rows` of rows [start, stop) and the files that they lie in."""
    return narrow(media_rows(listing.manifest, listing.rows.slice(start, stop - start)), listing.files)


def media_rows(manifest: Manifest, rows: pa.Table) -> pa.Table:
    """Returns the different images of some rows, in order of first use; `sample_id` is what to call one."""
    used = RowImages.of(rows).used
    names = pa.array(image_names(manifest, used), pa.large_string())
    return images_of(manifest).take(pa.array(used)).append_column("sample_id", names)


def text_task_rows(listing: Listing, start: int, stop: int) -> tuple[tuple[SourceFile, ...], pa.Table]:
    """Returns rows [start, stop) as `conversation_rows`, and the files that they are of."""
    return narrow(conversation_rows(listing.manifest, listing.rows.slice(start, stop - start)), listing.files)


def conversation_rows(manifest: Manifest, rows: pa.Table) -> pa.Table:
    """Returns rows as the text steps take them, with their `file`, `image_rows` and `image_names` (JSON).

    Beside them `grids` of images that have such, structs of h and w in patches, else `sizes`, of w and h in pixels.
    """
    images = RowImages.of(rows)
    known, columns = ("grids", _GRIDS) if _GRIDS["h"] in images_of(manifest).column_names else ("sizes", _SIZES)
    table = pa.table(
        {
            "sample_id": rows["sample_id"],
            "text": rows["text"],
            "file": rows["group"],
            MEDIA_ROWS: _lists(images, pa.array(images.rows)),
            known: _lists(images, _pairs(manifest, images, columns)),
            "image_names": pa.array(_names_json(manifest, images), pa.large_string()),
        }
    )
    return with_kept(table, {name: column_of(rows, name) for name in names_of(rows)})


def images_of(manifest: Manifest) -> pa.Table:
    """Returns the different images of a manifest of conversations."""
    if manifest.images is None:
        raise ValueError("a manifest of recordings has no images")
    return manifest.images


def image_names(manifest: Manifest, images: Sequence[int] | Array) -> list[str]:
    """Returns what to call some images: the file, and the member or the row inside it."""
    part = images_of(manifest).take(pa.array(images, pa.int64())).select(["file", "member", "offset", "size"])
    return [
        image_name(manifest.files[row["file"]], row["member"], offset=row["offset"], size=row["size"])
        for row in part.to_pylist()
    ]


def _pairs(manifest: Manifest, images: RowImages, columns: Mapping[str, str]) -> pa.Array:
    """Returns two columns of the images of rows, as structs."""
    part = images_of(manifest).take(pa.array(images.used[images.rows]))
    values = [part[column].combine_chunks() for column in columns.values()]
    return pa.StructArray.from_arrays(values, [*columns])


def _lists(images: RowImages, values: pa.Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(images.offsets, pa.int64()), values)


def _names_json(manifest: Manifest, images: RowImages) -> Iterator[str]:
    names = image_names(manifest, images.used)
    for start, stop in zip(images.offsets[:-1].tolist(), images.offsets[1:].tolist(), strict=True):
        yield json.dumps([names[place] for place in images.rows[start:stop].tolist()], ensure_ascii=False)


def with_grids(manifest: Manifest, settings: ImageSettings) -> Manifest:
    """Returns a manifest whose images have grids; rows with an image that the processor refuses fail, by its reason."""
    images = images_of(manifest)
    sizes = np.stack([images["width"].to_numpy(), images["height"].to_numpy()], axis=1).astype(np.int64)
    unique, inverse = np.unique(sizes, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    grids = np.zeros((len(unique), 2), np.int32)
    refused: dict[int, SampleError] = {}
    for number, (width, height) in enumerate(unique.tolist()):
        try:
            grids[number] = grid_thw(width, height, settings)[1:]
        except SampleError as err:
            refused[number] = err
    for name, column in (("grid_h", 0), ("grid_w", 1)):
        images = images.append_column(name, pa.array(grids[inverse, column], pa.int32()))
    manifest = dataclasses.replace(manifest, images=images)
    return _without(manifest, {i: refused[n] for i, n in enumerate(inverse.tolist()) if n in refused})


def _without(manifest: Manifest, refused: dict[int, SampleError]) -> Manifest:
    """A manifest without the rows that use a refused image."""
    if not refused:
        return manifest
    offsets, flat = flattened(manifest.rows["images"])
    is_bad = np.isin(flat, list(refused))
    rows = np.repeat(np.arange(len(manifest.rows)), np.diff(offsets))
    bad, first = np.unique(rows[is_bad], return_index=True)
    culprits = flat[is_bad][first].tolist()
    left_out = manifest.rows.take(pa.array(bad))
    failed = rejections(
        left_out["row"],
        left_out["sample_id"],
        kind="failed",
        reason=[refused[image].reason for image in culprits],
        message=[f"{name}: {refused[i]}" for name, i in zip(image_names(manifest, culprits), culprits, strict=True)],
    )
    keep = np.ones(len(manifest.rows), bool)
    keep[bad] = False
    return dataclasses.replace(
        manifest,
        rows=manifest.rows.filter(pa.array(keep)),
        rejected=pa.concat_tables([manifest.rejected, failed]),
    )
