"""Builds in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.pipeline import build
from forebay.preprocess.pool import Pool


def build_here(config: Any, **options: Any) -> BuildReport:
    """Returns the report of a build whose tasks run in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
        return build(config, Options(progress=False, **options))


@contextlib.contextmanager
def kept_workers(num_workers: int = 2) -> Iterator[None]:
    """Builds within the block share worker processes: a process loads transformers once, not once a build."""
    with Pool(num_workers) as pool, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("forebay.preprocess.pipeline.Pool", lambda *_, **__: contextlib.nullcontext(pool))
        yield
