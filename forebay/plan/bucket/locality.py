"""How wide a moving window of shards may be where a node keeps only a part of the shards."""

from __future__ import annotations

from forebay.errors import ConfigError

_BLOCKS_IN_TOUCH = 3
"""Blocks of half a window that steps reach into at a block's border: the last groups of block b end in b + 1, the first
groups of b + 1 end in b + 2."""


def locality_window(bound_bytes: int, *, shard_bytes: int, ranks: int, ahead_shards: int) -> int:
    """Returns the widest window, in shards, within which a node fetches each shard about once an epoch.

    bound_bytes: of the node's cache. shard_bytes: of a shard with all its files, the largest one. ranks: of the node.
    ahead_shards: downloaded ahead by each rank.

    The cache holds C = bound_bytes // shard_bytes shards. Ranks that download ahead keep up to R = ranks * ahead_shards
    of these for shards that no step has used yet (at most a quarter of C, so that a small cache still has a window).
    `ShardOrder` with a window of N goes through blocks of N / 2 shards, and three blocks are in touch at a block's
    border. So 3 * (N / 2) <= C - R, and N = 2 * ((C - R) // 3), an even number. While one block is in use, there is
    room for the whole next one to arrive.

    Raises ConfigError, with both numbers, for a bound that does not hold three shards.
    """
    held = bound_bytes // shard_bytes
    if held < _BLOCKS_IN_TOUCH:
        raise ConfigError(
            f"a bound of {bound_bytes} bytes holds {held} shards of {shard_bytes} bytes, and the smallest window needs "
            f"{_BLOCKS_IN_TOUCH} ({_BLOCKS_IN_TOUCH * shard_bytes} bytes): raise remote.cache_size_gb, or build the "
            "cache with a smaller layout.rows_per_shard"
        )
    reserved = min(ranks * ahead_shards, held // 4)
    return 2 * ((held - reserved) // _BLOCKS_IN_TOUCH)
