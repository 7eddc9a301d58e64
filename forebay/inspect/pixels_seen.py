"""Pixels that a person can look at, of what a processor gave: an image as the model sees it, rescaled to be shown.

Stored values are codes, or floats around zero. The values that a channel can take, from the least to the greatest, are
shown as 0 to 255, so an image that was normalised by mean and deviation has its own colours again.

The images of a sample as pictures: rebuilt from patches, as their model sees them, or the file that was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import xxhash

from forebay.config.remote import is_url
from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.image.processor.codes import levels_of, scaled
from forebay.store.image.codec import decode_image
from forebay.store.image.stored_items import MAX_BYTES
from forebay.store.layout import Array

_GAP = 2
"""Pixels between two tiles."""
_BETWEEN = 128
"""Their grey."""
_CHANNELS = (3, 1)
_ENDINGS = ("Fast", "Pil")
_IN_BLOCKS = frozenset(
    (
        "Qwen2VLImageProcessor",
        "CohereCompassImageProcessor",
        "Ernie4_5_VLMoeImageProcessor",
        "Glm4vImageProcessor",
        "Glm46VImageProcessor",
    )
)
"""Classes whose patches stand in blocks of 2 x 2, each (channel, time, y, x), and `image_grid_thw` beside them."""
_MERGE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Pixels of an image. how: what they are, for a caption."""

    pixels: Array
    """uint8 [height, width, 3]."""
    how: str


def view_of(form: BatchForm, arrays: Mapping[str, Array]) -> View | None:
    """Returns one image as its model sees it; None where the order of its patches is not known.

    arrays: of each stored field of the form, codes where it has a table.
    """
    field = form.pixels
    array = arrays[field.name]
    if not array.size:
        return None
    levels, how = levels_of(field, array), "as the model sees it"
    if field.table is not None:
        how += ", its values rescaled to 0 to 255"
    elif field.stored_dtype != "uint8":
        how += ", from the least to the greatest of its values"
    if len(field.shape) == 2 and field.shape[-1] is not None and len(field.grows) < 2:  # a patch a row
        pixels = _laid_out(form, field, levels, arrays)
        return None if pixels is None else View(pixels=pixels, how=f"{how}, its patches put together")
    shape, table = array.shape, field.table
    candidates = (len(shape) - 3, len(shape) - 1) if len(shape) > 2 else ()
    axis = next((axis for wanted in _CHANNELS for axis in candidates if shape[axis] == wanted), None)
    if table is not None and len(table.values) > 1 and table.inner == 1:
        axis = table.axis
    planes = levels[..., None] if axis is None else np.moveaxis(levels, axis, -1)
    tiles = planes.reshape(-1, *planes.shape[-3:])
    rgb = tiles if tiles.shape[-1] == 3 else np.repeat(tiles[..., :1], 3, axis=-1)
    if len(rgb) == 1:
        return View(pixels=np.ascontiguousarray(rgb[0]), how=how)
    size = f"{rgb.shape[2]} x {rgb.shape[1]}"
    return View(pixels=_grid(rgb), how=f"{how}: {len(rgb)} tiles of {size}, in their order")


