"""Lint in the test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.here_pool import HerePool
from tests.inspect.checks.planted import Planted


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.inspect.checks.measured.Pool", HerePool)


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """The demo's clean recordings, in a folder of the test's own."""
    return Planted.of_demo(tmp_path / "raw")
