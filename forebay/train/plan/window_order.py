"""The order of an epoch of windows: position to micro-batch at the cost of one window."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forebay.train.plan.interface import Array, check_epoch
from forebay.train.plan.permutation import Ints, Permutations, derive_key
from forebay.train.plan.window_cut import even_cut

if TYPE_CHECKING:
    from forebay.train.plan.window import WindowPlan

WINDOW_VERSION = 1
"""Bumped when the same plan, seed, epoch and position give other samples."""


class WindowOrder:
    """One epoch of a window plan: a function of (plan, seed, epoch, position) and nothing else.

    Under `batch_size` one keyed permutation of all samples is cut into windows. Under a budget the shuffle is stratified:
    of every `num_windows` samples that follow each other in length each window gets one, by a keyed permutation for each
    such stratum. All windows are then so alike that a fixed number of batches holds each of them within the budget, which
    is what makes the epoch seekable: else the batches of all windows before a position would have to be counted.

    A window is sorted by length and cut into its batches. `lockstep` windows form a group: the group takes the batches
    of one place (of nearly equal lengths) from all its windows in a row, place by place in keyed order, so that ranks
    step through equal shapes. The windows that fill no group come last, then the incomplete window.
    """

    __slots__ = ("_classes", "_line", "_strata", "_windows", "epoch", "plan", "seed")

    def __init__(self, plan: WindowPlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer). Costs O(samples of a window)."""
        check_epoch(epoch)
        self.plan, self.seed, self.epoch = plan, seed, epoch
        self._strata = 0 if plan.batch_size else -(-len(plan.members) // plan.num_windows)
        sizes = [plan.num_windows] * self._strata if self._strata else [len(plan.members)]
        self._line = Permutations(sizes, self._key("samples"))
        # What was made of the group that positions fell into last; they come in a row.
        self._windows: dict[int, list[Ints]] = {}
        self._classes: dict[int, Ints] = {}

    def __len__(self) -> int:
        return self.plan.num_batches

    def batch(self, position: int) -> Ints:
        """Returns the sample indices of one micro-batch, int64 [batch size]. IndexError outside 0..len-1."""
        return self.batches([position])[0]

    def bucket(self, position: int) -> int:
        """Returns the place of one micro-batch in its sorted window, 0 the shortest. IndexError outside 0..len-1."""
        return int(self.buckets([position])[0])

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the places of several micro-batches in their sorted windows, int64 [num_positions]."""
        return np.array([place for _, place in self._locate(positions)], dtype=np.int64)

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """Returns several micro-batches at once; those of one group cost little more than one of them."""
        return [self._window(window)[place] for window, place in self._locate(positions)]

    def _locate(self, positions: Sequence[int] | Array) -> list[tuple[int, int]]:
        """Returns window and place inside the sorted window of each micro-batch."""
        where = np.asarray(positions, dtype=np.int64)
        if len(where) and not (where.min() >= 0 and where.max() < len(self)):
            bad = int(where.min() if where.min() < 0 else where.max())
            raise IndexError(f"position {bad} is outside of the epoch's {len(self)} micro-batches")
        return [self._place(position) for position in where.tolist()]

    def _place(self, position: int) -> tuple[int, int]:
        plan = self.plan
        group, inside = divmod(position, plan.lockstep * plan.batches_per_window)
        first = group * plan.lockstep
        windows, batches = min(plan.lockstep, plan.num_windows - first), plan.batches_per_window
        if inside >= windows * batches:  # also where no whole window is left
            inside, first = inside - windows * batches, plan.num_windows
            windows, batches = 1, plan.last_batches
        slot, window = divmod(inside, windows)
        return first + window, int(self._places(first, batches)[slot])

    def _places(self, first: int, batches: int) -> Ints:
        """Returns the order in which the group of windows from `first` on takes its batches."""
        found = self._classes.get(first)
        if found is None:
            found = Permutations([batches], self._key(f"places {first}"))(np.arange(batches))
            self._classes.clear()
            self._classes[first] = found
        return found

    def _window(self, window: int) -> list[Ints]:
        """Returns the batches of one window, from the shortest samples to the longest."""
        found = self._windows.get(window)
        if found is None:
            if len(self._windows) >= self.plan.lockstep:
                self._windows.clear()
            ranks, bounds = self._stratified(window) if self._strata else self._counted(window)
            samples = self.plan.members_at(ranks)
            found = [samples[a:b] for a, b in itertools.pairwise(bounds)]
            self._windows[window] = found
        return found

    def _stratified(self, window: int) -> tuple[Ints, list[int]]:
        strata = np.arange(self._strata)
        ranks = self._line(np.full(self._strata, window), member=strata) + strata * self.plan.num_windows
        # The incomplete stratum is that of the shortest samples.
        ranks -= self._strata * self.plan.num_windows - len(self.plan.members)
        ranks = ranks[ranks >= 0]
        assert self.plan.budget is not None
        lengths = self.plan.lengths_at(ranks).tolist()
        return ranks, even_cut(lengths, num_batches=self.plan.batches_per_window, budget=self.plan.budget)

    def _counted(self, window: int) -> tuple[Ints, list[int]]:
        size, count = self.plan.batch_size, len(self.plan.members)
        assert size is not None
        start = window * self.plan.batches_per_window * size
        batches = self.plan.batches_per_window if window < self.plan.num_windows else self.plan.last_batches
        # The places behind the end are those of the head again, under `pad`.
        stop = start + batches * size if self.plan.tail == "pad" else min(start + batches * size, count)
        ranks = np.sort(self._line(np.arange(start, stop) % count))
        return ranks, [min(place * size, len(ranks)) for place in range(batches + 1)]

    def _key(self, purpose: str) -> int:
        return derive_key("forebay window", WINDOW_VERSION, self.seed, self.epoch, purpose)
