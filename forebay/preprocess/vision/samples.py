"""Images and conversations to what is stored of them: the steps above the cut, for a build and for uncached reading."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.errors import SampleError
from forebay.preprocess.modality import Read, Values
from forebay.preprocess.unchanged import require_processor
from forebay.preprocess.vision.headers import MEDIA_ROWS
from forebay.preprocess.vision.media import RowOf, each_image, each_text
from forebay.spans import FEATURES, TOKENS, span
from forebay.steps.image.qwen2_vl import Patches, PixelSteps
from forebay.steps.recipe import VisionRecipe
from forebay.steps.text.chat.packed import Chat, ChatEncoder
from forebay.store.image.codec import Codec, encode
from forebay.store.image.settings import ImageSettings
from forebay.store.layout import FieldSpec

IMAGE_HASH = FieldSpec(name="image_hash", dtype="str", role="table")
ROW_FIELDS = (
    FieldSpec(name=MEDIA_ROWS, dtype="int32", group="text"),
    *(
        FieldSpec(name=name, dtype="str", group="text", role="table")
        for name in ("sample_id", "text", "images", "source")
    ),
)
"""What every cache of images has of an image, and of a row of text, beside the fields of its steps."""


def vision_fields(recipe: VisionRecipe, codec: Codec, *, patch_bytes: int) -> tuple[FieldSpec, ...]:
    """Returns every field of a vision cache, media first. patch_bytes: of one patch, 3 * patch_size^2."""
    return (
        *recipe.patches.fields(codec, patch_bytes=patch_bytes),
        IMAGE_HASH,
        *recipe.chat.fields(),
        *ROW_FIELDS,
    )


def image_samples(steps: PixelSteps, rows: pa.Table, read: Read, *, codec: Codec) -> Iterator[Values]:
    """Yields the media fields of every image in order; see `each_image`."""

    def made(row: RowOf, data: bytes) -> Values:
        with span(FEATURES):
            image = steps.make(data, sample_id=row["sample_id"])
        if image.grid != (1, row["grid_h"], row["grid_w"]):
            raise SampleError(
                "unreadable_image",
                f"{row['sample_id']}: its header gives a grid of (1, {row['grid_h']}, {row['grid_w']}), "
                f"its pixels one of {image.grid}; save the image again",
            )
        name, stored = encode(codec, data=data, pixels=image.pixels, patches=image.patches)
        return {name: stored, "image_grid_thw": np.array([image.grid], np.int32)}

    return each_image(rows, read, ["grid_h", "grid_w"], made)


def conversation_samples(rows: pa.Table, names: Sequence[str], encoder: ChatEncoder) -> Iterator[Values]:
    """Yields the text fields of every row in order; see `each_text`."""

    def made(row: RowOf) -> Values:
        grids = [(1, grid["h"], grid["w"]) for grid in row["grids"]]
        with span(TOKENS):
            return encoder.encode(row["text"], grids, sample_id=row["sample_id"])

    return each_text(rows, names, ["grids"], made)


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
