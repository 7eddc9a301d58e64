"""How large images are as their model sees them, and how much of a batch is padding beside the smaller ones.

Histograms of lengths: bins of round widths, and how many samples are in each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.steps.form import BatchForm, FieldForm
from forebay.store.cache import Cache
from forebay.store.image.stored_items import shape_name
from forebay.store.layout import ROW_BITS, ROW_MASK, Array

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
