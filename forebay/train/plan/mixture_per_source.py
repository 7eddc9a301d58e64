"""Groups of samples of one source each: the assignment gives every group to a source.

The source's own samples wait in the lines of its classes, and its next group is the next one that is full.
"""

from __future__ import annotations

import numpy as np

from forebay.train.plan.bucket import Array
from forebay.train.plan.mixture_assignment import Assignment
from forebay.train.plan.mixture_classes import ClassSplit
from forebay.train.plan.mixture_draw import Drawn, first_place
from forebay.train.plan.permutation import Ints


class PerSourceDraw:
    """Groups of samples of one source each, see the module."""

    def __init__(self, assignment: Assignment, split: ClassSplit, batch_sizes: Array, lockstep: int) -> None:
        """batch_sizes: int64 [num_classes], samples a micro-batch."""
        self._assignment, self._split, self._batch_sizes = assignment, split, batch_sizes
        self._group_sizes = batch_sizes * lockstep
        self._live: Array = np.flatnonzero(assignment.weights)
        sizes = split.sizes
        # Groups a turn of each source, and how far its lines can be off from that, in groups.
        self._rates: Array = (sizes / self._group_sizes).sum(1) / np.maximum(sizes.sum(1), 1)
        self._slack: Array = ((sizes > 0) * split.depth / self._group_sizes).sum(1)
        self._used: Array = (sizes > 0).sum(1)

    def classes(self, groups: Ints) -> Ints:
        """See `Draw`."""
        return self._ends(*self._assignment.locate(groups))[0]

    def batches(self, groups: Ints, inside: Ints) -> Drawn:
        """See `Draw`."""
        different, back = np.unique(groups, return_inverse=True)
        sources, numbers = self._assignment.locate(different)
        classes, ordinals, _ = (found[back] for found in self._ends(sources, numbers))
        sizes = self._batch_sizes[classes]
        starts = ordinals + inside * sizes - np.cumsum(sizes) + sizes
        ordinals = np.repeat(starts, sizes) + np.arange(sizes.sum())
        return Drawn(np.repeat(sources[back], sizes), np.repeat(classes, sizes), ordinals)

    def cells(self, group: int, inside: int) -> Ints:
        """See `Draw`."""
        found = np.zeros_like(self._split.sizes)
        groups = self._assignment.counts(np.array([group]))[0]
        begun = np.flatnonzero(groups)
        if len(begun):
            _, _, turns = self._ends(begun, groups[begun] - 1)
            found[begun] = self._split.counts(begun, turns + 1) // self._group_sizes * self._group_sizes
        if inside:
            source = int(self._assignment.locate(np.array([group]))[0][0])
            now = int(self.classes(np.array([group]))[0])
            found[source, now] += inside * self._batch_sizes[now]
        return found

    def groups_once(self) -> int:
        """See `Draw`."""
        return int(self._whole_groups().sum())

    def groups_before_repeat(self) -> int:
        """See `Draw`."""
        return int(self._assignment.places(self._live, self._whole_groups()).min())

    def _whole_groups(self) -> Ints:
        whole: Ints = (self._split.sizes[self._live] // self._group_sizes).sum(1)
        return whole

    def _ends(self, sources: Ints, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns class, first ordinal in the cell, and the source's turn that completes group `numbers` of `sources`."""

        def left(turns: Ints) -> Ints:
            gone: Ints = (self._split.counts(sources, turns) // self._group_sizes).sum(-1)
            return gone

        rates, slack = self._rates[sources], self._slack[sources]
        low, high = (numbers - slack) / rates, (numbers + 1 + slack + self._used[sources]) / rates
        turns = first_place(left, numbers, low=low, high=high)
        classes, ordinals = self._split.locate(sources, turns)
        return classes, ordinals + 1 - self._group_sizes[classes], turns
