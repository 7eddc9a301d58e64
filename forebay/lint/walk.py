"""One walk over rows and items: each group's are measured in worker processes, a run of them a task."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.lint.spans import SpanTask, cut, run_spans
from forebay.preprocess.pool import Pool
from forebay.progress import Progress
from forebay.store.layout import Array, Ints

Bad = tuple[int, str, str]
"""Position of a row, reason, message."""

_UNKNOWN = {"f": np.nan, "i": 0, "O": ""}
"""What a column holds where nothing was measured, by the kind of its values."""


@dataclass
class Part:
    """What was measured of some rows, a value a row.

    facts: by name, float64 (NaN where not known), int64 or strings. content: int64 hashes by what they are of, 0 where
    there is none. bad: those that a build leaves out.
    """

    facts: dict[str, Array] = field(default_factory=dict)
    content: dict[str, Ints] = field(default_factory=dict)
    bad: list[Bad] = field(default_factory=list)


class Columns(Part):
    """What was measured of all rows. deaths: the rows that killed a worker twice, of which nothing is known."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.deaths: list[int] = []

    def put(self, start: int, part: Part) -> None:
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
        function: Callable[[Any], Part],
        make: Callable[[int, int], SpanTask],
        count: int,
        *,
        size: int,
        unit: str,
    ) -> Columns:
        """Returns what a function measures of `count` rows. make: gives a task of rows. size: rows of a task."""
        found = Columns(count)
        with Progress(count, desc="lint", unit=unit, is_shown=self.progress) as bar:
            spans = cut(count, size)
            found.deaths = run_spans(pool, function, make, spans, new_pool=self.pool, done=bar.update, keep=found.put)
        return found
