"""A cache as one JSON document: all that `forebay inspect` prints of it, with histograms of the lengths.

How many samples of a cache of images have each class.

What was detected of the languages of a cache, and where that is not what its manifest says.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forebay.errors import CacheError
from forebay.inspect.listed_groups import listed_groups
from forebay.inspect.plan_facts import pack_bytes, plans_of
from forebay.inspect.seen_images import duration_histogram
from forebay.steps.form import promises
from forebay.steps.table import axis_names
from forebay.steps.text.language.script import code_of
from forebay.store.cache import Cache
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.metadata import check_description
from forebay.terminal import human_share, table
from forebay.visible import printable

logger = logging.getLogger(__name__)

_Facts = TypeVar("_Facts")
_PROMPT = "label"
_SHOWN = 24


def _counted(cache: Cache, what: str, make: Callable[[], _Facts | None]) -> _Facts | None:
    """Returns what is counted; None of a cache in a store, which would be downloaded, and of a damaged one."""
    if cache.mirror is not None:
        return None
    try:
        return make()
    except CacheError as err:
        logger.warning("%s of %s are not counted: %s", what, cache.place, err)
        return None


def class_facts(cache: Cache) -> dict[str, Any]:
    """Returns `classes` of `forebay inspect --json`; nothing of a cache without classes, or far away.

    num_classes: one more than the largest number. is_multi: a sample has a list. counts: `class`, its `number` and
    `samples`, the most frequent first. absent: named classes that no sample has.
    """
    if cache.constants.get("prompt") != _PROMPT:
        return {}
    found = _counted(cache, "the classes", lambda: cache.categories("text"))
    if found is None:
        return {}
    (texts, codes), constants = found, cache.constants
    is_multi = bool(constants["text_form"]["fields"][0]["shape"])
    counts: Counter[str] = Counter()
    for text, samples in zip(texts, np.bincount(codes, minlength=len(texts)).tolist(), strict=True):
        counts.update({str(name): samples for name in (json.loads(text) if is_multi else [text])})
    names: list[str] | None = constants["classes"]
    numbers = {} if names is None else {name: number for number, name in enumerate(names)}
    shown = [
        {"class": name, "number": numbers.get(name, int(name) if name.isdecimal() else None), "samples": counts[name]}
        for name in sorted(counts, key=lambda name: (-counts[name], name))
    ]
    absent = sum(name not in counts for name in names or ())
    num_classes = constants["num_classes"]
    return {"classes": {"num_classes": num_classes, "is_multi": is_multi, "counts": shown, "absent": absent}}


def class_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields how many samples have each class, for a terminal; `facts` is the document of `cache_facts`."""
    found, whole = facts["classes"], facts["num_samples"]
    rows = [
        [printable(each["class"]), f"{each['number']}", f"{each['samples']:,}", human_share(each["samples"] / whole)]
        for each in found["counts"][:_SHOWN]
    ]
    yield from table([f"{found['num_classes']:,} classes", "number", "samples", "share"], rows, left=1)
    if len(found["counts"]) > _SHOWN:
        yield f"  and {len(found['counts']) - _SHOWN:,} more (--json lists them all)"
    if found["absent"]:
        yield f"  {found['absent']:,} classes have no sample"


_IDS = 3


def detection_facts(cache: Cache) -> dict[str, Any] | None:
    """Returns what `text.language = "detect"` found; None where it was not asked, or would have to be downloaded.

    languages: `language`, `samples` and mean `confidence` of each detected one, the most frequent first. unsaid:
    samples that keep the manifest's language, since nothing was said or asked. unknown: samples without any language.
    num_disagreements: samples of which manifest and detection say different languages. disagreements: `manifest`,
    `detected`, `samples` and some `ids` of each pair; `nb` and `no`, or `English` and `en`, are one language.
    """
    if "language_detected" not in cache.column_names:
        return None
    return _counted(cache, "the detected languages", lambda: _language_facts(cache))


def _language_facts(cache: Cache) -> dict[str, Any] | None:
    detected, stated = cache.categories("language_detected"), cache.categories("language_manifest")
    if detected is None or stated is None:  # a cache made of caches, of which some said nothing
        return None
    (names, codes), (manifest_names, manifest_codes) = detected, stated
    confidence = cache.table(["language_confidence"])["language_confidence"].fill_null(0.0).to_numpy()
    counts = np.bincount(codes, minlength=len(names))
    sums = np.bincount(codes, weights=confidence, minlength=len(names))
    nothing, none_stated = (np.array(n, object)[c] == "" for n, c in (detected, stated))
    pairs = _disagreements(cache, names, codes, manifest_names, manifest_codes)
    return {
        "languages": [
            {"language": names[i], "samples": int(counts[i]), "confidence": round(float(sums[i] / counts[i]), 4)}
            for i in sorted(range(len(names)), key=lambda i: (-counts[i], names[i]))
            if names[i]
        ],
        "unsaid": int((nothing & ~none_stated).sum()),
        "unknown": int((nothing & none_stated).sum()),
        "num_disagreements": sum(pair["samples"] for pair in pairs),
        "disagreements": pairs,
    }


def _disagreements(
    cache: Cache, names: list[str], codes: Array, manifest_names: list[str], manifest_codes: Array
) -> list[dict[str, Any]]:
    both = manifest_codes.astype(np.int64) * len(names) + codes
    found = []
    for pair, count in zip(*np.unique(both, return_counts=True), strict=True):
        manifest, detected = manifest_names[pair // len(names)], names[pair % len(names)]
        if manifest and detected and code_of(manifest) != code_of(detected):
            ids = [cache.sample_id(int(i)) for i in np.flatnonzero(both == pair)[:_IDS]]
            found.append({"manifest": manifest, "detected": detected, "samples": int(count), "ids": ids})
    return sorted(found, key=lambda entry: (-entry["samples"], entry["manifest"], entry["detected"]))


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
    tokens = cache.lengths["num_tokens"]
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
        "plans": [pack_bytes(cache, plan) for plan in plans_of(cache.key, plan_roots)],
        "num_tokens": int(tokens.sum(dtype=np.int64)),
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
        "lengths": _token_lengths(tokens) if durations_s is None else None,
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


def _token_lengths(tokens: Array) -> dict[str, float]:
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
