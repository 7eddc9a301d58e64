"""Images and texts beside them to what is stored of them: the steps above the cut, for builds and uncached reading."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.errors import BuildError, TextError
from forebay.preprocess.modality import Read, Values
from forebay.preprocess.unchanged import require_processor
from forebay.preprocess.vision.media import RowOf, each_image, each_text
from forebay.spans import FEATURES, TOKENS, span
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.step import OpenProcessor, Processed
from forebay.steps.text.of_images import ImagesText, ImagesTextEncoder
from forebay.store.image.arrays import ArrayField
from forebay.store.image.codec import Codec
from forebay.store.layout import Array

_ENCODING = threading.Lock()
"""Processors of transformers are not made for threads: a text is written while no other is."""


def array_fields(form: BatchForm, codec: Codec) -> tuple[ArrayField, ...]:
    """Returns how the fields of a form lie on disk. Under zstd the largest field is compressed."""
    packed = form.pixels.name if codec == "zstd" else None
    return tuple(
        ArrayField(
            name=field.name,
            shape=field.shape,
            dtype=np.dtype(field.stored_dtype).newbyteorder("<"),
            is_packed=field.name == packed,
        )
        for field in form.stored
    )


def stored_fields(form: BatchForm, fields: Sequence[ArrayField], made: dict[str, Array]) -> dict[str, Array]:
    """Returns what is stored of one image. made: an array of each field; ValueError for one that does not fit."""
    values: dict[str, Array] = {}
    for one, field in zip(form.stored, fields, strict=True):
        array = made[one.name]
        values |= field.packed(one.stored(array), array.shape)
    return values


def image_samples(processor: OpenProcessor, rows: pa.Table, read: Read, *, codec: Codec) -> Iterator[Values]:
    """Yields the media fields of every image in order; see `each_image`."""
    form, fields = processor.form, array_fields(processor.form, codec)

    def made(row: RowOf, data: bytes) -> Values:
        try:
            with span(FEATURES):
                arrays = processor.make(data, sample_id=row["sample_id"], size=(row["width"], row["height"]))
            return stored_fields(form, fields, arrays)
        except ValueError as err:
            raise BuildError(
                f"image {row['sample_id']!r}: {form.made_by} gives {err}, which its answers to small images did not "
                "show; leave the image out by [source] exclude, or tell the project which processor this is",
                code="FB125",
            ) from err

    return each_image(rows, read, ["width", "height"], made)


def text_samples(
    rows: pa.Table, names: Sequence[str], step: ImagesText, encoder: ImagesTextEncoder
) -> Iterator[Values]:
    """Yields the text fields of every row in order; see `each_text`."""

    def made(row: RowOf) -> Values:
        sizes = [(size["w"], size["h"]) for size in row["sizes"]]
        _require_images(step, len(sizes), sample_id=row["sample_id"])
        with span(TOKENS), _ENCODING:
            return encoder.encode(row["text"], sizes, sample_id=row["sample_id"])

    return each_text(rows, names, ["sizes"], made)


def _require_images(step: ImagesText, count: int, *, sample_id: str) -> None:
    if step.needs_images is not None and count != step.needs_images:
        raise TextError(
            "image_count_mismatch",
            f'{sample_id}: the row has {count} images, prompt = "{step.name}" wants {step.needs_images}; '
            "correct the manifest",
        )


@functools.lru_cache(maxsize=1)
def loaded_processor(step: Processed, form: BatchForm | None = None) -> OpenProcessor:
    """Returns the processor of a step; a worker keeps the last one. form: what a probe found, None: probes itself.

    Raises BuildError where the folder is not what the step was made of any more.
    """
    opened = step.opened(form)
    require_processor(Path(step.folder), step.processor)
    return opened


@functools.lru_cache(maxsize=1)
def loaded_text(step: ImagesText) -> ImagesTextEncoder:
    """Returns what writes the texts of a step; a worker keeps the last one."""
    return step.encoder()
