"""Changes of images as they are stored, bit for bit what a changed image is: mirrored, and of another colour.

Patches of packs are mirrored in their places: Pillow's resize of a mirrored image is the mirrored resize. A colour is a
function of the byte of a channel, so it is a table over the bytes that a resized image has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config.augment import AugmentConfig
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.image.qwen2_vl import CODES, GRIDS
from forebay.steps.step import Stored
from forebay.store.image.codec import mirrored
from forebay.store.image.image_settings import ImageSettings
from forebay.store.layout import Array
from forebay.train.augment.draws import Draws, between

_NEUTRAL = (1.0, 1.0)
_MIRRORS = (1, 2, 3, 5)
"""The filters by which Pillow resizes a mirrored image to the mirrored one: not the nearest pixel, and no box."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageChange(ABC):
    """A change of all images of some samples, drawn by sample. field: that holds them, as stored."""

    field: str
    probability: float

    def change(self, samples: Sequence[dict[str, Any]], draws: Draws, ids: Sequence[str]) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `SampleChange`."""
        drawn = draws.uniform(3)
        return [
            self._changed(sample, numbers[1:]) if numbers[0] < self.probability else sample
            for sample, numbers in zip(samples, drawn, strict=True)
        ]

    def _changed(self, sample: dict[str, Any], numbers: Array) -> dict[str, Any]:
        values = sample[self.field]
        is_one = not isinstance(values, tuple)
        made = tuple(self.images((values,) if is_one else values, sample, numbers))
        return {**sample, self.field: made[0] if is_one else made}

    @abstractmethod
    def images(self, images: Sequence[Array], sample: Mapping[str, Any], numbers: Array) -> list[Array]:
        """Returns the changed images of a sample. numbers: drawn, float64 [2] in [0, 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip(ImageChange):
    """Images that are mirrored, left to right. axis: that of their width; of patches their settings instead."""

    axis: int = 0
    patches: ImageSettings | None = None

    def images(self, images: Sequence[Array], sample: Mapping[str, Any], numbers: Array) -> list[Array]:  # noqa: ARG002
        """See `ImageChange`."""
        if self.patches is None:
            return [np.ascontiguousarray(np.flip(image, self.axis)) for image in images]
        grids = np.reshape(sample[GRIDS], (-1, 3)).tolist()
        return [mirrored(image, tuple(grid), self.patches) for image, grid in zip(images, grids, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Colour(ImageChange):
    """Images whose bytes v become ((v * brightness) - 127.5) * contrast + 127.5, rounded to even, within 0 to 255."""

    brightness: tuple[float, ...]
    contrast: tuple[float, ...]

    def images(self, images: Sequence[Array], sample: Mapping[str, Any], numbers: Array) -> list[Array]:  # noqa: ARG002
        """See `ImageChange`."""
        table = self.table(numbers)
        return [table[image] for image in images]

    def table(self, numbers: Array) -> Array:
        """Returns the byte that each byte becomes, uint8 [256]. numbers: as `images` takes them."""
        (low, high), (least, most) = self.brightness, self.contrast
        values = (np.arange(256) * between(numbers[0], low, high) - 127.5) * between(numbers[1], least, most) + 127.5
        return np.asarray(np.clip(np.rint(values), 0, 255), np.uint8)


def image_change(settings: AugmentConfig, stored: Stored, form: BatchForm | None) -> ImageChange | str:
    """Returns the change of a source, or what is there instead of images that it could be exact for.

    form: of the images of the source.
    """
    fields, patches = () if form is None else form.stored, None
    if "video_table" in stored.constants:
        return "changes images alone, and there are videos beside them; leave vision.fps out"
    axis = next((axis for field in fields[:1] if (axis := _width_axis(field)) is not None), None)
    if any(field.name == GRIDS for field in fields) and any(field.on_disk == CODES for field in fields):
        name, axis, is_bytes = CODES, 1, True
        patches = ImageSettings.from_json(stored.constant("image"))
        if settings.kind == "flip" and patches.resample not in _MIRRORS:
            return f"is exact where the processor's resample is 1, 2, 3 or 5, and it is {patches.resample}"
    elif len(fields) == 1:
        name, is_bytes = fields[0].on_disk, _are_bytes(fields[0])
    else:
        name, is_bytes, axis = "", False, None
    given: dict[str, Any] = {"field": name, "probability": settings.probability}
    if settings.kind == "colour" and is_bytes:
        return Colour(**given, brightness=settings.brightness or _NEUTRAL, contrast=settings.contrast or _NEUTRAL)
    if settings.kind == "flip" and axis is not None:
        return Flip(**given, axis=axis, patches=patches)
    shapes = ", ".join(f"{field.name} {list(field.shape)}" for field in fields) or "none"
    if settings.kind == "colour":
        return f"is exact for one field of the bytes of an image by a table of 256 values; there is {shapes}"
    return f"is exact for patches of packs, or one field of [3, height, width] or [height, width, 3]; there is {shapes}"


def _width_axis(field: FieldForm) -> int | None:
    """Returns the axis of the width of images of one size; None where they have another form."""
    shape = field.shape
    if len(shape) != 3 or field.grows or (shape[0], shape[2]) == (3, 3) or 3 not in (shape[0], shape[2]):
        return None
    return 2 if shape[0] == 3 else 1


def _are_bytes(field: FieldForm) -> bool:
    """Whether codes are the bytes of the resized image: the table has a value for each, and they rise with it."""
    if field.table is None or field.stored_dtype != "uint8" or field.table.values.shape[1] != 256:
        return False
    return bool((np.diff(field.table.values, axis=1) > 0).all())
