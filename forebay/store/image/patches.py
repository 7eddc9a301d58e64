"""Pixels to the processor's rows of patches, and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forebay.store.image.settings import ImageSettings

Patches = npt.NDArray[np.uint8]


def patchify(pixels: npt.NDArray[np.uint8], settings: ImageSettings) -> Patches:
    """Returns the patches uint8 [n, 3 * patch_size^2] of pixels uint8 [height, width, 3], one temporal copy.

    Rows in the processor's order: blocks of merge_size x merge_size patches, row by row, and the patches of a block row by
    row; (channel, y, x) inside a row. Both sides are multiples of patch_size * merge_size.
    """
    height, width, _ = pixels.shape
    blocks = np.empty(_shape(height, width, settings), np.uint8)
    # [rows, merge, y, columns, merge, x, channel] to [rows, columns, merge, merge, channel, y, x]
    split = pixels.reshape(
        blocks.shape[0],
        settings.merge_size,
        settings.patch_size,
        blocks.shape[1],
        settings.merge_size,
        settings.patch_size,
        3,
    )
    blocks[...] = split.transpose(0, 3, 1, 4, 6, 2, 5)
    return blocks.reshape(-1, settings.patch_bytes)


def unpatchify(patches: Patches, grid: tuple[int, int, int], settings: ImageSettings) -> npt.NDArray[np.uint8]:
    """Returns the pixels uint8 [height, width, 3] that `patchify` made these patches of."""
    _, rows, columns = grid
    shape = _shape(rows * settings.patch_size, columns * settings.patch_size, settings)
    pixels = patches.reshape(shape).transpose(0, 2, 5, 1, 3, 6, 4)
    return np.ascontiguousarray(pixels).reshape(rows * settings.patch_size, columns * settings.patch_size, 3)


def _shape(height: int, width: int, settings: ImageSettings) -> tuple[int, ...]:
    merge, side = settings.merge_size, settings.patch_size
    return height // settings.factor, width // settings.factor, merge, merge, 3, side, side
