"""Images as their processor gives them, and what stands beside them, made into samples on the fly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from forebay.config.tree import Config
from forebay.preprocess.images.modality import Images
from forebay.preprocess.images.samples import array_fields
from forebay.preprocess.vision.headers import MEDIA_ROWS
from forebay.steps.recipe import ImagesRecipe, recipe_of
from forebay.store.image.arrays import StoredArrays
from forebay.store.layout import Array
from forebay.train.uncached.rows import UncachedRows


class UncachedImages(UncachedRows):
    """Images by their processor, and texts, made whenever they are asked for; see `UncachedRows`."""

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """See `UncachedRows`."""
        modality = Images.of(config, cast(ImagesRecipe, recipe_of(config))).with_codec("raw")
        super().__init__(config, modality, stored_probe=stored_probe)
        self._images = StoredArrays(MEDIA_ROWS, array_fields(modality.form, "raw"))

    def _joined(self, text: dict[str, Any], images: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        return self._images.sample(text, images)
