"""One walk over rows and items: each group's are measured in worker processes, a run of them a task.

Runs of rows over worker processes, where a row that kills its worker is a finding and not the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from forebay.preprocess.pool import Pool
from forebay.progress import Progress
from forebay.store.layout import Array, Ints
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


Bad = tuple[int, str, str]
"""Position of a row, reason, message."""

_UNKNOWN = {"f": np.nan, "i": 0, "O": ""}
"""What a column holds where nothing was measured, by the kind of its values."""


@dataclass
class MeasuredPart:
    """What was measured of some rows, a value a row.

    facts: by name, float64 (NaN where not known), int64 or strings. content: int64 hashes by what they are of, 0 where
    there is none. bad: those that a build leaves out.
    """

    facts: dict[str, Array] = field(default_factory=dict)
    content: dict[str, Ints] = field(default_factory=dict)
    bad: list[Bad] = field(default_factory=list)


class MeasuredColumns(MeasuredPart):
    """What was measured of all rows. deaths: the rows that killed a worker twice, of which nothing is known."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.deaths: list[int] = []

    def put(self, start: int, part: MeasuredPart) -> None:
        """Writes what was measured of the rows from `start` on."""
        for columns, values in ((self.facts, part.facts), (self.content, part.content)):
            for name, found in values.items():
                if name not in columns:
                    columns[name] = np.full(self.count, _UNKNOWN[found.dtype.kind], found.dtype)
                columns[name][start : start + len(found)] = found
        self.bad.extend((start + row, reason, message) for row, reason, message in part.bad)


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """The processes in which rows are measured. workers: None: one a core."""

    workers: int | None
    progress: bool

    def pool(self) -> Pool:
        """Returns new processes."""
        return Pool(self.workers or os.cpu_count() or 1, shows=self.progress)

    def columns(
        self,
        pool: Pool,
        function: Callable[[Any], MeasuredPart],
        make: Callable[[int, int], SpanTask],
        count: int,
        *,
        size: int,
        unit: str,
    ) -> MeasuredColumns:
        """Returns what a function measures of `count` rows. make: gives a task of rows. size: rows of a task."""
        found = MeasuredColumns(count)
        with Progress(count, desc="lint", unit=unit, is_shown=self.progress) as bar:
            spans = cut(count, size)
            found.deaths = run_spans(pool, function, make, spans, new_pool=self.pool, done=bar.update, keep=found.put)
        return found
