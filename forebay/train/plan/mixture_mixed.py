"""Groups of samples of all sources: full, of one length class, and by the weights at any time.

The stream of samples follows the assignment exactly; every sample waits in the line of its class, and a lockstep group leaves
when its line holds one. So what has left differs from the stream only by what waits: fewer samples than one group of each
class. Nothing is simulated: how many samples of a class the stream has had at a place is a closed form, so the place where a
group fills, and where its samples lie, are found by bisection.
"""

from __future__ import annotations

import numpy as np

from forebay.train.plan.bucket import Array
from forebay.train.plan.mixture_assignment import Assignment
from forebay.train.plan.mixture_classes import ClassSplit
from forebay.train.plan.mixture_draw import Drawn, first_place
from forebay.train.plan.permutation import Ints


class MixedDraw:
    """Groups of samples of all sources, see the module."""

    def __init__(self, assignment: Assignment, split: ClassSplit, batch_sizes: Array, lockstep: int) -> None:
        """batch_sizes: int64 [num_classes], samples a micro-batch."""
        self._assignment, self._split, self._batch_sizes = assignment, split, batch_sizes
        self._group_sizes = batch_sizes * lockstep
        self._live: Array = np.flatnonzero(assignment.weights)
        shares = assignment.weights / assignment.period
        self._rates: Array = shares @ (split.sizes / np.maximum(split.sizes.sum(1, keepdims=True), 1))
        # At any place a source is off by less than 1, and each level of its split again: how far a class can be off.
        self._slack = len(self._live) * (split.depth + 1)

    def classes(self, groups: Ints) -> Ints:
        """See `Draw`."""
        return self._ends(groups)[0]

    def batches(self, groups: Ints, inside: Ints) -> Drawn:
        """See `Draw`."""
        different, back = np.unique(groups, return_inverse=True)
        classes, numbers = (found[back] for found in self._ends(different))
        sizes = self._batch_sizes[classes]
        starts = numbers * self._group_sizes[classes] + inside * sizes
        first = self._cells_of(classes, starts)
        counts = self._cells_of(classes, starts + sizes) - first
        flat = counts.ravel()
        sources = np.repeat(np.tile(self._live, len(groups)), flat)
        ordinals = np.repeat(first.ravel() - np.cumsum(flat) + flat, flat) + np.arange(flat.sum())
        classes = np.repeat(classes, sizes)
        # In the order of the stream, so that with one class every prefix of samples, not of batches, is exact.
        places = self._assignment.places(sources, self._split.turns(sources, classes, ordinals))
        order = np.lexsort((places, np.repeat(np.arange(len(groups)), sizes)))
        return Drawn(sources[order], classes, ordinals[order])

    def cells(self, group: int, inside: int) -> Ints:
        """See `Draw`."""
        every = np.arange(self._split.num_classes)
        done = np.zeros_like(every)
        if group:
            _, _, places = self._ends_at(np.array([group - 1]))
            done = self._class_counts(places + 1)[0] // self._group_sizes * self._group_sizes
        if inside:
            now = int(self.classes(np.array([group]))[0])
            done[now] += inside * self._batch_sizes[now]
        found = np.zeros(self._split.sizes.shape, np.int64)
        found[self._live] = self._cells_of(every, done).T
        return found

    def groups_once(self) -> int:
        """See `Draw`."""
        return self._left_before(int(self._split.sizes[self._live].sum()))

    def groups_before_repeat(self) -> int:
        """See `Draw`."""
        sizes = self._split.sizes[self._live].sum(1)
        return self._left_before(int(self._assignment.places(self._live, sizes).min()))

    def _left_before(self, place: int) -> int:
        return int((self._class_counts(np.array([place]))[0] // self._group_sizes).sum())

    def _ends(self, groups: Ints) -> tuple[Ints, Ints]:
        """Returns class and number inside the class of each group."""
        classes, numbers, _ = self._ends_at(groups)
        return classes, numbers

    def _ends_at(self, groups: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns class and number inside the class of each group, and the place of the sample that completes it."""
        used = self._rates > 0
        rate = float((self._rates[used] / self._group_sizes[used]).sum())
        slack = self._slack * float((1 / self._group_sizes[used]).sum())

        def left(places: Ints) -> Ints:
            gone: Ints = (self._class_counts(places) // self._group_sizes).sum(-1)
            return gone

        places = first_place(left, groups, low=(groups - slack) / rate, high=(groups + 1 + slack + used.sum()) / rate)
        sources, turns = self._assignment.locate(places)
        classes, _ = self._split.locate(sources, turns)
        return classes, self._counts_of(classes, places + 1) // self._group_sizes[classes] - 1, places

    def _cells_of(self, classes: Ints, ordinals: Ints) -> Ints:
        """Returns how many of the first `ordinals` samples of a class are of each live source, int64 [n, num_live]."""
        rates = np.maximum(self._rates[classes], 1e-300)
        wanted = np.where(self._rates[classes] > 0, ordinals, 0)
        places = np.zeros_like(wanted)
        some = np.flatnonzero(wanted)
        if len(some):
            chosen = classes[some]
            last = wanted[some] - 1
            places[some] = 1 + first_place(
                lambda at: self._counts_of(chosen, at),
                last,
                low=(last - self._slack) / rates[some],
                high=(last + 1 + self._slack) / rates[some],
            )
        return self._split.counts_of(self._live, classes[:, None], self._assignment.counts(places)[:, self._live])

    def _counts_of(self, classes: Ints, places: Ints) -> Ints:
        """Returns how many of the first `places` samples of the stream are of a class."""
        turns = self._assignment.counts(places)[:, self._live]
        counted: Ints = self._split.counts_of(self._live, classes[:, None], turns).sum(-1)
        return counted

    def _class_counts(self, places: Ints) -> Ints:
        """Returns how many of the first `places` samples of the stream are of each class, int64 [n, num_classes]."""
        turns = self._assignment.counts(places)[:, self._live]
        counted: Ints = self._split.counts(self._live, turns).sum(-2)
        return counted
