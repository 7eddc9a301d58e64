"""Weights of a mixture that change over a run: the stretches in which they stay, and one sequence of sources over all.

A stretch begins at a place of the stream, and has a sequence of its own by its weights. The turns of a source go on
over all stretches: nothing is lost or repeated where weights change.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from forebay.config.tree import WeightSteps
from forebay.errors import PlanError
from forebay.plan.mixture.sources import Assignment
from forebay.store.layout import Array, Ints

MAX_STRETCHES = 256
"""Of one run: each takes up to 0.1 s to be made."""


class WeightChange(NamedTuple):
    """Other weights of a run. at: the micro-batch of the global order, over epochs, from whose group on they hold."""

    at: int
    weights: Array
    """int64 [k], of 65,536."""
    is_revision: bool = False
    """Whether it was made to a run that has begun: states from before it go on with it."""


class ChangingAssignment:
    """An endless sequence of sources whose weights change at some places; `Assignment` says what the methods give.

    Every prefix is within one place of every share for each stretch that it reaches into.
    """

    __slots__ = ("_bases", "_parts", "shares", "starts")

    def __init__(self, parts: Sequence[Assignment], starts: Sequence[int]) -> None:
        """parts: a sequence for each stretch. starts: the first place of each, rising from 0."""
        self._parts = tuple(parts)
        self.starts: Array = np.array(starts, np.int64)
        self.shares: Array = np.concatenate([part.shares for part in parts])
        lengths = np.diff(self.starts)
        held = [part.counts(length) for part, length in zip(self._parts, lengths, strict=False)]
        self._bases: Array = np.cumsum([np.zeros(self.shares.shape[1], np.int64), *held], axis=0)

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """Returns the source of each place and how many places before it have the same source."""
        stretches = np.searchsorted(self.starts, places, side="right") - 1
        sources, ordinals = np.empty_like(places), np.empty_like(places)
        for number in np.unique(stretches).tolist():
            own = stretches == number
            sources[own], turns = self._parts[number].locate(places[own] - self.starts[number])
            ordinals[own] = turns + self._bases[number, sources[own]]
        return sources, ordinals

    def places(self, sources: Ints, ordinals: Ints) -> Ints:
        """Returns the place of a source's turn, from 0: the inverse of `locate`."""
        stretches = (self._bases[:, sources] <= ordinals).sum(0) - 1
        found = np.empty_like(ordinals)
        for number in np.unique(stretches).tolist():
            own = stretches == number
            turns = ordinals[own] - self._bases[number, sources[own]]
            found[own] = self._parts[number].places(sources[own], turns) + self.starts[number]
        return found

    def counts(self, places: Ints) -> Ints:
        """Returns how many of the first `places` places each source has, int64 [*places.shape, k]."""
        stretches = np.searchsorted(self.starts, places, side="right") - 1
        found = self._bases[stretches]
        for number in np.unique(stretches).tolist():
            own = stretches == number
            found[own] += self._parts[number].counts(places[own] - self.starts[number])
        return found


AnyAssignment = Assignment | ChangingAssignment


def stretches_of(
    weights: Sequence[float | WeightSteps], *, between: Literal["step", "line"] = "step", line_step: float = 1.0
) -> list[tuple[float, list[float]]]:
    """Returns where other weights begin, rising from 0, and the weights of all sources from there on.

    weights: of each source, a number or steps. between: `line` goes straight from each step to the next in steps of
    `line_step`, each with the line's weight at its middle. Raises PlanError for too many stretches.
    """
    knots = sorted({at for each in weights if isinstance(each, tuple) for at, _ in each} | {0.0})
    begins = knots
    if between == "line":
        pairs = itertools.pairwise(knots)
        begins = [low + i * line_step for low, high in pairs for i in range(_steps(low, high, line_step))] + knots[-1:]
    if len(begins) > MAX_STRETCHES:
        raise PlanError(
            f"the weights of the mixture change {len(begins) - 1} times, at most {MAX_STRETCHES - 1} are possible; "
            "raise mixture.line_step, or give fewer steps",
            code="FB116",
        )
    ends = [*begins[1:], begins[-1]]
    middles = [(low + high) / 2 for low, high in zip(begins, ends, strict=True)] if between == "line" else begins
    return [
        (at, [_weight(each, middle, between) for each in weights]) for at, middle in zip(begins, middles, strict=True)
    ]


def _steps(low: float, high: float, step: float) -> int:
    return min(max(int(-(-(high - low) // step)), 1), MAX_STRETCHES + 1)


def _weight(steps: float | WeightSteps, at: float, between: str) -> float:
    """Returns the weight of one source at a position."""
    if not isinstance(steps, tuple):
        return steps
    place = bisect.bisect_right([begin for begin, _ in steps], at) - 1
    begin, weight = steps[place]
    if between == "step" or place + 1 == len(steps):
        return weight
    end, to = steps[place + 1]
    return weight + (to - weight) * (at - begin) / (end - begin)
