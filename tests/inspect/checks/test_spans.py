"""Rows that kill their worker are found, and all other rows are measured."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from forebay.inspect.checks.measured import cut, run_spans
from forebay.preprocess.pool import Pool
from forebay.task_map import WorkerDied, mark


@dataclass(frozen=True)
class Rows:
    start: int
    stop: int
    deadly: frozenset[int] = frozenset()


def visit(task: Rows) -> list[int]:
    seen = []
    for position, row in enumerate(range(task.start, task.stop)):
        mark(position)
        if row in task.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(row)
    return seen


class Mortal:
    """A pool in this process whose rows kill it."""

    def __init__(self, deadly: frozenset[int]) -> None:
        self.deadly = deadly

    def __enter__(self) -> Mortal:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, function: Any, tasks: Any) -> Any:
        for task in tasks:
            for row in range(task.start, task.stop):
                if row in self.deadly:
                    raise WorkerDied(task, row - task.start, -9)
            yield task, function(task)


@pytest.mark.parametrize("deadly", [set(), {0}, {3}, {9}, {0, 1, 2}, set(range(10)), {4, 5}])
def test_rows_that_kill_are_named_and_the_others_are_visited(deadly: set[int]) -> None:
    counted: list[int] = []
    pool: Any = Mortal(frozenset(deadly))
    parts: dict[int, list[int]] = {}
    deaths = run_spans(
        pool, visit, Rows, cut(10, 4), new_pool=lambda: pool, done=counted.append, keep=parts.__setitem__
    )
    assert deaths == sorted(deadly)
    assert sorted(row for part in parts.values() for row in part) == [row for row in range(10) if row not in deadly]
    assert all(part[0] == start for start, part in parts.items())
    assert sum(counted) == 10


def test_a_process_that_dies_is_one_row() -> None:
    def make(start: int, stop: int) -> Rows:
        return Rows(start, stop, frozenset({5}))

    with Pool(1) as pool:
        parts: dict[int, list[int]] = {}
        deaths = run_spans(
            pool, visit, make, cut(8, 4), new_pool=lambda: Pool(1), done=lambda _: None, keep=parts.__setitem__
        )
    assert deaths == [5]
    assert sorted(row for part in parts.values() for row in part) == [0, 1, 2, 3, 4, 6, 7]


def test_no_rows_are_no_work() -> None:
    pool: Any = Mortal(frozenset())
    parts: dict[int, list[int]] = {}
    spans = cut(0, 4)
    deaths = run_spans(pool, visit, Rows, spans, new_pool=lambda: pool, done=lambda _: None, keep=parts.__setitem__)
    assert (parts, deaths) == ({}, [])
