"""What a mixture is drawn from: two ways to give lockstep groups to cells (source, class), each seekable."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from forebay.train.plan.bucket import Array
from forebay.train.plan.permutation import Ints


class Drawn(NamedTuple):
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
        ...

    def batches(self, groups: Ints, inside: Ints) -> Drawn:
        """Returns the samples of the micro-batches `inside` (0 to lockstep - 1) of `groups`, one batch behind the other."""
        ...

    def cells(self, group: int, inside: int) -> Ints:
        """Returns the samples drawn before a micro-batch, int64 [num_sources, num_classes]."""
        ...

    def groups_once(self) -> int:
        """Returns the groups that leave while the stream takes as many samples as the sources hold."""
        ...

    def groups_before_repeat(self) -> int:
        """Returns the groups that leave before any source has to give a sample twice."""
        ...


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
