"""The rule of `plan.locality = "auto"`: how far a shuffle may reach if a node keeps only a part of the shards."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
from collections.abc import Callable

import numpy as np

from forebay.config.plan import BucketConfig, PlanConfig
from forebay.errors import ConfigError
from forebay.plan.shard_line import BLOCKS_IN_TOUCH, Windows
from forebay.store.cache import Cache
from forebay.store.layout import Ints
from forebay.store.remote.node.room import gb
from forebay.store.remote.remote_shards import RemoteShards, RunItems
from forebay.store.selection import origin
from forebay.store.source import SampleSource, parts_of

logger = logging.getLogger(__name__)


def with_locality(settings: PlanConfig, source: SampleSource, *, sizes: Callable[[], Ints]) -> PlanConfig:
    """Returns the settings of a plan with a locality that depends on nothing any more.

    "auto" is "global" where the node keeps all that is read, as it does of local caches; else the widest window of
    shards within which each shard is downloaded about once an epoch (`locality_window`). The bound of the node decides,
    not what its disk holds now and not how many ranks it has: one of its processes downloads ahead for all.
    sizes: gives how many shards each source of a mixture has, for each has a window; one number where none is mixed.
    Raises ConfigError for a bound that does not hold three shards.
    """
    if not isinstance(settings, BucketConfig) or settings.locality != "auto":
        return settings
    locality, shards = "global", RemoteShards(source)
    if len(shards) and not shards.fit and source.slots is not None:
        window = _widest(shards, run=shard_run(source), sizes=sizes())
        locality = f"shards:{window}"
        logger.info(
            'plan.locality = "auto" is "%s": %d shards of %s in all do not fit remote.cache_size_gb, %s',
            *(locality, shards.num_used, gb(shards.total_bytes), gb(shards.bound_bytes)),
        )
    return dataclasses.replace(settings, locality=locality)


def _widest(shards: RemoteShards, *, run: int, sizes: Ints) -> int:
    """Returns the widest window: beside all items that samples list, or with those of the runs that are in touch."""
    room, ahead = shards.bound_bytes - shards.kept_bytes, shards.mirrors[0].settings.prefetch_shards

    def window(shard_bytes: int, room: int) -> int:
        return locality_window(room, sizes=sizes, shard_bytes=shard_bytes, ranks=1, ahead_shards=ahead)

    found = 0
    if shards.item_bytes:
        with contextlib.suppress(ConfigError):
            found = window(shards.text_shard_bytes, room - shards.item_bytes)
    for length in range(run, 1, -1):
        with contextlib.suppress(ConfigError):
            if (width := window(shards.row_shard_bytes(run=length), room)) >= 2 * length:
                return max(found, width)
    return found or window(shards.row_shard_bytes(run=1), room)


_AGAIN = 1.1
_MOST_SHARDS = 64
"""In a run; the pages of items that its ends share with others are few then."""


def shard_run(source: SampleSource) -> int:
    """Returns how many consecutive shards of rows an order keeps together, since their samples list the same items.

    It is the shortest run with which all shards of items are read about once, if each run reads its own. 1 where
    samples list no items. A window keeps runs no longer than half of it.
    """
    caches = [cache for cache, _ in map(origin, parts_of(source)) if isinstance(cache, Cache)]
    return max((_run(cache) for cache in caches if cache.listed), default=1)


def _run(cache: Cache) -> int:
    items, sizes = RunItems(cache), cache.unit_bytes(lambda sizes: sizes)
    costs = [items.run_bytes(run, sizes=sizes).sum() for run in range(1, min(cache.num_shards, _MOST_SHARDS) + 1)]
    enough = [cost <= _AGAIN * items.run_bytes(cache.num_shards, sizes=sizes).sum() for cost in costs]
    return 1 + int(np.argmax(enough) if any(enough) else np.argmin(costs))


def locality_window(
    bound_bytes: int, *, shard_bytes: int, ranks: int, ahead_shards: int, sizes: Ints | None = None
) -> int:
    """Returns the widest window, in shards, within which a node fetches each shard about once an epoch.

    bound_bytes: of the node's cache. shard_bytes: of a shard with all its files, the largest one. ranks: of the node.
    ahead_shards: downloaded ahead by each rank. sizes: shards of each source; None: one source of any size.

    The cache holds C = bound_bytes // shard_bytes shards. Ranks that download ahead keep up to R = ranks * ahead_shards
    of these for shards that no step has used yet (at most a quarter of C, so that a small cache still has a window).
    `ShardOrder` with a window of N goes through blocks of N / 2 shards, and three blocks are in touch at a block's
    border. So 3 * (N / 2) <= C - R, and N = 2 * ((C - R) // 3), an even number. While one block is in use, there is
    room for the whole next one to arrive. Of a mixture each source has a window of N of its own shards, or all of them
    where it has fewer than three blocks: the largest N whose three blocks of all sources fit.

    Raises ConfigError, with both numbers, for a bound that does not hold three shards of each source.
    """
    held = bound_bytes // shard_bytes
    owned = np.array([held + BLOCKS_IN_TOUCH]) if sizes is None else sizes

    def needed(block: int) -> int:
        return Windows(window=2 * block, sizes=owned).held(blocks=BLOCKS_IN_TOUCH)

    reserved = min(ranks * ahead_shards, held // 4)
    # Where sources of one shard or two take up what would be reserved, there is still the smallest window.
    blocks = range(1, held // BLOCKS_IN_TOUCH + 1)
    largest = bisect.bisect_right(blocks, held - reserved, key=needed) or int(needed(1) <= held)
    if not largest:
        raise ConfigError(
            f"a bound of {bound_bytes} bytes holds {held} shards of {shard_bytes} bytes, and the smallest window needs "
            f"{needed(1)} ({needed(1) * shard_bytes} bytes): raise remote.cache_size_gb, or build the cache with a "
            "smaller layout.rows_per_shard",
            code="FB609",
        )
    return 2 * largest
