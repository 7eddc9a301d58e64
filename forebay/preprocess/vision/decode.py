"""The image steps of a processor: encoded bytes to the pixels and patches that are stored."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from forebay.config.steps import Patches
from forebay.errors import ConfigError
from forebay.preprocess.unchanged import require_processor
from forebay.steps.image.processor import check_processor, make_processor, patch_table, processed_patches
from forebay.store.image.pixels import decode_image, patchify, resized, unpatchify
from forebay.store.image.settings import ImageSettings, grid_thw, processor_document, settings_in
from forebay.store.layout import Array


@dataclass(frozen=True, slots=True)
class MadeImage:
    """One image. pixels: uint8 [H, W, 3], resized. patches: uint8 [n, 3 * patch_size^2]. grid: (1, h, w)."""

    pixels: Array
    patches: Array
    grid: tuple[int, int, int]


class PixelSteps:
    """Decode, resize, cut into patches; table: float32 [3, 256], what the processor makes of each value by channel."""

    def __init__(self, step: Patches, folder: Path, settings: ImageSettings) -> None:
        """Loads the processor and, under backend "pil", compares our own steps with it.

        Raises ConfigError where it cannot be loaded, or gives what our steps and a table do not.
        """
        self._step, self._settings = step, settings
        path, document = processor_document(folder)
        if settings_in(path, document) != settings:
            raise ConfigError(f"vision.processor: {path} changed since the command began; run the command again")
        self._processor = make_processor(path, document, step.backend)
        self.table = patch_table(self._processor, settings)
        if step.backend == "pil":
            check_processor(self._processor, settings, self.table)

    def make(self, data: bytes, *, sample_id: str, max_pixels: int | None = None) -> MadeImage:
        """Returns what is stored of one image. max_pixels: None: the step's. Raises SampleError if it is bad."""
        limit = max_pixels or self._step.max_pixels
        image = decode_image(data, max_pixels=limit, sample_id=sample_id, alpha=self._step.alpha)
        settings = self._settings
        grid = grid_thw(*image.size, settings)
        if self._step.backend == "pil":
            pixels = resized(image, settings)
            return MadeImage(pixels, patchify(pixels, settings), grid)
        patches = processed_patches(self._processor, image, settings, self.table)
        return MadeImage(unpatchify(patches, grid, settings), patches, grid)


@functools.lru_cache(maxsize=1)
def loaded_steps(step: Patches, folder: str, settings: ImageSettings) -> PixelSteps:
    """Returns the steps of a processor's folder; a worker keeps the last ones.

    Raises BuildError where the folder is not what the step was made of any more.
    """
    steps = PixelSteps(step, Path(folder), settings)
    require_processor(Path(folder), step.processor)
    return steps
