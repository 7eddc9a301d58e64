"""The order of an epoch whose shuffle stays within a moving window of shards, for disks where every new shard is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forebay.train.plan.interface import Array
from forebay.train.plan.order import Order
from forebay.train.plan.permutation import Ints, Permutations

if TYPE_CHECKING:
    from forebay.train.plan.bucket import BucketPlan


class ShardOrder(Order):
    """One epoch of a plan with `locality_shards` = N. Costs O(shards * buckets) to make, nothing a sample.

    The shards, in a keyed order of their own each epoch, form blocks of N / 2. A bucket's line goes through the blocks one
    after the other, and is shuffled inside each. A lockstep group belongs to the block in which its first sample lies;
    the epoch takes the groups block by block, inside a block by a keyed permutation. A group may end in the next block: its
    samples lie in N shards at most, and the window moves on by N / 2. (The groups of a bucket too rare to fill one in a
    block reach over several, and so do the incomplete groups at the epoch's end.)
    """

    __slots__ = (
        "_block_groups",
        "_block_lines",
        "_block_starts",
        "_first_groups",
        "_group_starts",
        "_line_starts",
        "_shards",
        "_wheres",
        "_within",
    )

    def __init__(self, plan: BucketPlan, *, seed: int, epoch: int) -> None:
        super().__init__(plan, seed=seed, epoch=epoch)
        assert plan.shard_counts is not None
        assert plan.locality_shards is not None
        counts = np.asarray(plan.shard_counts, dtype=np.int64)
        self._shards = Permutations([len(counts)], self._key("shards"))(np.arange(len(counts)))
        # Where in `members` the part of each shard begins, and where in the epoch's line of its bucket it stands.
        self._within = plan.offsets[:-1] + _before(counts)[:-1]
        self._line_starts = _before(counts[self._shards])
        step = max(1, plan.locality_shards // 2)
        self._wheres = np.append(np.arange(0, len(counts), step), len(counts))
        self._block_starts = self._line_starts[self._wheres]
        self._block_lines = Permutations(np.diff(self._block_starts, axis=0).ravel(), self._key("lines"))
        sizes = plan.batch_sizes * plan.lockstep
        self._first_groups = np.minimum(-(-self._block_starts // sizes), np.diff(self._group_offsets))
        per_block = np.diff(self._first_groups, axis=0)
        self._group_starts = np.concatenate(([0], np.cumsum(per_block.sum(axis=1))))
        self._block_groups = Permutations(np.diff(self._group_starts), self._key("groups"))

    def samples(self, buckets: Ints | int, places: Ints) -> Ints:
        """Returns the sample indices, int64, that stand at `places` in the epoch's lines of `buckets`."""
        owners = np.broadcast_to(buckets, places.shape)
        found = np.empty(places.shape, dtype=np.int64)
        for bucket in np.unique(owners).tolist():
            own = owners == bucket
            found[own] = self._member_places(bucket, places[own] % self._bucket_sizes[bucket])
        return self.plan.members_at(found)

    def _member_places(self, bucket: int, places: Ints) -> Ints:
        starts = self._block_starts[:, bucket]
        blocks = np.searchsorted(starts, places, side="right") - 1
        shuffled = self._block_lines(places - starts[blocks], member=blocks * len(self._bucket_sizes) + bucket)
        shuffled += starts[blocks]
        lines = self._line_starts[:, bucket]
        rows = np.searchsorted(lines, shuffled, side="right") - 1
        found: Ints = self._within[self._shards[rows], bucket] + shuffled - lines[rows]
        return found

    def _full_groups(self, slots: Ints) -> tuple[Ints, Ints]:
        blocks = np.searchsorted(self._group_starts, slots, side="right") - 1
        inside = self._block_groups(slots - self._group_starts[blocks], member=blocks)
        # The groups of a block stand bucket by bucket.
        per_bucket = self._first_groups[blocks + 1] - self._first_groups[blocks]
        ends = np.cumsum(per_bucket, axis=1)
        owners: Ints = (inside[:, None] >= ends).sum(axis=1)
        one = np.arange(len(slots))
        numbers = self._first_groups[blocks, owners] + inside - (ends - per_bucket)[one, owners]
        return owners, numbers


def _before(counts: Array) -> Array:
    """Returns the sums of the rows before each, and of all: int64 [num_rows + 1, num_columns]."""
    sums: Array = np.concatenate((np.zeros((1, counts.shape[1]), dtype=np.int64), np.cumsum(counts, axis=0)))
    return sums
