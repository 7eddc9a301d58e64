"""Conversations made into samples on the fly, their images as patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from forebay.config.tree import Config
from forebay.preprocess.vision.headers import MEDIA_ROWS
from forebay.preprocess.vision.modality import Vision
from forebay.steps.recipe import VisionRecipe, recipe_of
from forebay.store.image.codec import StoredImages
from forebay.store.layout import Array
from forebay.train.uncached.rows import UncachedRows


class UncachedVision(UncachedRows):
    """Images and conversations, decoded, resized and tokenised whenever they are asked for; see `UncachedRows`."""

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """See `UncachedRows`."""
        recipe = cast(VisionRecipe, recipe_of(config))
        modality, step = Vision.of(config, recipe).with_codec("raw"), recipe.patches
        super().__init__(config, modality, stored_probe=stored_probe)
        self._images = StoredImages(MEDIA_ROWS, "raw", modality.settings, step.max_pixels, step.alpha)

    def _joined(self, text: dict[str, Any], images: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        return self._images.sample(text, images)
