"""Clips and images for foreign classes, and what a plain call of such a class gives for them: the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.zoo.classes import CannotError, quiet, reason

Array = np.ndarray[Any, Any]

_RATE_HZ = 16_000
"""Of extractors that say none."""


def clips(rate_hz: int, *, durations_s: Sequence[float] = (1.3, 0.71, 2.05)) -> list[Array]:
    """Returns float32 clips: tones that move, with a little noise, the same bits for the same durations."""
    rng = np.random.default_rng(7)
    found = []
    for duration_s in durations_s:
        seconds = np.arange(round(duration_s * rate_hz)) / rate_hz
        tone = np.sin(2 * np.pi * (180 + 90 * np.sin(3 * seconds)) * seconds)
        found.append((0.3 * tone + 0.02 * rng.standard_normal(seconds.size)).astype(np.float32))
    return found


def photos(*, sizes: Sequence[tuple[int, int]] = ((240, 180), (150, 213), (64, 96))) -> list[Image.Image]:
    """Returns RGB images of these (width, height): slopes under noise, so that every value of a channel is there."""
    rng = np.random.default_rng(7)
    found = []
    for width, height in sizes:
        slope = np.linspace(0, 255, width)[None, :, None] * np.array([1.0, 0.6, 0.3])
        pixels = slope + rng.integers(-90, 91, (height, width, 3))
        pixels[:16, :16] = np.arange(256).reshape(16, 16, 1)
        found.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    return found


def rate_of(extractor: Any) -> int:
    """Returns samples a second that this extractor wants."""
    return int(getattr(extractor, "sampling_rate", None) or _RATE_HZ)


def call_extractor(extractor: Any, waveforms: Sequence[Array], **options: Any) -> dict[str, Any]:
    """Returns the outputs of a plain call of an extractor with several clips, numpy arrays where it gives arrays.

    Raises CannotError with the reason where the call fails.
    """
    rate = {"sampling_rate": rate_of(extractor)} if "sampling_rate" in _parameters(extractor) else {}
    return _called(lambda form: extractor(list(waveforms), return_tensors=form, **rate, **options))


def call_processor(processor: Any, images: Sequence[Image.Image], **options: Any) -> dict[str, Any]:
    """Returns the outputs of a plain call of an image processor with several images, as `call_extractor` does."""
    return _called(lambda form: processor(images=list(images), return_tensors=form, **options))


def one_a_row(processor: Any, images: Sequence[Image.Image], **options: Any) -> dict[str, Any]:
    """Returns the outputs of a call in which each image is a sample of its own: `[[a], [b]]`, as VLM processors do."""
    return _called(lambda form: processor(images=[[image] for image in images], return_tensors=form, **options))


def _called(call: Any) -> dict[str, Any]:
    try:
        with quiet():
            try:
                found = call("np")
            except ValueError as err:
                if "return_tensors='pt'" not in str(err):
                    raise
                found = call("pt")
    except Exception as err:
        raise CannotError(reason(err)) from err
    return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in found.items()}


def _parameters(extractor: Any) -> set[str]:
    return set(inspect.signature(type(extractor).__call__).parameters)
