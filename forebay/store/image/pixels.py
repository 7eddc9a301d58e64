"""Encoded bytes to RGB pixels of the processor's size, as transformers makes them, and these to patches and back."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from forebay.store.image.formats import open_image, reading
from forebay.store.image.image_settings import ImageSettings, grid_thw

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Alpha = Literal["white", "drop"]
"""What becomes of a transparent image: laid on white, or the colours under its alpha shown."""


def decode_image(data: bytes, *, max_pixels: int, sample_id: str, alpha: Alpha = "white") -> Image:
    """Returns the image of encoded bytes in mode RGB, the orientation of its EXIF applied, as the processor has it.

    alpha: "white" is, bit for bit, what the processor makes of the open image (`ImageOps.exif_transpose`, then its own
    conversion), as `datasets` hands it over: what is transparent (alpha channels, alphas of a palette, a PNG's tRNS) is
    laid on white. "drop" is what it makes of the path of such a file (transformers' `load_image`: `exif_transpose`,
    `convert("RGB")`): alphas are dropped, and the colours under them show; only a single transparent colour (a tRNS of
    grey or RGB, one entry of a palette) becomes white. CMYK, palette, grey and 1-bit images are converted by Pillow;
    colour profiles are ignored.

    Safe in threads: decoding and conversion release the GIL, nothing global is touched. Raises DecodeError as
    `open_image` does, and `unreadable_image` for truncated or corrupt data.
    """
    from PIL import ImageOps

    image: Image = open_image(io.BytesIO(data), max_pixels=max_pixels, sample_id=sample_id)
    with reading(max_pixels=max_pixels, sample_id=sample_id):
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # not in place it copies every image
        return _on_white(image) if alpha == "white" else _without_alpha(image)


def _on_white(image: Image) -> Image:
    from PIL import Image as Images

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Images.new("RGBA", image.size, (255, 255, 255, 255))
        image = Images.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _without_alpha(image: Image) -> Image:
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        del image.info["transparency"]  # as `convert` does, which warns of it
    return _on_white(image if image.mode == "RGB" else image.convert("RGB"))


def resized(image: Image, settings: ImageSettings) -> Pixels:
    """Returns an RGB image's pixels uint8 [height, width, 3] at the size of its grid; read-only or the caller's own.

    Resized by Pillow as the processor's PIL backend does, which stays uint8. Raises SampleError as `grid_thw` does.
    """
    _, rows, columns = grid_thw(*image.size, settings)
    size = (columns * settings.patch_size, rows * settings.patch_size)
    return np.asarray(image if size == image.size else image.resize(size, resample=settings.resample))


Patches = npt.NDArray[np.uint8]


def patchify(pixels: npt.NDArray[np.uint8], settings: ImageSettings) -> Patches:
    """Returns the patches uint8 [n, 3 * patch_size^2] of pixels uint8 [height, width, 3], one temporal copy.

    Rows in the processor's order: blocks of merge_size x merge_size patches, row by row, and the patches of a block row
    by row; (channel, y, x) inside a row. Both sides are multiples of patch_size * merge_size.
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
