"""Images from bytes to RGB pixels of the processor's size, to patches, and to one of four codecs on disk; and back."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from forebay.errors import CacheCorruptError, SampleError
from forebay.store.image.formats import EVERY_IMAGE, MoreImages, open_image, reading
from forebay.store.image.image_settings import ImageSettings, grid_thw
from forebay.store.image.image_windows import NO_WINDOWS, ImageWindows, Undecoded
from forebay.store.layout import Array, FieldSpec, variant_name

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Alpha = Literal["white", "drop"]
"""What becomes of a transparent image: laid on white, or the colours under its alpha shown."""


def decode_image(
    data: bytes,
    *,
    max_pixels: int,
    sample_id: str,
    alpha: Alpha = "white",
    more: Collection[MoreImages] = (),
    frame: int | None = None,
) -> Image:
    """Returns the image of encoded bytes in mode RGB, the orientation of its EXIF applied, as the processor has it.

    alpha: "white" is, bit for bit, what the processor makes of the open image (`ImageOps.exif_transpose`, then its own
    conversion), as `datasets` hands it over: what is transparent (alpha channels, alphas of a palette, a PNG's tRNS) is
    laid on white. "drop" is what it makes of the path of such a file (transformers' `load_image`: `exif_transpose`,
    `convert("RGB")`): alphas are dropped, and the colours under them show; only a single transparent colour (a tRNS of
    grey or RGB, one entry of a palette) becomes white. CMYK, palette, grey and 1-bit images are converted by Pillow;
    colour profiles are ignored. more, frame: see `open_image`.

    Safe in threads: decoding and conversion release the GIL, nothing global is touched. Raises DecodeError as
    `open_image` does, and `unreadable_image` for truncated or corrupt data.
    """
    from PIL import ImageOps

    image: Image = open_image(io.BytesIO(data), max_pixels=max_pixels, sample_id=sample_id, more=more, frame=frame)
    with reading(max_pixels=max_pixels, sample_id=sample_id):
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # not in place it copies every image
        return _on_white(image) if alpha == "white" else _without_alpha(image)


def frame_file(data: bytes, *, sample_id: str, frame: int, **how: Any) -> bytes:
    """Returns one frame of an image file as a PNG of its RGB pixels, in which it stands for a file of its own.

    how: as `decode_image` takes it, and raises.
    """
    file = io.BytesIO()
    decode_image(data, sample_id=sample_id, frame=frame, **how).save(file, "PNG", compress_level=1)
    return file.getvalue()


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


def resized(image: Image, settings: ImageSettings, grid: tuple[int, int, int] | None = None) -> Pixels:
    """Returns an RGB image's pixels uint8 [height, width, 3] at the size of its grid; read-only or the caller's own.

    Resized by Pillow as the processor's PIL backend does, which stays uint8. grid: None for that of the processor.
    Raises SampleError as `grid_thw` does.
    """
    _, rows, columns = grid or grid_thw(*image.size, settings)
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


def mirrored(patches: Patches, grid: tuple[int, int, int], settings: ImageSettings) -> Patches:
    """Returns the patches of an image that is mirrored left to right, of the patches of the image."""
    _, rows, columns = grid
    shape = _shape(rows * settings.patch_size, columns * settings.patch_size, settings)
    return np.ascontiguousarray(patches.reshape(shape)[:, ::-1, :, ::-1, :, :, ::-1]).reshape(patches.shape)


def _shape(height: int, width: int, settings: ImageSettings) -> tuple[int, ...]:
    merge, side = settings.merge_size, settings.patch_size
    return height // settings.factor, width // settings.factor, merge, merge, 3, side, side


Codec = Literal["raw", "zstd", "webp", "source"]
Bytes = npt.NDArray[np.uint8]
PATCHES = "patches"
FIELDS: dict[Codec, str] = {"raw": PATCHES, "zstd": "patches_zstd", "webp": "image_webp", "source": "image_file"}
"""The field of a codec: `patches` is uint8 [n, 3 * patch_size^2], the others uint8 [bytes]."""
SECONDS, VIDEO_GRIDS, VIDEO_PATCHES = "second_per_grid_ts", "video_grid_thw", "video_patches"
"""The fields of a sample's videos: seconds of a step in time, grids, patches of `temporal_patch_size` frames."""
_ZSTD_LEVEL = 3
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_WEBP_MAX_SIDE = 16_383
_WEBP_EFFORT = {"quality": 20, "method": 1}
"""Photos take 6 % more bytes than by Pillow's defaults (80, 4), a seventh of the time to write, the same to read."""


def encode(codec: Codec, *, data: bytes, pixels: npt.NDArray[np.uint8], patches: Patches) -> tuple[str, Bytes]:
    """Returns the field's name and what is stored in it.

    data: the encoded image as it came; pixels: uint8 [height, width, 3], resized; patches: of those pixels.

    `webp` is lossless WebP of the resized image; an image with a side above 16,383 pixels, which WebP cannot hold, is
    stored in the same field as `zstd` would store it; its first four bytes say which.
    """
    if codec == "raw":
        return FIELDS[codec], patches
    if codec == "source":
        return FIELDS[codec], np.frombuffer(data, np.uint8)
    if codec == "webp" and max(pixels.shape) <= _WEBP_MAX_SIDE:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "WEBP", lossless=True, **_WEBP_EFFORT)
        return FIELDS[codec], np.frombuffer(file.getbuffer(), np.uint8)
    return FIELDS[codec], np.frombuffer(zstd().compress(np.ascontiguousarray(patches)), np.uint8)


