"""What a cache is, as one JSON document: all that `forebay inspect` prints of it, with histograms of the lengths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.inspect.classes import class_facts
from forebay.inspect.histogram import duration_histogram
from forebay.inspect.languages import detection_facts
from forebay.inspect.listed_groups import listed_groups
from forebay.inspect.plans import pack_bytes, plans_of
from forebay.steps.form import promises
from forebay.steps.table import axis_names
from forebay.store.cache import Cache
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.metadata import check_description

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
    says how long the texts are. A cache whose samples list items has what their groups say too (`ListedGroup.facts`),
    one of classes what `class_facts` says.
    Raises CacheCorruptError where the metadata describes no cache, or the lengths are not those that were written.
    """
    metadata = cache.metadata
    check_description(cache.folder, metadata)
    durations_s = durations_of(cache)
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
        "plans": [pack_bytes(cache, plan) for plan in plans],
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
        "promises": promises(cache.constants.groups),
        "made_of": metadata.get("made_of", []),
        **{name: value for group in listed_groups(cache).values() for name, value in group.facts().items()},
        **class_facts(cache),
    }


def unreadable_facts(folder: Path) -> dict[str, Any]:
    """Returns the document of a folder that cannot be opened: the interface with null everywhere."""
    return {**dict.fromkeys(INTERFACE), "folder": os.path.abspath(folder), "sealed": False}


def token_lengths(tokens: Array) -> dict[str, float]:
    """Returns `min`, `mean` and `max` of the tokens a sample (integers [num_samples]), all 0 where there are none."""
    if not len(tokens):
        return {"min": 0, "mean": 0.0, "max": 0}
    return {"min": int(tokens.min()), "mean": float(tokens.mean()), "max": int(tokens.max())}


def durations_of(cache: Cache) -> Array | None:
    """Returns float64 [num_samples]: seconds; None for a cache without recordings."""
    num_samples = cache.lengths.get("num_audio_samples")
    return None if num_samples is None else np.asarray(num_samples / cache.constants.get("sample_rate_hz", 1))


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
