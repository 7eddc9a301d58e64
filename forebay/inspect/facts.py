"""What a cache is, as one JSON document: all that `forebay inspect` prints of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.inspect.histogram import duration_histogram
from forebay.inspect.image_facts import holds_images, image_facts, pack_bytes
from forebay.inspect.plans import plans_of
from forebay.store.cache import Cache
from forebay.store.cache_document import check_description
from forebay.store.layout import FieldSpec, Group

_AXES: dict[str, str | int] = {
    "input_features": "frames",
    "fbanks": "frames",
    "waveform": "samples",
    "input_ids": "tokens",
    "pad_value": 1,
    "prefix_len": 1,
    "audio_index": 1,
    "valid_frames": 1,
    "image_grid_thw": 1,
    "image_rows": "images",
    "label_mask": "tokens",
    "patches_zstd": "bytes",
    "image_webp": "bytes",
    "image_file": "bytes",
}
"""What the first axis of a tensor field counts, or its length where that is the same for all samples."""

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

    Beside the interface: num_tokens (of all samples together), folder, name, split, recipe_key, recipe, constants, groups,
    bytes_per_hour, clipped, longer, rejected (the file that lists what was left out), histogram, probe, made_with. Sizes are those of
    the shards. Without audio histogram is null, and lengths says how long the texts are; of images there is what
    `image_facts` says too.
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
        "fields": {name: _field(spec) for name, spec in cache.fields.items()},
        "size_bytes": size_bytes,
        "excluded": metadata["excluded"],
        "failed": metadata["failed"],
        "plans": [pack_bytes(cache, plan) for plan in plans] if holds_images(cache) else plans,
        "num_tokens": int(cache.lengths["num_tokens"].sum(dtype=np.int64)),
        "folder": os.path.abspath(cache.folder),
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
        "longer": metadata.get("longer", 0),
        "rejected": os.path.abspath(cache.folder / "rejected.jsonl"),
        "histogram": None if durations_s is None else duration_histogram(durations_s).to_json(),
        "lengths": token_lengths(cache.lengths["num_tokens"]) if durations_s is None else None,
        "probe": metadata["probe"],
        "made_with": metadata["made_with"],
        **(image_facts(cache) if holds_images(cache) else {}),
    }


def unreadable_facts(folder: Path) -> dict[str, Any]:
    """Returns the document of a folder that cannot be opened: the interface with null everywhere."""
    return {**dict.fromkeys(INTERFACE), "folder": os.path.abspath(folder), "sealed": False}


def token_lengths(tokens: np.ndarray[Any, Any]) -> dict[str, float]:
    """Returns `min`, `mean` and `max` of the tokens a sample, all 0 where there are none. tokens: integers [num_samples]."""
    if not len(tokens):
        return {"min": 0, "mean": 0.0, "max": 0}
    return {"min": int(tokens.min()), "mean": float(tokens.mean()), "max": int(tokens.max())}


def _durations_s(cache: Cache) -> np.ndarray[Any, Any] | None:
    """Returns float64 [num_samples]; None for a cache without audio."""
    if cache.constants["features"] in ("none", "patches"):
        return None
    durations_s: np.ndarray[Any, Any] = cache.lengths["num_samples"] / cache.constants["sample_rate_hz"]
    return durations_s


def axes(spec: FieldSpec) -> list[str | int]:
    """Returns a field's shape with the first axis named where it differs from sample to sample: `["frames", 80]`."""
    if spec.role == "table":
        return []
    return [_AXES.get(spec.name, "n"), *spec.shape]


def _field(spec: FieldSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": axes(spec), "group": spec.group, "role": spec.role}


def _group(cache: Cache, group: Group) -> dict[str, int]:
    entries = [entry for _, entry in cache.shard_entries(group)]
    return {
        "num_shards": len(entries),
        "rows": sum(entry.rows for entry in entries),
        "size_bytes": sum(entry.size_bytes for entry in entries),
    }
