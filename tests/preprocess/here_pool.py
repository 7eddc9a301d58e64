"""Builds in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from forebay.preprocess.pipeline import build
from forebay.preprocess.pool import Pool
from forebay.preprocess.report import BuildReport, Options


class HerePool:
    """A pool without processes: each would load transformers anew, for a few photos."""

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers

    def __enter__(self) -> HerePool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [function(item) for item in items]

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for task in tasks:
            yield task, function(task)


def build_here(config: Any, **options: Any) -> BuildReport:
    """Returns the report of a build whose tasks run in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
        return build(config, Options(progress=False, **options))


@contextlib.contextmanager
def kept_workers(num_workers: int = 2) -> Iterator[None]:
    """Builds within the block share worker processes: a process loads transformers once, not once a build."""
    with Pool(num_workers) as pool, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("forebay.preprocess.pipeline.Pool", lambda _: contextlib.nullcontext(pool))
        yield
