"""Samples that lie in shards, put in line block of shards by block of shards: what a moving window is made of.

The rule of `plan.locality = "auto"`: how far a shuffle may reach if a node keeps only a part of the shards.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.config.plan import BucketConfig, PlanConfig
from forebay.errors import ConfigError
from forebay.plan.permutation import Permutations
from forebay.store.cache import Cache
from forebay.store.layout import Array, Ints
from forebay.store.remote.node.room import gb
from forebay.store.remote.remote_shards import RemoteShards, RunItems
from forebay.store.selection import origin
from forebay.store.source import SampleSource, parts_of

logger = logging.getLogger(__name__)
BLOCKS_IN_TOUCH = 3
"""Blocks of half a window that steps reach into at a block's border: the last groups of block b end in b + 1, the first
groups of b + 1 end in b + 2."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """The moving windows of a plan, one a source. window: shards of each; sizes: int64 [k], shards of each source.

    run: consecutive shards that stay together.
    """

    window: int
    sizes: Ints
    run: int = 1

    def held(self, *, blocks: int) -> int:
        """Returns how many shards so many blocks of every source are."""
        return int(np.minimum(self.sizes, blocks * max(1, self.window // 2)).sum())


class ShardLine:
    """One line a column (a bucket or length class), through the same blocks of `window` / 2 shards, each shuffled."""

    __slots__ = ("_block_lines", "_lines", "_within", "block_starts")

    def __init__(self, counts: Array, starts: Ints, *, shards: Ints, window: int, key: int) -> None:
        """counts: [num_shards, num_columns], samples; starts: where those of each column begin, shard by shard.

        shards: the order of the shards. key: of the shuffle, 64 bits.
        """
        counts = np.asarray(counts, dtype=np.int64)
        # Where the part of each shard begins among the members, and where in the line of its column it stands.
        self._within: Array = (starts + _before(counts)[:-1])[shards]
        self._lines = _before(counts[shards])
        self.block_starts: Array = self._lines[np.append(np.arange(0, len(counts), max(1, window // 2)), len(counts))]
        self._block_lines = Permutations(np.diff(self.block_starts, axis=0).ravel(), key)

    def __call__(self, columns: Ints | int, places: Ints) -> Ints:
        """Returns where among the members the places of the columns' lines are, int64 [num_places]."""
        owners = np.broadcast_to(columns, places.shape)
        found = np.empty(places.shape, dtype=np.int64)
        for column in np.unique(owners).tolist():
            own = owners == column
            found[own] = self._column(column, places[own])
        return found

    def _column(self, column: int, places: Ints) -> Ints:
        starts = self.block_starts[:, column]
        blocks = np.searchsorted(starts, places, side="right") - 1
        shuffled = self._block_lines(places - starts[blocks], member=blocks * self._lines.shape[1] + column)
        shuffled += starts[blocks]
        lines = self._lines[:, column]
        rows = np.searchsorted(lines, shuffled, side="right") - 1
        found: Ints = self._within[rows, column] + shuffled - lines[rows]
        return found


def in_runs(count: int, *, run: int, key: int) -> Ints:
    """Returns so many shards in a keyed order, in which those of a run of consecutive ones stay together."""
    num_runs = -(-count // run)
    order = (Permutations([num_runs], key)(np.arange(num_runs))[:, None] * run + np.arange(run)).ravel()
    found: Ints = order[order < count]
    return found


def _before(counts: Array) -> Array:
    """Returns the sums of the rows before each, and of all: int64 [num_rows + 1, num_columns]."""
    sums: Array = np.concatenate((np.zeros((1, counts.shape[1]), dtype=np.int64), np.cumsum(counts, axis=0)))
    return sums


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
