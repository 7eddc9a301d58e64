"""Position to micro-batch: the order of one epoch, computed at any place without replaying what came before.

The epoch is one sequence of micro-batches, the same for every world size. Its first part are the full lockstep groups
(`lockstep` batches of one bucket each) of all buckets under one keyed permutation: at every place the next group falls
to a bucket in proportion to the full groups that the bucket still has. Its last part are the incomplete groups, at most
one a bucket, in keyed order. They stand last because a shorter group anywhere else would shift all later ones against
the ranks' steps: so a world size that divides `lockstep` never mixes buckets before that last part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.train.plan.interface import Array, check_epoch
from forebay.train.plan.permutation import Ints, Permutations, derive_key

if TYPE_CHECKING:
    from forebay.train.plan.bucket import BucketPlan

ORDER_VERSION = 1
"""Bumped when the same plan, seed, epoch and position give other samples."""


class Order:
    """One epoch of a plan: a function of (plan, seed, epoch, position) and nothing else. Costs O(buckets) to make.

    Inside a bucket a keyed permutation, another one each epoch, puts the samples in line; batch i of the bucket takes
    places i * batch_size on. The last, incomplete batch of a bucket, by `plan.tail`: `short` has the fewer samples that are
    left; `drop` leaves it out; `pad` fills it with the samples at the head of the bucket's line, which come twice.
    """

    __slots__ = (
        "_bucket_sizes",
        "_group_offsets",
        "_groups",
        "_lines",
        "_tail_buckets",
        "_tail_offsets",
        "epoch",
        "plan",
        "seed",
    )

    def __init__(self, plan: BucketPlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer)."""
        check_epoch(epoch)
        self.plan, self.seed, self.epoch = plan, seed, epoch
        counts = plan.batch_counts
        self._group_offsets = np.concatenate(([0], np.cumsum(counts // plan.lockstep)))
        self._groups = Permutations([int(self._group_offsets[-1])], self._key("groups"))
        self._bucket_sizes = plan.bucket_sizes
        self._lines = Permutations(self._bucket_sizes.tolist(), self._key("samples"))
        incomplete = np.flatnonzero(counts % plan.lockstep)
        places = Permutations([len(incomplete)], self._key("tail"))(np.arange(len(incomplete)))
        self._tail_buckets = incomplete[places]
        lengths = counts[self._tail_buckets] % plan.lockstep
        self._tail_offsets = np.concatenate(([0], np.cumsum(lengths))) + self._group_offsets[-1] * plan.lockstep

    def __len__(self) -> int:
        return int(self._tail_offsets[-1])

    def batch(self, position: int) -> Ints:
        """Returns the sample indices of one micro-batch, int64 [batch size]. IndexError outside 0..len-1."""
        return self.batches([position])[0]

    def bucket(self, position: int) -> int:
        """Returns the bucket of one micro-batch. IndexError outside 0..len-1."""
        return int(self.buckets([position])[0])

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the buckets of several micro-batches, int64 [num_positions]."""
        return self.locate(positions)[0]

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """Returns several micro-batches at once: the same as `batch` one by one, at a fraction of the cost a batch."""
        buckets, numbers = self.locate(positions)
        starts = numbers * self.plan.batch_sizes[buckets]
        sizes = self.batch_lengths(buckets, numbers)
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)
        samples = self.samples(np.repeat(buckets, sizes), places)
        return [samples[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

    def batch_lengths(self, buckets: Ints, numbers: Ints) -> Ints:
        """Returns how many samples the micro-batches `numbers` of `buckets` have, int64."""
        sizes: Ints = self.plan.batch_sizes[buckets]
        return sizes if self.plan.tail == "pad" else np.minimum(sizes, self._bucket_sizes[buckets] - numbers * sizes)

    def samples(self, buckets: Ints | int, places: Ints) -> Ints:
        """Returns the sample indices, int64, that stand at `places` in the epoch's lines of `buckets`.

        A place behind the end of its line counts from its head again (this is how `pad` fills a batch).
        """
        lines = self._lines(places % self._bucket_sizes[buckets], member=buckets)
        return self.plan.members_at(self.plan.offsets[buckets] + lines)

    def locate(self, positions: Sequence[int] | Array) -> tuple[Ints, Ints]:
        """Returns bucket and number inside the bucket of each micro-batch."""
        where = np.asarray(positions, dtype=np.int64)
        if len(where) and not (where.min() >= 0 and where.max() < len(self)):
            bad = int(where.min() if where.min() < 0 else where.max())
            raise IndexError(f"position {bad} is outside of the epoch's {len(self)} micro-batches")
        buckets, numbers = np.empty_like(where), np.empty_like(where)
        in_tail = where >= self._tail_offsets[0]
        slots, inside = np.divmod(where[~in_tail], self.plan.lockstep)
        owners, groups = self._full_groups(slots)
        buckets[~in_tail] = owners
        numbers[~in_tail] = groups * self.plan.lockstep + inside
        late = where[in_tail]
        places = np.searchsorted(self._tail_offsets, late, side="right") - 1
        buckets[in_tail] = owners = self._tail_buckets[places]
        full: Any = np.diff(self._group_offsets)[owners]
        numbers[in_tail] = full * self.plan.lockstep + late - self._tail_offsets[places]
        return buckets, numbers

    def _full_groups(self, slots: Ints) -> tuple[Ints, Ints]:
        """Returns bucket and number inside the bucket of the full lockstep groups that stand at `slots`."""
        groups = self._groups(slots)
        owners = np.searchsorted(self._group_offsets, groups, side="right") - 1
        return owners, groups - self._group_offsets[owners]

    def _key(self, purpose: str) -> int:
        return derive_key("forebay order", ORDER_VERSION, self.seed, self.epoch, purpose)
