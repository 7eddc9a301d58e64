"""Position to pack: the order of one epoch of a pack plan, one keyed permutation of its packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forebay.train.plan.interface import Array, check_epoch
from forebay.train.plan.order import ORDER_VERSION
from forebay.train.plan.permutation import Ints, Permutations, derive_key

if TYPE_CHECKING:
    from forebay.train.plan.pack import PackPlan


class PackOrder:
    """One epoch of a pack plan: a function of (plan, seed, epoch, position) and nothing else. Costs O(1) to make.

    A micro-batch is one pack. The samples of a pack, and their order in it, are the same in every epoch.
    """

    __slots__ = ("_line", "plan")

    def __init__(self, plan: PackPlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer)."""
        check_epoch(epoch)
        self.plan = plan
        self._line = Permutations([plan.num_batches], derive_key("forebay order", ORDER_VERSION, seed, epoch, "packs"))

    def __len__(self) -> int:
        return self.plan.num_batches

    def batch(self, position: int) -> Ints:
        """Returns the sample indices of one pack, int64 [samples of the pack]. IndexError outside 0..len-1."""
        return self.batches([position])[0]

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """Returns several packs at once: the same as `batch` one by one, at a fraction of the cost a pack."""
        packs = self.packs(positions)
        starts = self.plan.offsets[packs]
        sizes = self.plan.offsets[packs + 1] - starts
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)
        samples = self.plan.members_at(places)
        return [samples[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

    def bucket(self, position: int) -> int:
        """Returns the shape class of one pack: packs have one, 0. IndexError outside 0..len-1."""
        return int(self.buckets([position])[0])

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the shape classes of several packs, int64 [num_positions], all 0."""
        return np.zeros_like(self._checked(positions))

    def packs(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the numbers, int64 [num_positions], that the packs at some positions have in the plan."""
        return self._line(self._checked(positions))

    def _checked(self, positions: Sequence[int] | Array) -> Ints:
        where = np.asarray(positions, dtype=np.int64)
        if len(where) and not (where.min() >= 0 and where.max() < len(self)):
            bad = int(where.min() if where.min() < 0 else where.max())
            raise IndexError(f"position {bad} is outside of the epoch's {len(self)} micro-batches")
        return where
