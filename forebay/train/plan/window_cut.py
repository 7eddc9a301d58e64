"""Where a window, sorted by length, is cut into batches."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

from forebay.train.plan.interface import Array


class Lengths:
    """The lengths of all samples in rising order, kept as the values that occur and the number of samples below each."""

    def __init__(self, values: Array, starts: Array) -> None:
        self._values, self._starts = values.tolist(), starts.tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def at(self, rank: int) -> int:
        """Returns the length of a rank, from 0, the shortest sample, on."""
        return int(self._values[bisect.bisect_right(self._starts, rank) - 1])


def greedy_cut(length: Callable[[int], int], count: int, *, budget: int, limit: int) -> list[int]:
    """Returns the bounds of the fewest batches that keep to a budget, from 0 to `count`.

    length: of places 0 to count - 1, never falling. A batch costs its longest sample (a length of 0 counts as
    1) times its samples, and has at least one. Taken from the longest sample down, each as large as it can be: what is left is then the least for the others.
    Stops behind `limit` batches, with what is left in the first.
    """
    bounds = [count]
    while bounds[-1] and len(bounds) < limit:
        end = bounds[-1]
        bounds.append(max(end - max(budget // max(length(end - 1), 1), 1), 0))
    if bounds[-1]:
        bounds.append(0)
    return bounds[::-1]


def even_cut(lengths: list[int], *, num_batches: int, budget: int) -> list[int]:
    """Returns the bounds of exactly `num_batches` batches, the costliest of which is as cheap as it can be (to 1 in 512).

    lengths: never falling, at least `num_batches` of them; as many batches can hold them within `budget`. No batch is
    above the budget, but for single samples that are.
    """
    count = len(lengths)
    low, high = sum(lengths) // num_batches, budget
    while high - low > high >> 9:
        middle = (low + high) // 2
        cut = greedy_cut(lengths.__getitem__, count, budget=middle, limit=num_batches + 1)
        low, high = (low, middle) if len(cut) - 1 <= num_batches else (middle + 1, high)
    bounds = greedy_cut(lengths.__getitem__, count, budget=high, limit=count + 1)
    while len(bounds) - 1 < num_batches:
        # Halving the costliest never makes a batch dearer.
        costs = [(b - a > 1) * (b - a) * lengths[b - 1] + (b - a > 1) for a, b in itertools.pairwise(bounds)]
        place = costs.index(max(costs))
        bounds.insert(place + 1, (bounds[place] + bounds[place + 1]) // 2)
    return bounds
