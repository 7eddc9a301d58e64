"""How a mixture draws its lockstep groups: two ways to give groups to cells (source, length class), each seekable.

Nothing is simulated. How many samples of a class a stream has had at a place is a closed form, so the place where a
group fills, and where the samples of the group lie, are found by bisection (`first_place`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from forebay.errors import PlanError
from forebay.plan.mixture.sources import AnyAssignment
from forebay.plan.permutation import Permutations
from forebay.store.layout import Array, Ints


class MixtureDraw(NamedTuple):
    """Samples by what they are of their source's class: int64 arrays, one element a sample.

    ordinals: how many samples of that cell were drawn before, over all passes.
    """

    sources: Ints
    classes: Ints
    ordinals: Ints


class Draw(Protocol):
    """Groups are numbered from the head of the stream, without end."""

    def classes(self, groups: Ints) -> Ints:
        """Returns the length class of each group."""

    def batches(self, groups: Ints, inside: Ints) -> MixtureDraw:
        """Returns the samples of the micro-batches `inside` (0 to lockstep - 1) of `groups`, batch by batch."""

    def cells(self, group: int, inside: int) -> Ints:
        """Returns the samples drawn before a micro-batch, int64 [num_sources, num_classes]."""

    def place_behind(self, group: int) -> int:
        """Returns the place of the stream up to which the groups before `group` are decided."""

    def groups_once(self) -> int:
        """Returns the groups that leave while the stream takes as many samples as the sources hold."""

    def groups_before_repeat(self) -> int:
        """Returns the groups that leave before any source has to give a sample twice."""


def first_place(count: Callable[[Ints], Ints], targets: Ints, *, low: Array, high: Array) -> Ints:
    """Returns the last place at which a count that never falls is still at most its target; there the next one comes.

    count: of the first n places. low, high: places where it is at most, and above, its target, up to float rounding.
    """
    margin = 2 + high * 1e-12
    below = np.maximum(np.floor(low - margin), 0).astype(np.int64)
    above = np.ceil(high + margin).astype(np.int64)
    while (above - below > 1).any():
        middle = (below + above) // 2
        reached = count(middle) > targets
        above = np.where(reached, middle, above)
        below = np.where(reached, below, middle)
    return below


class MixedDraw:
    """Groups of samples of all sources: full, of one length class each, and by the weights at any time.

    The stream of samples follows the assignment exactly. Every sample waits in the line of its class, and a lockstep
    group leaves when the line holds one. So what has left differs from the stream only by what waits: fewer samples
    than one group of each class.
    """

    def __init__(self, assignment: AnyAssignment, split: ClassSplit, batch_sizes: Array, lockstep: int) -> None:
        """batch_sizes: int64 [num_classes], samples a micro-batch."""
        self._assignment, self._split, self._batch_sizes = assignment, split, batch_sizes
        self._group_sizes = batch_sizes * lockstep
        self._live: Array = np.flatnonzero(assignment.shares.any(0))
        # Of each class by place, in the last of the stretches with weights of their own, which has no end.
        self._rates: Array = assignment.shares[-1] @ (split.sizes / np.maximum(split.sizes.sum(1, keepdims=True), 1))
        # Between two places a source is off by less than 1, and each level of its split by less than 2.
        self._slack = len(self._live) * (2 * split.depth + 1)
        # Samples of each class before each stretch.
        self._held: Array = self._class_counts(assignment.starts)

    def classes(self, groups: Ints) -> Ints:
        return self._ends_at(groups)[0]

    def batches(self, groups: Ints, inside: Ints) -> MixtureDraw:
        different, back = np.unique(groups, return_inverse=True)
        classes, numbers, _ = (found[back] for found in self._ends_at(different))
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
        return MixtureDraw(sources[order], classes, ordinals[order])

    def cells(self, group: int, inside: int) -> Ints:
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

    def place_behind(self, group: int) -> int:
        return int(self._ends_at(np.array([group - 1]))[2][0]) + 1 if group else 0

    def groups_once(self) -> int:
        return self._left_before(int(self._split.sizes[self._live].sum()))

    def groups_before_repeat(self) -> int:
        return self._left_before(int(self._assignment.places(self._live, self._split.sizes[self._live].sum(1)).min()))

    def _left_before(self, place: int) -> int:
        return int((self._class_counts(np.array([place]))[0] // self._group_sizes).sum())

    def _ends_at(self, groups: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns class and number inside the class of each group, and the place of the sample that completes it."""
        rate = float((self._rates / self._group_sizes).sum())
        slack = self._slack * float((1 / self._group_sizes).sum()) + len(self._group_sizes)

        def left(places: Ints) -> Ints:
            gone: Ints = (self._class_counts(places) // self._group_sizes).sum(-1)
            return gone

        held = (self._held // self._group_sizes).sum(-1)
        places = first_place(left, groups, **self._bracket(groups, held[:, None], rate=rate, slack=slack))
        sources, turns = self._assignment.locate(places)
        classes, _ = self._split.locate(sources, turns)
        return classes, self._counts_of(classes, places + 1) // self._group_sizes[classes] - 1, places

    def _bracket(self, targets: Ints, held: Ints, *, rate: Array | float, slack: float) -> dict[str, Array]:
        """Returns where counts pass their targets: inside of a stretch, or in the last one by its rate.

        held: int64 [num_starts, num_targets or 1], the counts before each stretch.
        """
        stretch = (held <= targets).sum(0) - 1
        starts = np.append(self._assignment.starts, 0)
        is_last = stretch == len(starts) - 2
        beyond = targets - np.take_along_axis(np.broadcast_to(held, (len(held), len(targets))), stretch[None], 0)[0]
        safe = np.maximum(rate, 1e-300)
        low = starts[stretch] + np.where(is_last, np.maximum(beyond - slack, 0) / safe, 0)
        high = np.where(is_last, starts[stretch] + (beyond + 1 + slack) / safe, starts[stretch + 1])
        return {"low": low, "high": high}

    def _cells_of(self, classes: Ints, ordinals: Ints) -> Ints:
        """Returns how many of the first `ordinals` samples of a class are of each live source, int64 [n, num_live]."""
        places = np.zeros_like(ordinals)
        some = np.flatnonzero(ordinals)
        if len(some):
            chosen = classes[some]
            last = ordinals[some] - 1
            bracket = self._bracket(last, self._held[:, chosen], rate=self._rates[chosen], slack=self._slack)
            places[some] = 1 + first_place(lambda at: self._counts_of(chosen, at), last, **bracket)
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


class PerSourceDraw:
    """Groups of samples of one source each: the assignment gives every group to a source.

    The source's own samples wait in the lines of its classes, and its next group is the next one that is full.
    """

    def __init__(self, assignment: AnyAssignment, split: ClassSplit, batch_sizes: Array, lockstep: int) -> None:
        """batch_sizes: int64 [num_classes], samples a micro-batch."""
        self._assignment, self._split, self._batch_sizes = assignment, split, batch_sizes
        self._group_sizes = batch_sizes * lockstep
        self._live: Array = np.flatnonzero(assignment.shares.any(0))
        sizes = split.sizes
        # Groups a turn of each source, and how far its lines can be off from that, in groups.
        self._rates: Array = (sizes / self._group_sizes).sum(1) / np.maximum(sizes.sum(1), 1)
        self._slack: Array = ((sizes > 0) * split.depth / self._group_sizes).sum(1)
        self._used: Array = (sizes > 0).sum(1)

    def classes(self, groups: Ints) -> Ints:
        return self._ends(*self._assignment.locate(groups))[0]

    def batches(self, groups: Ints, inside: Ints) -> MixtureDraw:
        different, back = np.unique(groups, return_inverse=True)
        sources, numbers = self._assignment.locate(different)
        classes, ordinals, _ = (found[back] for found in self._ends(sources, numbers))
        sizes = self._batch_sizes[classes]
        starts = ordinals + inside * sizes - np.cumsum(sizes) + sizes
        ordinals = np.repeat(starts, sizes) + np.arange(sizes.sum())
        return MixtureDraw(np.repeat(sources[back], sizes), np.repeat(classes, sizes), ordinals)

    def cells(self, group: int, inside: int) -> Ints:
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

    def place_behind(self, group: int) -> int:
        return group

    def groups_once(self) -> int:
        return int(self._whole_groups().sum())

    def groups_before_repeat(self) -> int:
        return int(self._assignment.places(self._live, self._whole_groups()).min())

    def _whole_groups(self) -> Ints:
        whole: Ints = (self._split.sizes[self._live] // self._group_sizes).sum(1)
        return whole

    def _ends(self, sources: Ints, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns class, first ordinal in the cell and last turn of the groups `numbers` of `sources`."""

        def left(turns: Ints) -> Ints:
            gone: Ints = (self._split.counts(sources, turns) // self._group_sizes).sum(-1)
            return gone

        rates, slack = self._rates[sources], self._slack[sources]
        low, high = (numbers - slack) / rates, (numbers + 1 + slack + self._used[sources]) / rates
        turns = first_place(left, numbers, low=low, high=high)
        classes, ordinals = self._split.locate(sources, turns)
        return classes, ordinals + 1 - self._group_sizes[classes], turns


_LIMIT = 2**31


class ClassSplit:
    """The class of every turn of k sources with c classes: one pass uses every sample of every class exactly once.

    The classes of a source are split in two, each half again, and so on, `depth` = ceil(log2(c)) levels deep. At a node
    that holds n samples, `a` of them on its left, the first j turns of the node go left floor((j a + f) / n) times
    (Bresenham's line): closed forms both ways, for any sizes, and exact whenever a pass is through. At each level the
    rounding is off by less than 1, so at every turn each class has its share within `depth` samples. The phases f are
    drawn from a key.
    """

    __slots__ = ("_lefts", "_phases", "_totals", "depth", "num_classes", "sizes")

    def __init__(self, sizes: Array, key: int) -> None:
        """Makes the split of `sizes`, int64 [k, c]: samples by source and class. key: 64 bits, for the phases."""
        num_sources, self.num_classes = sizes.shape
        self.depth = (self.num_classes - 1).bit_length()
        self.sizes = np.asarray(sizes, dtype=np.int64)
        totals = np.zeros((num_sources, 2 ** (self.depth + 1)), dtype=np.int64)
        totals[:, 2**self.depth : 2**self.depth + self.num_classes] = sizes
        for node in range(2**self.depth - 1, 0, -1):  # as in a heap: the children of a node are 2 node and 2 node + 1
            totals[:, node] = totals[:, 2 * node] + totals[:, 2 * node + 1]
        if totals.max() >= _LIMIT:
            raise PlanError(f"a source of the mixture has {totals.max()} samples, at most {_LIMIT - 1} are possible")
        inner = totals[:, : 2**self.depth]
        self._lefts: Array = totals[:, 0::2]
        self._totals: Array = np.maximum(inner, 1)
        drawn = Permutations(self._totals.ravel().tolist(), key)
        phases = drawn(np.zeros(self._totals.size, np.int64), member=np.arange(self._totals.size))
        self._phases: Array = phases.reshape(self._totals.shape)

    def counts(self, sources: Ints, turns: Ints) -> Ints:
        """Returns how many of the first `turns` turns of a source fall to each class, int64 [*turns.shape, c]."""
        found = np.asarray(turns)[..., None]
        for level in range(self.depth):
            nodes = np.arange(2**level, 2 ** (level + 1))
            left = self._left(np.asarray(sources)[..., None], nodes, found)
            found = np.stack([left, found - left], axis=-1).reshape(*left.shape[:-1], -1)
        return found[..., : self.num_classes]

    def counts_of(self, sources: Ints, classes: Ints, turns: Ints) -> Ints:
        """Returns how many of the first `turns` turns of a source fall to the class asked for; shapes broadcast."""
        found = turns
        for nodes, goes_right in self._path(classes):
            left = self._left(sources, nodes, found)
            found = np.where(goes_right, found - left, left)
        return found

    def locate(self, sources: Ints, turns: Ints) -> tuple[Ints, Ints]:
        """Returns the class of each turn, and how many turns of that source before it have the same class."""
        nodes, inside = np.ones_like(turns), turns
        for _ in range(self.depth):
            left = self._left(sources, nodes, inside)
            goes_right = self._left(sources, nodes, inside + 1) == left
            inside = np.where(goes_right, inside - left, left)
            nodes = 2 * nodes + goes_right
        return nodes - 2**self.depth, inside

    def turns(self, sources: Ints, classes: Ints, ordinals: Ints) -> Ints:
        """Returns the turn of a class's ordinal: the inverse of `locate`. The class has samples."""
        found = ordinals
        for nodes, goes_right in reversed(self._path(classes)):
            total = self._totals[sources, nodes]
            left = self._lefts[sources, nodes]
            phase = self._phases[sources, nodes]
            # j - floor((j a + f) / n) is floor((j (n - a) + n - 1 - f) / n): the right side is such a line too.
            share = np.where(goes_right, total - left, left)
            phase = np.where(goes_right, total - 1 - phase, phase)
            passes, rest = np.divmod(found + 1, np.maximum(share, 1))
            found = passes * total - (phase - rest * total) // np.maximum(share, 1) - 1
        return found

    def _left(self, sources: Ints, nodes: Ints, turns: Ints) -> Ints:
        total, left = self._totals[sources, nodes], self._lefts[sources, nodes]
        passes, inside = np.divmod(turns, total)  # a product of turns and left may pass 2^63
        found: Ints = passes * left + (inside * left + self._phases[sources, nodes]) // total
        return found

    def _path(self, classes: Ints) -> list[tuple[Ints, Ints]]:
        """Returns from the root down: the nodes on the way to each class, and whether it goes on to the right there."""
        leaves = classes + 2**self.depth
        heights = range(self.depth, 0, -1)
        return [(leaves >> height, (leaves >> (height - 1)) & 1 == 1) for height in heights]
