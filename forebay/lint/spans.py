"""Runs of rows over worker processes, where a row that kills its worker is a finding and not the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from forebay.preprocess.pool import Pool
from forebay.task_map import WorkerDied

R = TypeVar("R")

Span = tuple[int, int]
"""Rows [start, stop)."""


class SpanTask(Protocol):
    """What a worker is given: some consecutive rows, the first of which is `start`."""

    @property
    def start(self) -> int:
        """The first row."""
        ...


def cut(count: int, size: int) -> list[Span]:
    """Returns the runs of `size` rows that `count` rows make."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def run_spans(
    pool: Pool,
    function: Callable[[Any], R],
    make: Callable[[int, int], SpanTask],
    spans: Sequence[Span],
    *,
    new_pool: Callable[[], Pool],
    done: Callable[[int], object],
    keep: Callable[[int, R], object],
) -> list[int]:
    """Keeps `function(make(start, stop))` of every run of rows; returns the rows that killed a worker twice, sorted.

    A task is made when a worker is free for it.

    pool: whose workers begin. new_pool: makes another one behind a death, whose neighbours' tasks are lost with it.
    done: is called with the number of rows that were done. keep: takes each result, with its first row, as it comes.
    """
    deaths: list[int] = []
    waiting = dict(spans)
    with contextlib.ExitStack() as stack:
        while waiting:
            try:
                for task, result in pool.run(function, (make(*span) for span in list(waiting.items()))):
                    keep(task.start, result)
                    done(waiting.pop(task.start) - task.start)
            except WorkerDied as err:
                start = err.task.start
                stop, row = waiting.pop(start), start + err.position
                deaths.append(row)
                done(1)
                waiting |= {a: b for a, b in ((start, row), (row + 1, stop)) if a < b}
                pool = stack.enter_context(new_pool())
    return sorted(deaths)
