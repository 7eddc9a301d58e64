"""Samples that lie in shards, put in line block of shards by block of shards: what a moving window is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.plan.permutation import Permutations
from forebay.store.layout import Array, Ints

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