def _grid(tiles: Array) -> Array:
    """Returns tiles [n, height, width, 3] side by side, row by row, in about as many rows as columns."""
    count, height, width, _ = tiles.shape
    columns = max(1, round(math.sqrt(count * height / width)))
    rows = -(-count // columns)
    shape = (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3)
    pixels = np.full(shape, _BETWEEN, np.uint8)
    for number, tile in enumerate(tiles):
        top, left = number // columns * (height + _GAP), number % columns * (width + _GAP)
        pixels[top : top + height, left : left + width] = tile
    return pixels


def _laid_out(form: BatchForm, field: FieldForm, levels: Array, arrays: Mapping[str, Array]) -> Array | None:
    """Returns the image of flattened patches [n, d] in the order of the classes that are known; else None."""
    name = form.made_by
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    if name == "Siglip2ImageProcessor" and "spatial_shapes" in arrays:
        return _by_rows(levels, _numbers(arrays["spatial_shapes"]))
    if name == "Pix2StructImageProcessor" and levels.shape[1] > 2:
        # The first two values of a patch are its row and its column, from 1; 0 stands in padding.
        places = arrays[field.name][:, :2]
        held = places[:, 0] > 0
        grid = [int(n) for n in places.max(axis=0)]
        return _by_rows(levels_of(field, arrays[field.name][held][:, 2:]), grid) if held.any() else None
    if name in _IN_BLOCKS and "image_grid_thw" in arrays and field.table is not None:
        return _by_blocks(levels, _numbers(arrays["image_grid_thw"]), inner=field.table.inner)
    return None


def _numbers(array: Array) -> list[int]:
    return [int(number) for number in array.reshape(-1)[:3].tolist()]


def _by_rows(levels: Array, grid: Sequence[int]) -> Array | None:
    """Returns patches (y, x, channel) row by row."""
    side = math.isqrt(levels.shape[1] // 3)
    if len(grid) != 2 or 3 * side * side != levels.shape[1] or not 0 < math.prod(grid) <= len(levels):
        return None
    rows, columns = grid
    split = levels[: rows * columns].reshape(rows, columns, side, side, 3)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3, 4)).reshape(rows * side, columns * side, 3)


def _by_blocks(levels: Array, grid: Sequence[int], *, inner: int) -> Array | None:
    """Returns patches (channel, time, y, x) in blocks of 2 x 2, at the first of their times. inner: (time, y, x)."""
    times = next((n for n in (1, 2) if math.isqrt(inner // n) ** 2 * n == inner), 0)
    if len(grid) != 3 or not times or levels.shape[1] != 3 * inner:
        return None
    _, rows, columns = grid
    if not 0 < rows * columns <= len(levels) or rows % _MERGE or columns % _MERGE:
        return None
    side = math.isqrt(inner // times)
    blocks = (rows // _MERGE, columns // _MERGE, _MERGE, _MERGE, 3, times, side, side)
    split = levels[: rows * columns].reshape(blocks)[:, :, :, :, :, 0]
    return np.ascontiguousarray(split.transpose(0, 2, 5, 1, 3, 6, 4)).reshape(rows * side, columns * side, 3)


def matrix(array: Array) -> Array:
    """Returns an array of two axes as a grey picture of its values, uint8 [rows, columns, 3]; of no size: one pixel."""
    if not array.size or array.nbytes > MAX_BYTES:
        return np.zeros((1, 1, 3), np.uint8)
    flat = array.reshape(len(array), -1)
    return np.repeat(scaled(flat, flat.min(), flat.max())[..., None], 3, axis=-1)


_MAX_PIXELS = 89_478_485
_MAX_FILE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image to be shown. about: lines that stand below its name. grid, merge: its patches, where it has some.

    pixels: uint8 [height, width, 3]. mark: stands before its name.
    """

    pixels: Array
    name: str
    about: tuple[str, ...] = ()
    grid: tuple[int, int] = (0, 0)
    merge: int = 1
    mark: str = ""

    @property
    def aspect(self) -> float:
        """Width over height."""
        return float(self.pixels.shape[1] / self.pixels.shape[0])


def original_of(name: str, content: str, config: Config) -> Array | None:
    """Returns the pixels of the file that an image was made of; None where it is not there, or holds other bytes.

    content: xxh3-128 of its bytes. Images inside of tars and tables are not looked for.
    """
    for path in _candidates(name, config):
        try:
            if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
                continue
            data = path.read_bytes()
            if xxhash.xxh3_128_hexdigest(data) == content:
                return np.asarray(decode_image(data, max_pixels=_MAX_PIXELS, sample_id=name))
        except (OSError, ValueError, SampleError):
            continue
    return None


def _candidates(name: str, config: Config) -> Iterator[Path]:
    inner = PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        return
    for manifest in (Path(place) for place in config.source.places if not is_url(place)):
        yield (manifest if manifest.is_dir() else manifest.parent) / inner