def decode(
    codec: Codec,
    stored: Bytes,
    *,
    grid: tuple[int, int, int],
    settings: ImageSettings,
    max_pixels: int,
    alpha: Alpha = "white",
    more: Collection[MoreImages] = (),
    part: Callable[[Image], Image] = lambda image: image,
) -> Patches:
    """Returns the patches uint8 [n, 3 * patch_size^2] of what `encode` returned; of `raw` the array itself.

    grid: the image's `image_grid_thw`. max_pixels, alpha, more: what the image was built under. `source` decodes and
    resizes again with Pillow: the stored bytes of an image whose patches another backend made would not give them.
    part: of the image, which only `source` still has to cut.
    """
    if codec == "raw":
        return stored
    if codec == "source":
        data, named = stored.tobytes(), "of the cache"
        image = decode_image(data, max_pixels=max_pixels, sample_id=named, alpha=alpha, more=more)
        return patchify(resized(part(image), settings, grid), settings)
    if codec == "webp" and stored[:4].tobytes() != _ZSTD_MAGIC:
        from PIL.WebPImagePlugin import WebPImageFile

        return patchify(np.asarray(WebPImageFile(io.BytesIO(stored.tobytes()))), settings)
    buffer = zstd().decompress(stored, decompressed_size=grid[1] * grid[2] * settings.patch_bytes)
    return np.frombuffer(buffer, np.uint8).reshape(-1, settings.patch_bytes)


def zstd() -> Any:
    """Returns the codec of what is stored compressed."""
    import pyarrow as pa

    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)


_ROUNDING = 16
"""What rounding to whole patches makes of a thin image at most: the square root of the aspect ratio allowed, 200."""


_MOST_BYTES = 1 << 34
"""Of the patches of a video. A cache that says more is none that forebay writes."""


def encode_video(codec: Codec, patches: Patches) -> tuple[str, Bytes]:
    """Returns the field's name and what is stored in it of a video: of every codec but `raw` zstd.

    patches: uint8 [temporal_patch_size * n, 3 * patch_size^2].
    """
    return FIELDS[codec], patches if codec == "raw" else np.frombuffer(zstd().compress(patches), np.uint8)


def _grids(items: Sequence[Mapping[str, Array]]) -> Array:
    return np.concatenate([np.zeros((0, 3), np.int32), *(item["image_grid_thw"] for item in items)])


