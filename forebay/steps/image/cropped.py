"""The step `cropped`: images as an autoencoder takes them, resized and cropped to a target size by a stated rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form_values import Table
from forebay.steps.step import ImageStep
from forebay.store.layout import Array

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Cropped(ImageStep):
    """The largest centred part of an image that has the target's aspect ratio, resized to the target: `ImageOps.fit`.

    Images are taken as displayed (EXIF), and what is transparent lies on white. Pixels are uint8 [3, height, width];
    a batch has them as diffusers' VaeImageProcessor has them, 2 * (value / 255) - 1 in float32.
    size: (width, height). shapes: at most so many targets of `areas` pixels instead, see
    `forebay.preprocess.cropped_images`; or these targets. crops: an odd number of such parts, see `windows`.
    """

    name: ClassVar[str] = "cropped"
    libraries: ClassVar[tuple[str, ...]] = ("PIL.Image",)

    size: tuple[int, int]
    shapes: int | tuple[tuple[int, int], ...] | None
    areas: tuple[int, ...]
    step: int
    least: int
    resample: Literal["lanczos", "bicubic"]
    crops: int = 1
    version: int = 1

    @property
    def multiples(self) -> tuple[str, tuple[int, ...]]:
        """The setting that says the sides of targets, and the numbers that they are, or are multiples of."""
        if self.shapes is None:
            return "size", self.size
        return ("step", (self.step,)) if isinstance(self.shapes, int) else ("shapes", sum(self.shapes, ()))

    @property
    def pixels_form(self) -> BatchForm:
        """How a model is given pixels: only those of one target stand in a batch together."""
        values = np.float32(2) * (np.arange(256, dtype=np.float32) / np.float32(255)) - np.float32(1)
        table = Table(axis=0, values=values[None])
        pixels = FieldForm(
            name="x", dtype="float32", shape=(3, None, None), stored_dtype="uint8", pad=None, table=table
        )
        return BatchForm.exact("VaeImageProcessor", pixels)

    @property
    def windows(self) -> dict[str, float]:
        """Where parts of an image begin, of what is cut off 0 to 1, by the names of variants; the centred one has none.

        They are evenly spaced, and the first and the last end with the image: `ImageOps.fit` with this centering.
        """
        others = (place for place in range(self.crops) if place != self.crops // 2)
        return {"": 0.5, **{f"crop{n}": place / (self.crops - 1) for n, place in enumerate(others, 1)}}

    def pixels(self, image: Image, size: tuple[int, int], begin: float = 0.5) -> Array:
        """Returns the pixels of an RGB image at a target, uint8 [3, height, width].

        size: (width, height). begin: one of `windows`.
        """
        from PIL.Image import Resampling

        width, height = image.size
        kept = min(width, height * size[0] / size[1]), min(height, width * size[1] / size[0])
        left, top = (width - kept[0]) * begin, (height - kept[1]) * begin
        box = (left, top, left + kept[0], top + kept[1])
        filter_ = Resampling.LANCZOS if self.resample == "lanczos" else Resampling.BICUBIC
        found = image if image.size == size else image.resize(size, filter_, box)
        return np.ascontiguousarray(np.asarray(found).transpose(2, 0, 1))
