"""Fixtures that all tests of evaluations share: the demo recordings' caches and models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.evaluation.demo import make_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches and models of both families; no test changes them. 9 s of CPU, most of them for teaching the models."""
    folder = tmp_path_factory.mktemp("evaluated")
    for family in ("whisper", "qwen3_asr"):
        make_demo(folder, family)
    return folder
