"""The largest batch that fits, found in a few trials: a pure function of a line and of what the trials say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MAX_TRIALS = 6
"""Trials of one search at most."""

_SHRINK_BY_LINE, _SHRINK = 0.85, 0.5
"""A size that ran out of memory without a figure is followed by this share of it, then by its square, and so on."""


def granule(size: int) -> int:
    """Returns the step between the sizes that are tried: 1 below 16, 8 up to 511, then about 3 % of the size."""
    return 1 if size < 16 else 1 << max(size.bit_length() - 6, 3)


def grid_down(size: int) -> int:
    """Returns the largest size of the grid that is not above `size`, 1 at least."""
    size = max(size, 1)
    return size - size % granule(size)


def grid_up(size: int) -> int:
    """Returns the next size of the grid above `size`."""
    return grid_down(size) + granule(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Bytes of a training step as a line in the size of its batch: `base + slope * size`."""

    base: float
    slope: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Line:
        """Returns the line through two points (size, bytes) of different sizes."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(base=first[1] - slope * first[0], slope=slope)

    def at(self, size: float) -> float:
        """Returns the bytes of a size."""
        return self.base + self.slope * size

    def largest(self, limit: float, *, most: int) -> int:
        """Returns the largest size of the grid, `most` at most, whose bytes are not above `limit`; 0 where none is."""
        if self.slope <= 0:
            return grid_down(most) if self.base <= limit else 0
        size = min((limit - self.base) / self.slope, float(most))
        return 0 if size < 1 else grid_down(int(size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a trial of one size says."""

    fits: bool
    peak_bytes: int | None = None
    """What it took; None where it ran out of memory first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Where a search looks."""

    limit_bytes: int
    least: int
    """Nothing smaller is tried."""
    most: int
    """Nothing larger is tried."""
    max_trials: int = MAX_TRIALS


@dataclass(slots=True)
class Search:
    """A search and what it knows: the last fit, the first failure, and the points between which to guess.

    line: the expectation before the first trial; None: nothing is expected, and `start` is the first size.
    """

    bounds: Bounds
    line: Line | None = None
    start: int | None = None
    trials: int = 0
    fit: int | None = None
    """The largest size that fits so far."""
    failure: int | None = None
    """The smallest size that does not fit so far."""
    _points: list[tuple[int, float]] = field(default_factory=list)
    _blind: int = 0
    """Failures without a figure in a row."""
    _side: int = 0
    """How many guesses in a row fell on one side, with its sign."""

    def run(self, trial: Callable[[int], Outcome]) -> int | None:
        """Returns the largest size that fits, within one step of the grid where the trials were enough; None: none.

        At most `bounds.max_trials` calls of `trial`. The last of them is spent on `bounds.least` where nothing has fit
        until then, so that None means that `least` does not fit.
        """
        size: int | None = self._first()
        while size is not None:
            self._learn(size, trial(size))
            size = self._next()
        return self.fit

    def _first(self) -> int:
        guess = self.start
        if guess is None:
            guess = (
                self.line.largest(self.bounds.limit_bytes, most=self.bounds.most) if self.line else self.bounds.least
            )
        return min(max(grid_down(guess), self.bounds.least), self.bounds.most)

    def _learn(self, size: int, outcome: Outcome) -> None:
        self.trials += 1
        if outcome.peak_bytes is not None:
            self._points.append((size, float(outcome.peak_bytes)))
        self._blind = 0 if outcome.peak_bytes is not None else self._blind + 1
        if outcome.fits:
            self.fit, self._side = size, max(self._side, 0) + 1
        else:
            self.failure, self._side = size, min(self._side, 0) - 1

    def _next(self) -> int | None:
        """Returns the next size to try; None where the search is over."""
        bounds, left = self.bounds, self.bounds.max_trials - self.trials
        if left <= 0 or self.fit == bounds.most or self.failure == bounds.least:
            return None
        low = bounds.least if self.fit is None else grid_up(self.fit)
        high = bounds.most if self.failure is None else grid_down(self.failure - 1)
        if self.fit is None and (left == 1 or low >= high):
            return bounds.least
        return None if low > high else min(max(grid_down(int(self._guess(low, high))), low), high)

    def _guess(self, low: int, high: int) -> float:
        if self.fit is not None and self.failure is not None and abs(self._side) > 1:
            return (low + high) / 2  # the figures mislead: halve
        if not self._points or self._blind:
            share = _SHRINK if self.line is None else _SHRINK_BY_LINE
            failed = float(self.failure or high)
            return (low + high) / 2 if self.fit is not None else failed * share ** max(self._blind, 1)
        slope = self._slope()
        size, peak = min(self._points, key=lambda point: abs(point[1] - self.bounds.limit_bytes))
        return size + (self.bounds.limit_bytes - peak) / slope if slope > 0 else high

    def _slope(self) -> float:
        """Returns bytes a sample as measured: between the two largest sizes, or from the line's base to the one."""
        *others, (size, peak) = sorted(self._points)
        before = others[-1] if others else (0, self.line.base if self.line else 0.0)
        return (peak - before[1]) / (size - before[0])
