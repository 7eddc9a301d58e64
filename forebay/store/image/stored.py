"""The images of a sample from the media rows that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np

from forebay.errors import CacheCorruptError, SampleError
from forebay.store.image.codec import FIELDS, Codec, decode
from forebay.store.image.pixels import Alpha
from forebay.store.image.settings import ImageSettings
from forebay.store.layout import Array

_ROUNDING = 16
"""What rounding to whole patches makes of a thin image at most: the square root of the aspect ratio allowed, 200."""


@dataclass(frozen=True)
class StoredImages:
    """How a vision cache stores images. rows_field: the text field that names a sample's media rows."""

    rows_field: str
    codec: Codec
    settings: ImageSettings
    max_pixels: int
    alpha: Alpha

    @classmethod
    def of(cls, metadata: Mapping[str, Any], *, folder: Path) -> Self | None:
        """Returns what a cache's metadata says; None for a cache whose media rows are its samples.

        Raises CacheCorruptError where it says what no forebay writes.
        """
        if "media_rows" not in metadata:
            return None
        try:
            constants = metadata["constants"]
            stored = cls(
                str(metadata["media_rows"]),
                metadata["codec"],
                ImageSettings.from_json(constants["image"]),
                int(constants["max_pixels"]),
                constants.get("alpha", "drop"),  # caches of before it could be chosen
            )
            if stored.alpha not in get_args(Alpha):
                raise ValueError(f"alpha is {stored.alpha!r}")
            names = {field["name"] for field in metadata["fields"] if field["role"] == "tensor"}
            if missing := {FIELDS[stored.codec], stored.rows_field, "image_grid_thw"} - names:
                raise KeyError(*missing)
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise CacheCorruptError(
                f"{folder}: its metadata.json is none that forebay writes: of its images it says {err!r:.80}; "
                "run: forebay preprocess CONFIG --rebuild"
            ) from err
        return stored

    def sample(self, text: dict[str, Any], images: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        """Returns the sample of a text row and its media rows: every codec gives the same `patches`.

        Raises ValueError where a media row holds no image.
        """
        grids = [image["image_grid_thw"] for image in images]
        return {
            **text,
            "image_grid_thw": np.concatenate([np.zeros((0, 3), np.int32), *grids]),
            "patches": tuple(map(self._patches, images)),
        }

    @property
    def no_patches(self) -> Array:
        """The patches of no image, uint8 [0, 3 * patch_size^2]."""
        return np.zeros((0, self.settings.patch_bytes), np.uint8)

    def _patches(self, image: Mapping[str, Array]) -> Array:
        """Raises ValueError where the values are none of an image, whatever their checksum says."""
        stored, (grid,) = image[FIELDS[self.codec]], image["image_grid_thw"].tolist()
        _, rows, columns = grid
        pixels = max(rows, 0) * columns * self.settings.patch_size**2
        largest = max(self.max_pixels, self.settings.max_pixels, self.settings.min_pixels, self.settings.factor**2)
        if not 0 < pixels <= _ROUNDING * largest:
            raise ValueError(f"an image has a grid of {grid}")
        try:
            patches = decode(
                self.codec,
                stored,
                grid=(1, rows, columns),
                settings=self.settings,
                max_pixels=self.max_pixels,
                alpha=self.alpha,
            )
        except (SampleError, OSError, ValueError) as err:
            raise ValueError(f"the bytes of an image do not decode: {err}") from err
        if patches.shape != (rows * columns, self.settings.patch_bytes):
            raise ValueError(f"an image has patches {list(patches.shape)} and a grid of {grid}")
        return patches
