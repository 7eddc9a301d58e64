"""The images of a sample from the media rows that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from forebay.errors import CacheCorruptError
from forebay.store.image.codec import FIELDS, Codec, decode
from forebay.store.image.settings import ImageSettings

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StoredImages:
    """How a vision cache stores images. rows_field: the text field that names a sample's media rows."""

    rows_field: str
    codec: Codec
    settings: ImageSettings
    max_pixels: int

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
            )
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
        """Returns the sample of a text row and its media rows: every codec gives the same `patches`."""
        grids = [image["image_grid_thw"] for image in images]
        return {
            **text,
            "image_grid_thw": np.concatenate([np.zeros((0, 3), np.int32), *grids]),
            "patches": tuple(self._patches(image) for image in images),
        }

    @property
    def no_patches(self) -> Array:
        """The patches of no image, uint8 [0, 3 * patch_size^2]."""
        return np.zeros((0, self.settings.patch_bytes), np.uint8)

    def _patches(self, image: Mapping[str, Array]) -> Array:
        stored = image[FIELDS[self.codec]]
        if self.codec == "raw":
            return stored
        _, rows, columns = image["image_grid_thw"][0].tolist()
        return decode(self.codec, stored, grid=(1, rows, columns), settings=self.settings, max_pixels=self.max_pixels)
