"""From a config to what is read: the sealed cache of the same key, or the same steps on the fly."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from forebay.config import Config
from forebay.errors import CacheNotFoundError, ForebayError
from forebay.store.cache import open_cache
from forebay.store.lookup import Lookup, find_cache, not_found_message
from forebay.train.loader import Loader
from forebay.train.planned import plan_of
from forebay.train.source import SampleSource

logger = logging.getLogger(__name__)

SourceKind = Literal["cache", "uncached"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Selected:
    """What a config's samples are read from."""

    source: SampleSource
    kind: SourceKind


def make_loader(config: Config, *, dp_rank: int = 0, dp_world_size: int = 1, as_tensordict: bool = False) -> Loader:
    """Returns the loader of this rank: the sealed cache of the same config, found by its key, or the uncached steps.

    `train.cache` decides: `auto` takes the cache, else goes uncached with one warning that names the command to run;
    `require` raises CacheNotFoundError; `off` goes uncached. Where torch.distributed is up, rank 0 finds cache and plan
    and the others are told.
    Raises ConfigError without a `[plan]` section.
    """
    selected = select(config)
    planned = plan_of(config, selected.source, keep=selected.kind == "cache")
    return Loader(
        selected.source,
        planned.plan,
        plan_key=planned.key,
        seed=config.train.seed,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        dtype=_DTYPES[config.train.dtype],
        num_threads=config.train.num_threads,
        prefetch=config.train.prefetch,
        pin_memory=config.train.pin_memory,
        as_tensordict=as_tensordict,
    )


def select(config: Config) -> Selected:
    """Returns what a config's samples are read from, see `make_loader`."""
    folder, probe = _told_by_rank_0(config)
    if folder is not None:
        cache = open_cache(folder, max_open_shards=config.train.max_open_shards)
        return Selected(source=cache, kind="cache")
    from forebay.train.uncached import UncachedSource

    return Selected(source=UncachedSource(config, stored_probe=probe), kind="uncached")


def _told_by_rank_0(config: Config) -> tuple[Path | None, dict[str, str] | None]:
    """Returns the cache folder to use (None: go uncached) and the probe of a cache that is there but not used."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return _choose(config)
    answer: list[Any] = [None, None, None]
    if dist.get_rank() == 0:
        try:
            answer = [*_choose(config), None]
        except ForebayError as err:
            answer = [None, None, err]
    # Ranks that each looked would race a build that seals meanwhile, and each hash the same sources.
    dist.broadcast_object_list(answer, src=0)
    if answer[2] is not None:
        raise answer[2]
    return answer[0], answer[1]


def _choose(config: Config) -> tuple[Path | None, dict[str, str] | None]:
    lookup = find_cache(config)
    found = lookup.found
    if config.train.cache == "off":
        return None, dict(found.metadata["probe"]) if found is not None else None
    if found is None:
        if config.train.cache == "require":
            raise CacheNotFoundError(not_found_message(config, lookup))
        logger.warning("going uncached, which is slow: %s", not_found_message(config, lookup))
        return None, None
    _say(lookup)
    return found.folder, None


def _say(lookup: Lookup) -> None:
    if lookup.found is None:
        return
    if lookup.state == "absent":
        logger.warning("using %s unchecked: its raw data is not here to be compared", lookup.found.folder)
    else:
        logger.info("using %s", lookup.found.folder)
