"""How an image's patches lie on disk: four codecs, one result."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from forebay.store.image.pixels import Alpha, Patches, decode_image, patchify, resized
from forebay.store.image.settings import ImageSettings

if TYPE_CHECKING:
    from PIL.Image import Image

Codec = Literal["raw", "zstd", "webp", "source"]
Bytes = npt.NDArray[np.uint8]

FIELDS: dict[Codec, str] = {"raw": "patches", "zstd": "patches_zstd", "webp": "image_webp", "source": "image_file"}
"""The media field of a codec: `patches` is uint8 [n, 3 * patch_size^2], the others uint8 [bytes]."""

_ZSTD_LEVEL = 3
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_WEBP_MAX_SIDE = 16_383
_WEBP_EFFORT = {"quality": 20, "method": 1}
"""Of photos 6 % more bytes than Pillow's defaults (80, 4), in a seventh of the time to write; reading costs the same."""


def encode(codec: Codec, *, data: bytes, pixels: npt.NDArray[np.uint8], patches: Patches) -> tuple[str, Bytes]:
    """Returns the field's name and what is stored in it.

    data: the encoded image as it came; pixels: uint8 [height, width, 3], resized; patches: of those pixels.

    `webp` is lossless WebP of the resized image; an image with a side above 16,383 pixels, which WebP cannot hold, is stored
    in the same field as `zstd` would store it; its first four bytes say which.
    """
    if codec == "raw":
        return FIELDS[codec], patches
    if codec == "source":
        return FIELDS[codec], np.frombuffer(data, np.uint8)
    if codec == "webp" and max(pixels.shape) <= _WEBP_MAX_SIDE:
        return FIELDS[codec], np.frombuffer(_webp(pixels), np.uint8)
    return FIELDS[codec], np.frombuffer(_zstd().compress(np.ascontiguousarray(patches)), np.uint8)


def decode(
    codec: Codec,
    stored: Bytes,
    *,
    grid: tuple[int, int, int],
    settings: ImageSettings,
    max_pixels: int,
    alpha: Alpha = "white",
) -> Patches:
    """Returns the patches uint8 [n, 3 * patch_size^2] of what `encode` returned; of `raw` the array itself.

    grid: the image's `image_grid_thw`. max_pixels, alpha: what the image was built under. `source` decodes and resizes
    again with Pillow: the stored bytes of an image whose patches another backend made would not give its patches.
    """
    if codec == "raw":
        return stored
    if codec == "source":
        image = decode_image(stored.tobytes(), max_pixels=max_pixels, sample_id="of the cache", alpha=alpha)
        return patchify(resized(image, settings), settings)
    if codec == "webp" and stored[:4].tobytes() != _ZSTD_MAGIC:
        return patchify(np.asarray(_opened_webp(stored)), settings)
    size_bytes = grid[1] * grid[2] * settings.patch_bytes
    buffer = _zstd().decompress(stored, decompressed_size=size_bytes)
    return np.frombuffer(buffer, np.uint8).reshape(-1, settings.patch_bytes)


def _zstd() -> Any:
    import pyarrow as pa

    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)


def _webp(pixels: npt.NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", lossless=True, **_WEBP_EFFORT)
    return file.getvalue()


def _opened_webp(stored: Bytes) -> Image:
    from PIL.WebPImagePlugin import WebPImageFile

    return WebPImageFile(io.BytesIO(stored.tobytes()))
