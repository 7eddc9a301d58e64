"""The bars of a build show what is made: clips or images, and texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from forebay.preprocess.pipeline import Options, build
from forebay.preprocess.progress import Progress
from tests.text_corpus import demo_texts, text_config


def task(group: str, rows: int) -> Any:
    return SimpleNamespace(group=group, rows=pa.table({"duration_s": [1800.0] * rows}))


def test_media_and_texts_have_a_bar_each(capsys: pytest.CaptureFixture[str]) -> None:
    receipt: Any = SimpleNamespace(failures=("one",))
    with Progress({"media": 4, "text": 6}, media_unit="clip", shown=True) as progress:
        progress.shard_done(task("media", 4), receipt)
        progress.shard_done(task("text", 6), receipt)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "6/6" in shown
    assert "clip/s" in shown
    assert "text/s" in shown
    assert "2.00 h, 1 left out" in shown
    assert ", 2 left out" in shown


def test_a_group_with_nothing_to_make_has_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress({"media": 0, "text": 6}, media_unit="clip", shown=True) as progress:
        progress.shard_done(task("text", 6), SimpleNamespace(failures=()))  # type: ignore[arg-type]
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "clip" not in shown
    with Progress({"media": 4, "text": 6}, media_unit="clip", shown=False) as progress:
        progress.shard_done(task("text", 6), SimpleNamespace(failures=()))  # type: ignore[arg-type]
    assert not capsys.readouterr().err


def test_a_build_of_texts_alone_shows_its_bar(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One process starts and loads a tokenizer: 2 s of CPU."""
    build(text_config(tmp_path), Options(progress=True))
    assert f"{len(demo_texts())}/{len(demo_texts())}" in capsys.readouterr().err
