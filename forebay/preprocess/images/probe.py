"""What a processor and a text step give for small built-in inputs, a digest each: `forebay.preprocess.vision.probe`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forebay.errors import SampleError
from forebay.preprocess.modality import values_digest
from forebay.preprocess.vision.probe import probe_conversations, probe_images
from forebay.steps.image.processor.step import OpenProcessor
from forebay.steps.text.of_images import ImagesTextEncoder
from forebay.store.key import digest
from forebay.store.layout import Array

_SIZES = [[], [(96, 64)], [(40, 90), (300, 200)]]
_TEXTS = ("Hello, world! 12.5 %", "0", "cat")


def processor_probe(processor: OpenProcessor) -> str:
    """Returns the xxh3-128 of the declared form, tables with it, and of what the processor makes of four images."""
    samples: list[dict[str, Any]] = [_made(processor, data, name) for name, data in probe_images()]
    return values_digest([*samples, {"form": digest(processor.form.to_json())}])


def _made(processor: OpenProcessor, data: bytes, name: str) -> dict[str, Any]:
    """Returns what is made of an image; of one that the processor refuses, why."""
    try:
        return dict(processor.make(data, sample_id=name))
    except SampleError as err:
        return {"failure": err.reason}


def mean_bytes(processor: OpenProcessor) -> int:
    """Returns how many bytes the built-in images take on average; about those of images whose shape differs."""
    sizes = [sum(array.nbytes for array in made.values()) for made in _arrays(processor)]
    return sum(sizes) // max(len(sizes), 1)


def _arrays(processor: OpenProcessor) -> Iterator[dict[str, Array]]:
    for name, data in probe_images():
        made = _made(processor, data, name)
        if "failure" not in made:
            yield made


def text_probe(encoder: ImagesTextEncoder) -> str:
    """Returns the xxh3-128 of the constants, and of what becomes of conversations and of plain texts.

    A text that the step refuses counts by its reason.
    """
    inputs = [*zip(probe_conversations(), _SIZES, strict=True), *((text, [(96, 64)]) for text in _TEXTS)]
    made: list[dict[str, Any]] = []
    for number, (text, sizes) in enumerate(inputs):
        try:
            made.append(dict(encoder.encode(text, sizes, sample_id=f"probe-{number}")))
        except SampleError as err:
            made.append({"failure": err.reason})
    return values_digest([*made, {"constants": digest(encoder.constants)}])
