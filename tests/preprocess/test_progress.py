"""The bar of a build shows what is made: clips or images, else texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from forebay.preprocess.pipeline import build
from forebay.preprocess.report import Options
from forebay.preprocess.shard_task import Progress
from forebay.visible import visible_output
from tests.text_corpus import demo_texts, text_config


def task(group: str, rows: int) -> Any:
    return SimpleNamespace(group=group, rows=pa.table({"duration_s": [1800.0] * rows}))


def test_beside_media_texts_show_by_their_failures_alone(capsys: pytest.CaptureFixture[str]) -> None:
    receipt: Any = SimpleNamespace(failures=("one",))
    with (
        visible_output(),
        Progress({"media": 4, "text": 6}, media_unit="clip", shown=True) as progress,
    ):
        progress.shard_done(task("text", 6), receipt)
        progress.shard_done(task("media", 4), receipt)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "clip/s" in shown
    assert "2.00 h, 2 left out" in shown
    assert "x1b" not in shown  # tqdm moves the cursor where there are two bars, and commands escape that


def test_where_only_texts_are_made_they_have_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
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
