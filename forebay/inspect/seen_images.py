"""Images as their model sees them: rescaled to be looked at, how large they are, and how much of a batch is padding.

Stored values are codes, or floats around zero. The values that a channel can take, from the least to the greatest, are
shown as 0 to 255, so an image that was normalised by mean and deviation has its own colours again. An image is rebuilt
from its patches, or it is the file that was read. Beside them: histograms of lengths, in bins of round widths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash

from forebay.config.remote import is_url
from forebay.config.tree import Config
from forebay.errors import CacheError, SampleError
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.image.processor.codes import levels_of, scaled
from forebay.store.cache import Cache
from forebay.store.image.codec import decode_image
from forebay.store.image.stored_items import MAX_BYTES, shape_name
from forebay.store.layout import ROW_BITS, ROW_MASK, Array

_GAP = 2
"""Pixels between two tiles."""
_BETWEEN = 128
"""Their grey."""
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
    axis = next((axis for wanted in (3, 1) for axis in candidates if shape[axis] == wanted), None)
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
    for ending in ("Fast", "Pil"):
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
            if not path.is_file() or path.stat().st_size > (256 * 1024 * 1024):
                continue
            data = path.read_bytes()
            if xxhash.xxh3_128_hexdigest(data) == content:
                return np.asarray(
                    decode_image(data, max_pixels=89_478_485, sample_id=name, more=config.source.more_images)
                )
        except (OSError, ValueError, SampleError):
            continue
    return None


def _candidates(name: str, config: Config) -> Iterator[Path]:
    inner = PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        return
    for manifest in (Path(place) for place in config.source.places if not is_url(place)):
        yield (manifest if manifest.is_dir() else manifest.parent) / inner


_WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)
_MAX_BINS = 16
_BODY = 0.99
"""Share of the clips that gets bins of equal width; the last bin holds the longest ones whatever their length."""


def duration_histogram(durations_s: Array) -> dict[str, list[float]]:
    """Returns `edges_s`, `samples` and `hours`: at most 17 bins of a round width from 0 that hold all durations.

    durations_s: float64 [num_samples], 0 or more. A clip is in exactly one bin [edges_s[i], edges_s[i + 1]), the last
    one closed. Bins are chosen for all but the longest hundredth of the clips, so that one clip of an hour does not
    push all others into one bar.
    """
    edges_s = _edges_s(durations_s)
    bins, count = _bins_of(durations_s, edges_s), len(edges_s) - 1
    hours = np.bincount(bins, weights=durations_s, minlength=count) / 3600
    return {
        "edges_s": edges_s.tolist(),
        "samples": np.bincount(bins, minlength=count).tolist(),
        "hours": hours.tolist(),
    }


def count_histogram(lengths: Array) -> dict[str, list[int]]:
    """Returns `edges` and `samples`: at most 18 bins [edges[i], edges[i + 1]) of a round width, the last one closed.

    lengths: integers [num_samples], 0 or more. As of durations the longest hundredth shares the last bin; the first
    edge is near the shortest one.
    """
    if not len(lengths):
        return {"edges": [0, 1], "samples": [0]}
    low, high = int(lengths.min()), int(lengths.max())
    body = int(np.quantile(lengths, _BODY, method="higher"))
    widths = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    width = next(w for w in widths if body - low < w * _MAX_BINS)
    edges = [*range(low // width * width, body + 1, width), body // width * width + width]
    if width == 1 and high >= edges[-1]:
        edges.append(high + 1)  # no bin of one number holds the next one too
    elif high > edges[-1]:
        edges.append(high)
    return {"edges": edges, "samples": np.bincount(_bins_of(lengths, edges), minlength=len(edges) - 1).tolist()}


def range_text(low: int, high: int, *, is_exact: bool) -> str:
    """Returns what a bin [low, high) is called. is_exact: bins of its histogram have a width of 1."""
    if not is_exact:
        return f"{low:,} - {high:,}"
    return f"{low:,}" if high - low == 1 else f"{low:,} - {high - 1:,}"


def _bins_of(values: Array, edges: Array | list[int]) -> Array:
    # Not np.histogram: it takes a duration on an edge of 0.1 s to either side, as the edge was rounded.
    return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)


def _edges_s(durations_s: Array) -> Array:
    longest_s = float(durations_s.max(initial=0.0))
    body_s = float(np.quantile(durations_s, _BODY, method="higher")) if len(durations_s) else 0.0
    width_s = next((w for w in _WIDTHS_S if body_s <= w * _MAX_BINS), None)
    if width_s is None:
        width_s = 3600.0 * np.ceil(body_s / 3600 / _MAX_BINS)
    count = max(1, int(np.ceil(body_s / width_s)))
    edges_s = np.round(np.arange(count + 1) * width_s, 6)
    return np.append(edges_s, longest_s) if longest_s > edges_s[-1] else edges_s


_PLANES = 3
"""Axes of an image: channels, height, width in one order or the other."""
_GROUP = "image"
_MAX_DRAWN = 4096
"""Samples of which padding is estimated."""


def size_facts(cache: Cache) -> dict[str, Any] | None:
    """Returns `image_sizes` of `forebay inspect --json`, in pixels as the model sees them; None of what has no sides.

    fixed: (width, height) where all have one size, else null; then longest, shortest: histograms of the longer and the
    shorter side, of stored images. None also of a cache in a store: its shards would be downloaded.
    """
    if (field := _sided(cache)) is None:
        return None
    sides = _sides(field)
    fixed = [field.shape[axis] for axis in sides]
    if None not in fixed:
        return {"fixed": [fixed[1], fixed[0]], "longest": None, "shortest": None}
    try:
        count = cache.unit_count(_GROUP)
        found = [sizes for number in range(count) if len(sizes := _of_shard(cache, field, number))]
    except CacheError:
        return None
    if not found:
        return None
    sizes = np.concatenate(found)
    return {
        "fixed": None,
        "longest": count_histogram(sizes.max(axis=1)),
        "shortest": count_histogram(sizes.min(axis=1)),
    }


def pixel_padding(cache: Cache, groups: Sequence[Array], batch_sizes: Sequence[int]) -> float | None:
    """Returns which share of the pixels of a batch is padding, by batches drawn at random; None: there is none.

    groups: the samples of each bucket. batch_sizes: of each bucket.
    """
    field = _sided(cache)
    if field is None or field.join != "stack" or not field.grows or field.pad is None:
        return None
    rng, held, room = np.random.default_rng(0), 0, 0
    for samples, size in zip(groups, batch_sizes, strict=True):
        drawn = rng.permutation(samples)[: max(_MAX_DRAWN // max(len(groups), 1), size)]
        for start in range(0, len(drawn), size):
            sizes = _of_samples(cache, field, drawn[start : start + size])
            if len(sizes):
                held += int(sizes.prod(axis=1).sum())
                room += math.prod(field.room(int(side)) for side in sizes.max(axis=0)) * len(sizes)
    return 1 - held / room if room else None


def _sided(cache: Cache) -> FieldForm | None:
    """Returns the field of the pixels where an array is one image with two sides."""
    if cache.mirror is not None or _GROUP not in cache.listed or "form" not in cache.constants.of(_GROUP):
        return None
    try:
        field = BatchForm.from_json(cache.constants.of(_GROUP)["form"]).pixels
    except ValueError:
        return None
    return field if len(field.shape) == _PLANES and len(_sides(field)) == 2 else None


def _sides(field: FieldForm) -> list[int]:
    """Returns the axes of height and width."""
    channel = next((axis for axis in (0, 2) if field.shape[axis] in (1, 3)), None)
    return [axis for axis in range(_PLANES) if axis != channel] if channel is not None else []


def _of_shard(cache: Cache, field: FieldForm, number: int) -> Array:
    """Returns int64 [images, 2], (height, width) of a shard's images, without those that failed."""
    name, shard = shape_name(field.name), cache.shard(_GROUP, number)
    if name in cache.fields:
        return np.asarray(shard.column(name)[0].reshape(-1, _PLANES)[:, _sides(field)].astype(np.int64))
    grown = shard.lengths(field.name)
    columns = [grown if field.shape[axis] is None else np.full(len(grown), field.shape[axis]) for axis in _sides(field)]
    return np.asarray(np.stack(columns, axis=1)[grown > 0].astype(np.int64))


def _of_samples(cache: Cache, field: FieldForm, samples: Array) -> Array:
    """Returns int64 [images, 2] of the images of some samples."""
    found = [_item_size(cache, field, slot) for index in samples.tolist() for slot in cache.items_of(_GROUP, index)]
    return np.stack(found) if found else np.zeros((0, 2), np.int64)


def _item_size(cache: Cache, field: FieldForm, slot: int) -> Array:
    name, values = shape_name(field.name), cache.shard(_GROUP, slot >> ROW_BITS).row(slot & ROW_MASK)
    if name in values:
        return np.asarray(values[name].astype(np.int64)[_sides(field)])
    grown = [len(values[field.name]) if length is None else length for length in field.shape]
    return np.array([grown[axis] for axis in _sides(field)], np.int64)
