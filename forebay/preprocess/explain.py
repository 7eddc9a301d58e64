"""What `forebay key` says: the key of a config, its cache, and how the nearest one differs."""

from __future__ import annotations

import os
from typing import Any

from forebay.config import Config
from forebay.preprocess.listing import known_key
from forebay.preprocess.pool import Pool
from forebay.store.lookup import find_cache
from forebay.store.memo import Memo


def explain(config: Config, *, may_hash: bool) -> dict[str, Any]:
    """Returns the JSON document of `forebay key`; `key` is None where a source would have to be hashed and may not be.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    memo = Memo(config.cache_root)
    lookup = find_cache(config, may_hash=may_hash, memo=memo)
    if lookup.found is not None:
        key: str | None = lookup.found.key
    else:
        with Pool(config.run.num_workers or os.cpu_count() or 1) as pool:
            key = known_key(config, memo, pool, may_hash=may_hash)
    nearest = None
    if lookup.nearest is not None:
        nearest = {"key": lookup.nearest.key, "differs": lookup.differs}
    return {
        "key": key,
        "recipe_key": lookup.recipe.key,
        "cache": str(lookup.found.folder) if lookup.found is not None else None,
        "sealed": lookup.found is not None,
        "nearest": nearest,
    }
