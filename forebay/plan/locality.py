"""What `plan.locality = "auto"` is: how far a shuffle may reach, where a node keeps only a part of the shards."""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable

import numpy as np

from forebay.config.plan import BucketConfig, PlanConfig
from forebay.errors import ConfigError
from forebay.plan.shard_line import BLOCKS_IN_TOUCH, Windows
from forebay.store.layout import Ints
from forebay.store.remote.ahead.shards import RemoteShards
from forebay.store.remote.node.room import gb
from forebay.store.source import SampleSource

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
        window = locality_window(
            shards.bound_bytes - shards.kept_bytes,
            sizes=sizes(),
            shard_bytes=shards.row_shard_bytes,
            ranks=1,
            ahead_shards=shards.mirrors[0].settings.prefetch_shards,
        )
        locality = f"shards:{window}"
        logger.info(
            'plan.locality = "auto" is "%s": %d shards of %s in all do not fit remote.cache_size_gb, %s',
            *(locality, shards.num_used, gb(shards.total_bytes), gb(shards.bound_bytes)),
        )
    return dataclasses.replace(settings, locality=locality)


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
