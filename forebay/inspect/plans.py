"""The plans of a cache: what stands under `plans/` of its root, read as JSON."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from forebay.errors import CacheCorruptError, CacheError, CacheMismatchError
from forebay.store.metadata import FILE_NAME, checksum, read_regular
from forebay.store.schema import COUNT, NUMBER, OBJECT, POSITIVE, TEXT, Check, all_of, list_of, map_of, or_null, record

logger = logging.getLogger(__name__)

_PLAN_FORMAT_VERSION = 1
"""The newest that is understood here. Plans have their own version: `train` writes them, `inspect` may not import it."""

_STATISTICS = "packing_stats.json"
_FIGURES = record(
    {
        "mean": NUMBER,
        "min": COUNT,
        "max": COUNT,
        "histogram": record({"edges": list_of(COUNT), "counts": list_of(COUNT)}),
    }
)
_BUCKET = record(
    {"range": TEXT, "samples": COUNT, "hours": NUMBER, "batch_size": COUNT, "batches": COUNT, "padding": NUMBER}
)
_WORLD = record(
    dict.fromkeys(("steps", "mixed_steps", "dropped_batches", "repeated_batches", "weightless_batches"), COUNT)
)
_COUNTED = {"dropped": COUNT, "repeated": COUNT}
_OF_PACKS = record(
    {"worlds": map_of(_WORLD), "pad_tokens": COUNT, "unplaced": map_of(COUNT), "tokens": _FIGURES},
    {**_COUNTED, "patch_fill": or_null(NUMBER), **dict.fromkeys(("samples", "patches", "images"), _FIGURES)},
)
_OF_BATCHES = record(
    {"worlds": map_of(_WORLD)}, {**_COUNTED, "padding_random_order": NUMBER, "buckets": list_of(_BUCKET)}
)
_ARRAY = record({"size_bytes": COUNT, "xxh3_128": TEXT})
_PLAN: dict[str, Check] = {
    "plan_key": TEXT,
    "kind": TEXT,
    "statistics_xxh3_128": TEXT,
    "num_samples": COUNT,
    "arrays": map_of(_ARRAY),
}


def _document(kind: str) -> Check:
    cache_keys = list_of(TEXT, may_be_empty=False)
    if kind == "pack":
        settings = record({"seq_len": POSITIVE, "max_patches": or_null(COUNT)})
        arrays = all_of(map_of(_ARRAY), record({"members": _ARRAY, "offsets": _ARRAY}))
        figures: dict[str, Check] = {"num_packs": COUNT, "fill": NUMBER, "arrays": arrays}
    else:
        settings, figures = OBJECT, {"num_batches": COUNT, "padding": NUMBER}
    return record({**_PLAN, **figures, "plan": record({"cache_keys": cache_keys, "settings": settings})})


PLANS = "plans"
"""The folder of plans under a cache root."""


def plans_of(key: str, roots: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns one document a plan of the cache `key` under these cache roots, sorted by folder name.

    Each has `key`, `kind`, `folder`, `settings` and `statistics` (of packing_stats.json), and what the plan says of
    `num_batches`, `padding` or `num_packs`, `fill`. A plan that cannot be read is logged and left out: it costs
    seconds to make again, and must not hide the cache.
    """
    found: dict[str, dict[str, Any]] = {}
    for root in roots:
        for path in sorted((root / PLANS).glob("*/metadata.json")):
            try:
                plan = _read(path.parent, key)
            except (CacheError, OSError) as err:
                logger.warning("leaving out a plan: %s; delete its folder and run: forebay preprocess CONFIG", err)
                continue
            if plan is not None:
                found.setdefault(plan["key"], plan)
    return sorted(found.values(), key=lambda plan: Path(plan["folder"]).name)


def is_plan(folder: Path) -> bool:
    """Whether a folder is, or was meant to be, a plan and not a cache."""
    try:
        document = json.loads(read_regular(folder / FILE_NAME))
    except (OSError, ValueError, RecursionError, CacheCorruptError):
        return folder.absolute().parent.name == PLANS
    return isinstance(document, dict) and "plan_key" in document


def read_plan(folder: Path) -> dict[str, Any]:
    """Returns the document of one plan, as in `plans_of`, with `num_samples`, `cache_keys` and `arrays` (their entries).

    Raises CacheCorruptError, CacheMismatchError for what is no plan or one of a newer forebay, OSError.
    """
    metadata = _metadata(folder / FILE_NAME)
    return {
        **_described(folder, metadata),
        "num_samples": metadata["num_samples"],
        "cache_keys": metadata["plan"]["cache_keys"],
        "arrays": metadata["arrays"],
    }


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    metadata = _metadata(folder / FILE_NAME)
    return _described(folder, metadata) if key in metadata["plan"]["cache_keys"] else None


def _described(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: metadata[name] for name in ("num_batches", "padding", "num_packs", "fill") if name in metadata
    }
    return {
        "key": metadata["plan_key"],
        "kind": metadata["kind"],
        **figures,
        "folder": str(folder),
        "settings": metadata["plan"]["settings"],
        "statistics": _statistics(folder / _STATISTICS, metadata),
    }


def _metadata(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_regular(path))
        version, stored = document["format_version"], document["checksum"]
        computed = checksum(document)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as err:
        raise CacheCorruptError(f"{path} is not a plan's metadata ({err!r})") from err
    # Before the checksum: a newer version may compute it in another way.
    if isinstance(version, int) and version > _PLAN_FORMAT_VERSION:
        raise CacheMismatchError(f"{path}: format_version is {version}, this forebay reads {_PLAN_FORMAT_VERSION}")
    if stored != computed:
        raise CacheCorruptError(f"{path}: stored checksum {stored}, computed {computed}")
    checked: dict[str, Any] = document
    _check(_document(str(checked.get("kind"))), checked, path)
    for name in checked["arrays"]:
        if os.path.basename(name) != name or "\0" in name:
            raise CacheCorruptError(f"{path} names an array {name!r:.80}, which is not in its folder")
    return checked


def _statistics(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    content, stored = read_regular(path), metadata["statistics_xxh3_128"]
    computed = xxhash.xxh3_128_hexdigest(content)
    if computed != stored:
        raise CacheCorruptError(f"{path}: stored xxh3-128 {stored}, computed {computed}")
    try:
        document: dict[str, Any] = json.loads(content)
    except (ValueError, RecursionError) as err:
        raise CacheCorruptError(f"{path} is not JSON: {err}") from err
    is_pack = metadata["kind"] == "pack"
    _check(_OF_PACKS if is_pack else _OF_BATCHES, document, path)
    for name in ("tokens",) if is_pack else ():
        histogram = document[name]["histogram"]
        if len(histogram["edges"]) != len(histogram["counts"]) + 1:
            raise CacheCorruptError(f"{path}: the histogram of {name} has edges for another number of counts")
    return document


def _check(check: Check, document: Any, path: Path) -> None:
    try:
        check(document, "it")
    except ValueError as err:
        raise CacheCorruptError(f"{path} is none that forebay writes: {err}") from err