@dataclass(frozen=True)
class StoredImages:
    """How a cache stores images as patches. has_videos: and videos among them. windows: stored beside images."""

    codec: Codec
    settings: ImageSettings
    max_pixels: int
    alpha: Alpha
    more: tuple[MoreImages, ...] = ()
    has_videos: bool = False
    windows: ImageWindows = NO_WINDOWS

    @classmethod
    def of(cls, metadata: Mapping[str, Any], *, folder: Path) -> Self:
        """Returns what a cache's metadata says. Raises CacheCorruptError where it says what no forebay writes."""
        try:
            constants = metadata["constants"]["image"]
            stored = cls(
                metadata["codec"],
                ImageSettings.from_json(constants["image"]),
                int(constants["max_pixels"]),
                constants["alpha"],
                tuple(constants.get("more_images", ())),
                "video_table" in constants,
                ImageWindows.from_json(constants.get("crops", [])),
            )
            if stored.alpha not in get_args(Alpha) or not {*stored.more} <= {*EVERY_IMAGE}:
                raise ValueError(f"alpha is {stored.alpha!r}, more_images {stored.more!r:.40}")
            names = {field["name"] for field in metadata["fields"] if field["role"] == "tensor"}
            wanted = {*stored.names, "image_grid_thw", *([SECONDS] if stored.has_videos else [])}
            if missing := wanted - names:
                raise KeyError(*missing)
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise CacheCorruptError(
                f"{folder}: its metadata.json is none that forebay writes: of its images it says {err!r:.80}; "
                "run: forebay preprocess CONFIG --rebuild"
            ) from err
        return stored

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of the values of an image, and behind them those of its windows that are stored."""
        return tuple(variant_name(FIELDS[self.codec], name) for name in ("", *self.windows.stored(self.codec)))

    @property
    def is_as_stored(self) -> bool:
        """See `StoredItems`; images and videos are told apart one by one."""
        return self.codec == "raw" and not self.has_videos

    def of_batch(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """See `StoredItems`; the grids of a sample's images are one array."""
        none = np.zeros((0, 3), np.int32)
        return {**columns, "image_grid_thw": [np.concatenate([none, *grids]) for grids in columns["image_grid_thw"]]}

    def sample(self, text: dict[str, Any], images: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        """See `StoredItems`: every codec gives the same `patches`. Videos stand apart from images."""
        if not self.has_videos:
            return {**text, "image_grid_thw": _grids(images), **dict(self._parts(images))}
        stills = [image for image in images if not image[SECONDS].any()]
        videos = [image for image in images if image[SECONDS].any()]
        return {
            **text,
            "image_grid_thw": _grids(stills),
            PATCHES: tuple(map(self._patches, stills)),
            VIDEO_GRIDS: _grids(videos),
            VIDEO_PATCHES: tuple(map(self._frames, videos)),
            SECONDS: np.concatenate([np.zeros(0, np.float32), *(video[SECONDS] for video in videos)]),
        }

    def joined(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a sample whose `patches` are one array, those of its images one behind the other."""
        widths = {spec.name: spec.shape[0] for spec in self.columns() if spec.dtype == "uint8"}
        none = {name: np.zeros((0, width), np.uint8) for name, width in widths.items()}
        return {**sample, **{name: np.concatenate([none[name], *sample[name]]) for name in none}}

    def columns(self) -> list[FieldSpec]:
        """See `StoredItems`."""
        width = self.settings.patch_bytes
        found = [
            FieldSpec(name="image_grid_thw", dtype="int32", shape=(3,)),
            FieldSpec(name=PATCHES, dtype="uint8", shape=(width,)),
        ]
        found += [replace(found[1], name=variant_name(PATCHES, name)) for name in self.windows.names]
        if self.has_videos:
            wide = width * self.settings.temporal_patch_size
            found += [
                FieldSpec(name=VIDEO_GRIDS, dtype="int32", shape=(3,)),
                FieldSpec(name=VIDEO_PATCHES, dtype="uint8", shape=(wide,)),
                FieldSpec(name=SECONDS, dtype="float32"),
            ]
        return found

    def in_order(self, sample: Mapping[str, Any], rows: Iterable[Mapping[str, Array]]) -> Iterator[tuple[Array, Array]]:
        """Yields patches and grid of the items of a sample, videos among them. rows: what is stored of each."""
        stills = zip(sample[PATCHES], sample["image_grid_thw"], strict=True)
        videos = zip(sample.get(VIDEO_PATCHES, ()), sample.get(VIDEO_GRIDS, ()), strict=True)
        for row in rows:
            yield next(videos if self.has_videos and row[SECONDS].any() else stills)

    def in_columns(self, sample: dict[str, Any]) -> dict[str, Any]:
        """See `StoredItems`: `patches` of each image."""
        return sample

    def _frames(self, video: Mapping[str, Array]) -> Array:
        """Returns the patches of a video, uint8 [n, temporal_patch_size * 3 * patch_size^2]; raises as `_patches`."""
        stored, (grid,) = video[FIELDS[self.codec]], video["image_grid_thw"].tolist()
        width = self.settings.patch_bytes * self.settings.temporal_patch_size
        count = math.prod(grid)
        if min(grid) < 1 or count * width > _MOST_BYTES:
            raise ValueError(f"a video has a grid of {grid}")
        try:
            if self.codec != "raw":
                stored = np.frombuffer(zstd().decompress(stored, decompressed_size=count * width), np.uint8)
            return stored.reshape(count, width)
        except (OSError, ValueError) as err:
            raise ValueError(f"the bytes of a video of {grid} do not decode: {err}") from err

    def _parts(self, images: Sequence[Mapping[str, Array]]) -> Iterator[tuple[str, tuple[Array, ...]]]:
        """Yields the patches of images and of their windows; beside windows a codec decodes what is looked at alone."""
        is_later = self.codec != "raw" and self.windows.count > 0
        for name in ("", *self.windows.names):
            decoded = partial(self._patches, window=name)
            yield variant_name(PATCHES, name), (Undecoded(images, decoded) if is_later else tuple(map(decoded, images)))

    def _patches(self, image: Mapping[str, Array], window: str = "") -> Array:
        """Raises ValueError where the values are none of an image, whatever their checksum says."""
        field = variant_name(FIELDS[self.codec], "" if self.codec == "source" else window)
        stored, (grid,) = image[field], image["image_grid_thw"].tolist()
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
                more=self.more,
                part=partial(self.windows.part, name=window),
            )
        except (SampleError, OSError, ValueError) as err:
            raise ValueError(f"the bytes of an image do not decode: {err}") from err
        if patches.shape != (rows * columns, self.settings.patch_bytes):
            raise ValueError(f"an image has patches {list(patches.shape)} and a grid of {grid}")
        return patches
