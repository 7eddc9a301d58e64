"""Which length class each turn of a source is taken from, so that one pass uses every sample of every class exactly once.

The classes of a source are split in two, each half again, and so on. At a node that holds n samples, `a` of them on its left,
the first j turns of the node go left floor((j a + f) / n) times (Bresenham's line): closed forms both ways, for any sizes,
and exact whenever a pass is through. At each of ceil(log2(classes)) levels the rounding is off by less than 1, so at every
turn each class has its share within that number of samples. The phases f are drawn from the seed.
"""

from __future__ import annotations

import numpy as np

from forebay.errors import PlanError
from forebay.train.plan.bucket import Array
from forebay.train.plan.permutation import Ints, Permutations

_LIMIT = 2**31


class ClassSplit:
    """The class of every turn of k sources with c classes, `depth` levels deep."""

    __slots__ = ("_lefts", "_phases", "_totals", "depth", "num_classes", "sizes")

    def __init__(self, sizes: Array, key: int) -> None:
        """Makes the split of `sizes`, int64 [k, c]: samples by source and class; phases are drawn from the 64-bit `key`."""
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
