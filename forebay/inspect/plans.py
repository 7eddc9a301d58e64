"""The plans of a cache: what stands under `plans/` of its root, as documents."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forebay.errors import CacheError
from forebay.plan.disk import METADATA, read_metadata, read_statistics
from forebay.plan.names import PLANS

logger = logging.getLogger(__name__)


def plans_of(key: str, roots: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns one document a plan of the cache `key` under these cache roots, sorted by folder name.

    Each has `key`, `kind`, `folder`, `settings` and `statistics` (of packing_stats.json), and what the plan says of
    `num_batches`, `padding` or `num_packs`, `fill`. A plan that cannot be read is logged and left out: it costs
    seconds to make again, and must not hide the cache.
    """
    found: dict[str, dict[str, Any]] = {}
    for folder in (path.parent for root in roots for path in sorted((root / PLANS).glob(f"*/{METADATA}"))):
        try:
            metadata = read_metadata(folder)
            if key in metadata["plan"]["cache_keys"]:
                found.setdefault(metadata["plan_key"], _described(folder, metadata))
        except (CacheError, OSError) as err:
            logger.warning("leaving out a plan: %s", err)
    return sorted(found.values(), key=lambda plan: Path(plan["folder"]).name)


def read_plan(folder: Path) -> dict[str, Any]:
    """Returns the document of one plan, as in `plans_of`, with `num_samples`, `cache_keys` and `arrays` (their
    entries).

    Raises CacheCorruptError, CacheMismatchError for what is no plan or one of a newer forebay, OSError.
    """
    metadata = read_metadata(folder)
    return {
        **_described(folder, metadata),
        "num_samples": metadata["num_samples"],
        "cache_keys": metadata["plan"]["cache_keys"],
        "arrays": metadata["arrays"],
    }


def _described(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    figures = ("num_batches", "padding", "num_packs", "fill")
    return {
        "key": metadata["plan_key"],
        "kind": metadata["kind"],
        **{name: metadata[name] for name in figures if name in metadata},
        "folder": str(folder),
        "settings": metadata["plan"]["settings"],
        "statistics": read_statistics(folder, metadata),
    }
