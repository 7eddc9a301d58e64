"""How fast a build goes, and which numbers are left to do, written short. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, int, int]
"""A time, and the shards and rows that a run had made until then."""

WINDOW_S = 300.0
"""The last minutes, over which a rate is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What all runs of a build make in a second. window_s: the seconds that this was taken over."""

    shards: float = 0.0
    rows: float = 0.0
    window_s: float = 0.0


def rate_of(histories: Iterable[Sequence[Point]], *, now: float, window_s: float = WINDOW_S) -> Rate:
    """Returns what runs have made in the last `window_s` seconds, a second; a build that is younger counts its age.

    histories: of each run its points in their order, the first from before its first shard.
    """
    inside = [history for history in histories if history and history[-1][0] > now - window_s]
    if not inside:
        return Rate()
    since = max(now - window_s, min(history[0][0] for history in inside))
    elapsed_s = now - since
    if elapsed_s <= 0:  # the clock of the machine that wrote it is ahead of this one
        return Rate()
    made = [(_at(history, history[-1][0]), _at(history, since)) for history in inside]
    shards = sum(max(0.0, last[0] - first[0]) for last, first in made)
    rows = sum(max(0.0, last[1] - first[1]) for last, first in made)
    return Rate(shards=shards / elapsed_s, rows=rows / elapsed_s, window_s=elapsed_s)


def _at(history: Sequence[Point], time_s: float) -> tuple[float, float]:
    """Returns the shards and rows of a run at a time, as if they had come evenly between two points."""
    before = history[0]
    for point in history:
        if point[0] >= time_s:
            between = point[0] - before[0]
            share = (time_s - before[0]) / between if between > 0 and time_s > before[0] else 0.0
            return before[1] + share * (point[1] - before[1]), before[2] + share * (point[2] - before[2])
        before = point
    return float(before[1]), float(before[2])


def seconds_left(left: float, a_second: float) -> float | None:
    """Returns how long the rest takes; None where nothing moves."""
    if left <= 0:
        return 0.0
    return left / a_second if a_second > 0 else None


def compressed(numbers: Iterable[int]) -> str:
    """Returns numbers as `sbatch --array` takes them: sorted, those in a row as a range: `0-3,7,12-13`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
