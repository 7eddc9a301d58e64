"""What a cache is, as one JSON document: all that `forebay inspect` prints of it, with histograms of the lengths."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import CacheError
from forebay.inspect.classes import class_facts
from forebay.inspect.histogram import count_histogram, duration_histogram
from forebay.inspect.languages import detection_facts
from forebay.inspect.plans import pack_bytes, plans_of
from forebay.inspect.processed import is_of_processor, processed_facts
from forebay.inspect.sample import float32_bytes, holds_images, image_counts, image_settings_of
from forebay.steps.form import promises
from forebay.steps.table import axis_names
from forebay.store.cache import Cache
from forebay.store.image.codec import FIELDS
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.metadata import check_description
from forebay.store.shard import shard_fields
from forebay.store.source import has_audio, length_of

logger = logging.getLogger(__name__)

INTERFACE = (
    "key",
    "format_version",
    "num_samples",
    "hours",
    "languages",
    "fields",
    "size_bytes",
    "excluded",
    "failed",
    "plans",
)
"""The fields of `--json` that are never renamed; more may be added."""


def cache_facts(cache: Cache, *, plan_roots: Sequence[Path]) -> dict[str, Any]:
    """Returns the document of `forebay inspect --json`, without `verify`.

    Beside the interface: num_tokens (of all samples together), folder, name, split, recipe_key, recipe, constants,
    groups, bytes_per_hour, clipped, longer, rejected (the file that lists what was left out), histogram, probe,
    made_with, promises (how batches of a declared form compare with those of what made it, in words), made_of (the
    caches that it was made of, if it was made of caches). Sizes are those of the shards.
    detection (see `detection_facts`; null where no language was detected). Without audio histogram is null, and lengths
    says how long the texts are. A cache of images has what `image_facts` says too, one of classes what `class_facts`.
    Raises CacheCorruptError where the metadata describes no cache, or the lengths are not those that were written.
    """
    metadata = cache.metadata
    check_description(cache.folder, metadata)
    durations_s = _durations_s(cache)
    hours = 0.0 if durations_s is None else float(durations_s.sum()) / 3600
    size_bytes = int(metadata["size_bytes"])
    plans = plans_of(cache.key, plan_roots)
    return {
        "key": cache.key,
        "format_version": metadata["format_version"],
        "num_samples": len(cache),
        "hours": hours,
        "languages": metadata["languages"],
        "fields": {name: _field(spec, axis_names(cache.constants)) for name, spec in cache.fields.items()},
        "size_bytes": size_bytes,
        "excluded": metadata["excluded"],
        "failed": metadata["failed"],
        "plans": [pack_bytes(cache, plan) for plan in plans] if cache.constants["features"] == "patches" else plans,
        "num_tokens": int(cache.lengths["num_tokens"].sum(dtype=np.int64)),
        "folder": os.path.abspath(cache.folder) if cache.mirror is None else cache.place,
        "name": metadata["name"],
        "split": metadata["split"],
        "sealed": True,
        "recipe_key": cache.recipe_key,
        "recipe": metadata["recipe"],
        "constants": dict(cache.constants),
        "rows_per_shard": metadata["rows_per_shard"],
        "groups": {group: _group(cache, group) for group in cache.groups},
        "bytes_per_hour": size_bytes / hours if hours else None,
        "clipped": metadata["clipped"],
        "longer": metadata["longer"],
        "rejected": os.path.abspath(cache.folder / "rejected.jsonl"),
        "histogram": None if durations_s is None else duration_histogram(durations_s),
        "lengths": token_lengths(cache.lengths["num_tokens"]) if durations_s is None else None,
        "detection": detection_facts(cache),
        "probe": metadata["probe"],
        "made_with": metadata["made_with"],
        "promises": promises(cache.constants),
        "made_of": metadata.get("made_of", []),
        **_of_images(cache),
    }


def _of_images(cache: Cache) -> dict[str, Any]:
    if is_of_processor(cache):
        return processed_facts(cache) | class_facts(cache)
    return image_facts(cache) if holds_images(cache) else {}


def unreadable_facts(folder: Path) -> dict[str, Any]:
    """Returns the document of a folder that cannot be opened: the interface with null everywhere."""
    return {**dict.fromkeys(INTERFACE), "folder": os.path.abspath(folder), "sealed": False}


def token_lengths(tokens: Array) -> dict[str, float]:
    """Returns `min`, `mean` and `max` of the tokens a sample (integers [num_samples]), all 0 where there are none."""
    if not len(tokens):
        return {"min": 0, "mean": 0.0, "max": 0}
    return {"min": int(tokens.min()), "mean": float(tokens.mean()), "max": int(tokens.max())}


def _durations_s(cache: Cache) -> Array | None:
    """Returns float64 [num_samples]; None for a cache without audio."""
    if holds_images(cache) or not has_audio(cache):
        return None
    return np.asarray(length_of(cache, "num_audio_samples") / cache.constants.get("sample_rate_hz", 1))


def axes(spec: FieldSpec, names: Mapping[str, str | int]) -> list[str | int]:
    """Returns a field's shape with the first axis named where it differs from sample to sample: `["frames", 80]`."""
    return [] if spec.role == "table" else [names.get(spec.name, "n"), *spec.shape]


