"""The plans of a cache: what stands under `plans/` of its root, read as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from forebay.errors import CacheCorruptError, CacheError, CacheMismatchError
from forebay.store.metadata import FILE_NAME, checksum

logger = logging.getLogger(__name__)

_PLAN_FORMAT_VERSION = 1
"""The newest that is understood here. Plans have their own version: `train` writes them, `inspect` may not import it."""

_STATISTICS = "packing_stats.json"
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
        document = json.loads((folder / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return folder.absolute().parent.name == PLANS
    return isinstance(document, dict) and "plan_key" in document


def read_plan(folder: Path) -> dict[str, Any]:
    """Returns the document of one plan, as in `plans_of`, with `num_samples`, `cache_keys` and `arrays` (their entries).

    Raises CacheCorruptError, CacheMismatchError for what is no plan or one of a newer forebay, OSError.
    """
    metadata = _metadata(folder / FILE_NAME)
    try:
        return {
            **_described(folder, metadata),
            "num_samples": int(metadata["num_samples"]),
            "cache_keys": [str(key) for key in metadata["plan"]["cache_keys"]],
            "arrays": dict(metadata["arrays"]),
        }
    except (KeyError, TypeError) as err:
        raise CacheCorruptError(f"{folder} does not hold a plan: {err!r}") from err


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    metadata = _metadata(folder / FILE_NAME)
    try:
        return _described(folder, metadata) if key in metadata["plan"]["cache_keys"] else None
    except (KeyError, TypeError) as err:
        raise CacheCorruptError(f"{folder} does not hold a plan: {err!r}") from err


def _described(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: metadata[name] for name in ("num_batches", "padding", "num_packs", "fill") if name in metadata
    }
    return {
        "key": str(metadata["plan_key"]),
        "kind": str(metadata["kind"]),
        **figures,
        "folder": str(folder),
        "settings": dict(metadata["plan"]["settings"]),
        "statistics": _statistics(folder / _STATISTICS, str(metadata["statistics_xxh3_128"])),
    }


def _metadata(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        version, stored = document["format_version"], document["checksum"]
        computed = checksum(document)
    except (ValueError, RecursionError, KeyError, TypeError) as err:
        raise CacheCorruptError(f"{path} is not a plan's metadata ({err!r})") from err
    # Before the checksum: a newer version may compute it in another way.
    if isinstance(version, int) and version > _PLAN_FORMAT_VERSION:
        raise CacheMismatchError(f"{path}: format_version is {version}, this forebay reads {_PLAN_FORMAT_VERSION}")
    if stored != computed:
        raise CacheCorruptError(f"{path}: stored checksum {stored}, computed {computed}")
    checked: dict[str, Any] = document
    return checked


def _statistics(path: Path, stored: str) -> dict[str, Any]:
    content = path.read_bytes()
    computed = xxhash.xxh3_128_hexdigest(content)
    if computed != stored:
        raise CacheCorruptError(f"{path}: stored xxh3-128 {stored}, computed {computed}")
    document: dict[str, Any] = json.loads(content)
    return document
