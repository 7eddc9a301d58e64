"""From the folder of a vision cache to its plan of packs, and back: without a config."""

from __future__ import annotations

import logging
from pathlib import Path

from forebay.errors import CacheError, CacheNotFoundError, ConfigError
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import FIELDS
from forebay.store.lookup import sealed_caches
from forebay.store.temporary import TEMPORARY_MARK
from forebay.train.plan.disk import METADATA, STATISTICS, pack_settings

logger = logging.getLogger(__name__)


def cache_and_plan_folder(folder: Path) -> tuple[Cache, Path]:
    """Returns the cache that `folder` is, or whose plan of packs it is, and the plan's folder.

    A cache's plan is the one of packs under `../plans`; a plan's cache lies beside `plans`: of several codecs the one that
    is read the fastest. Raises CacheNotFoundError where either is missing, ConfigError where several plans could be meant or
    the cache holds no images, CacheMismatchError or CacheCorruptError for a folder that is not what was sealed.
    """
    if (folder / STATISTICS).is_file():
        return _cache_of(folder), folder
    cache = open_cache(folder)
    if cache.constants.get("features") != "patches":
        raise ConfigError(
            f"{folder} is no cache of images: features are {cache.constants.get('features')!r}, wanted 'patches'"
        )
    return cache, _plan_of(cache)


def _cache_of(plan: Path) -> Cache:
    key, root = pack_settings(plan)[0], plan.parent.parent
    found = [sealed for sealed in sealed_caches(root) if sealed.key == key]
    if not found:
        raise CacheNotFoundError(f"{plan}: its cache {key[:16]} is not in {root}; run: forebay preprocess CONFIG")
    codecs = list(FIELDS)  # the quickest to read first
    fastest = min(found, key=lambda sealed: codecs.index(sealed.metadata["codec"]))
    return open_cache(fastest.folder)


def _plan_of(cache: Cache) -> Path:
    found = []
    for path in sorted((cache.folder.parent / "plans").glob(f"*/{METADATA}")):
        try:
            if TEMPORARY_MARK not in path.parent.name and pack_settings(path.parent)[0] == cache.key:
                found.append(path.parent)
        except CacheError as err:  # of buckets, or damaged
            logger.info("leaving out a plan: %s", err)
    if not found:
        raise CacheNotFoundError(
            f"no plan of packs for {cache.folder} in {cache.folder.parent / 'plans'}; run: forebay preprocess CONFIG, with "
            '[plan] kind = "pack"'
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{cache.folder} has several plans: {names}; name one: {cache.folder.parent}/plans/...")
    return found[0]