def _field(spec: FieldSpec, names: Mapping[str, str | int]) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": axes(spec, names), "group": spec.group, "role": spec.role}


def _group(cache: Cache, group: Group) -> dict[str, int]:
    entries = [entry for _, entry in cache.shard_entries(group)]
    return {
        "num_shards": len(entries),
        "rows": sum(entry.rows for entry in entries),
        "size_bytes": sum(entry.size_bytes for entry in entries),
    }


def image_facts(cache: Cache) -> dict[str, Any]:
    """Returns the part of `forebay inspect --json` that only a cache of images has.

    codec; images: `stored` (each once a shard), `distinct` (of the listed rows), `used` (in all samples together);
    bytes_per_image: mean of what is stored of an image; float32_bytes_per_image: of the same images as the processor's
    `pixel_values`, null where a shard cannot be read; histograms: of the `tokens` and `patches` a sample.
    """
    stored, size_bytes = _stored_images(cache)
    patches = _stored_patches(cache)
    as_float32 = None if patches is None else float32_bytes(patches, image_settings_of(cache))
    return {
        "codec": cache.metadata["codec"],
        "images": image_counts(cache, stored=stored),
        "bytes_per_image": size_bytes / stored if stored else None,
        "float32_bytes_per_image": as_float32 / stored if stored and as_float32 is not None else None,
        "histograms": {name: count_histogram(cache.lengths[f"num_{name}"]) for name in ("tokens", "patches")},
    }


def _stored_images(cache: Cache) -> tuple[int, int]:
    """Returns how many images are stored, and their bytes: from the shard table, no shard is opened."""
    field = cache.fields[FIELDS[cache.metadata["codec"]]]
    value_bytes = field.numpy_dtype.itemsize * math.prod(field.shape)
    return _count(cache, "image_grid_thw"), _count(cache, field.name) * value_bytes


def _stored_patches(cache: Cache) -> int | None:
    if cache.metadata["codec"] == "raw":
        return _count(cache, FIELDS["raw"])
    if cache.mirror is not None:
        return None  # the grids stand in the shards: facts download none
    try:
        grids = [cache.shard("media", i).column("image_grid_thw")[0] for i in range(cache.num_shards)]
    except CacheError as err:
        logger.warning("the images of %s are not counted as float32: %s", cache.place, err)
        return None
    return sum(int(grid.astype(np.int64).prod(axis=1).sum()) for grid in grids)


def _count(cache: Cache, name: str) -> int:
    """Returns the values [n, *shape] of a media field in all shards."""
    place = [field.name for field in shard_fields(list(cache.fields.values()), "media")].index(name)
    return sum(entry.spans[place][1] for _, entry in cache.shard_entries("media"))
