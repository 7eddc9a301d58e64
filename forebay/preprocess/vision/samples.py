"""Images and conversations to what is stored of them: the steps above the cut, for a build and for uncached reading."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.errors import SampleError
from forebay.preprocess.modality import Read, Values
from forebay.preprocess.sources.kept import values_of
from forebay.preprocess.unchanged import require_processor
from forebay.preprocess.worker import mark
from forebay.spans import FEATURES, TOKENS, span
from forebay.steps.image.qwen2_vl import Patches, PixelSteps
from forebay.steps.recipe import VisionRecipe
from forebay.steps.text.chat import Chat, ChatEncoder
from forebay.store.image.codec import Codec, encode
from forebay.store.image.settings import ImageSettings
from forebay.store.layout import FieldSpec

MEDIA_ROWS = "image_rows"
"""The text field that names the media rows of a sample: its images, in the order of the conversation."""

_TABLE = ("sample_id", "text", "images", "source")


def vision_fields(recipe: VisionRecipe, codec: Codec, *, patch_bytes: int) -> tuple[FieldSpec, ...]:
    """Returns every field of a vision cache, media first. patch_bytes: of one patch, 3 * patch_size^2."""
    return (
        *recipe.patches.fields(codec, patch_bytes=patch_bytes),
        FieldSpec(name="image_hash", dtype="str", role="table"),
        *recipe.chat.fields(),
        FieldSpec(name=MEDIA_ROWS, dtype="int32", group="text"),
        *(FieldSpec(name=name, dtype="str", group="text", role="table") for name in _TABLE),
    )


def image_samples(steps: PixelSteps, rows: pa.Table, read: Read, *, codec: Codec) -> Iterator[Values]:
    """Yields the media fields of every image in order; of one that fails, table fields, `failure` and `message`."""
    columns = ["sample_id", "file", "offset", "size", "hash", "grid_h", "grid_w"]
    for position, row in enumerate(rows.select(columns).to_pylist()):
        mark(position)
        values: Values = {"image_hash": row["hash"]}
        try:
            data = read(row["file"], row["offset"], row["size"])
            with span(FEATURES):
                image = steps.make(data, sample_id=row["sample_id"])
            if image.grid != (1, row["grid_h"], row["grid_w"]):
                raise SampleError(
                    "unreadable_image",
                    f"{row['sample_id']}: its header gives a grid of (1, {row['grid_h']}, {row['grid_w']}), "
                    f"its pixels one of {image.grid}; save the image again",
                )
            name, stored = encode(codec, data=data, pixels=image.pixels, patches=image.patches)
            values |= {name: stored, "image_grid_thw": np.array([image.grid], np.int32)}
        except SampleError as err:
            values |= {"failure": err.reason, "message": str(err)}
        yield values


def conversation_samples(rows: pa.Table, names: Sequence[str], encoder: ChatEncoder) -> Iterator[Values]:
    """Yields the text fields of every row in order; of one that fails, table fields, `failure` and `message`."""
    columns = ["sample_id", "file", "text", "image_names", MEDIA_ROWS, "grids"]
    for position, (row, kept) in enumerate(zip(rows.select(columns).to_pylist(), values_of(rows), strict=True)):
        mark(position)
        values: Values = {**kept, "sample_id": row["sample_id"], "text": row["text"], "images": row["image_names"]}
        values["source"] = names[row["file"]]
        try:
            grids = [(1, grid["h"], grid["w"]) for grid in row["grids"]]
            with span(TOKENS):
                values |= encoder.encode(row["text"], grids, sample_id=row["sample_id"])
            values[MEDIA_ROWS] = np.array(row[MEDIA_ROWS], np.int32)
        except SampleError as err:
            values |= {"failure": err.reason, "message": str(err)}
        yield values


@functools.lru_cache(maxsize=1)
def loaded_chat(step: Chat, folder: str, merge_size: int) -> ChatEncoder:
    """Returns the encoder of a tokenizer's folder; a worker keeps the last one."""
    return step.encoder(Path(folder), merge_size=merge_size)


@functools.lru_cache(maxsize=1)
def loaded_steps(step: Patches, folder: str, settings: ImageSettings) -> PixelSteps:
    """Returns the steps of a processor's folder; a worker keeps the last ones.

    Raises BuildError where the folder is not what the step was made of any more.
    """
    steps = PixelSteps(step, Path(folder), settings)
    require_processor(Path(folder), step.processor)
    return steps
