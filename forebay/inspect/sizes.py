"""How large images are as their model sees them, and how much of a batch is padding beside the smaller ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.inspect.histogram import count_histogram
from forebay.steps.form import BatchForm, FieldForm
from forebay.store.cache import Cache
from forebay.store.image.arrays import shape_name
from forebay.store.layout import ROW_BITS, ROW_MASK, Array

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
    if cache.mirror is not None or _GROUP not in cache.listed or "form" not in cache.constants:
        return None
    try:
        field = BatchForm.from_json(cache.constants["form"]).pixels
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
