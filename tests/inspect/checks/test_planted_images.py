"""Faults planted in photos and conversations: those are found, and nothing else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forebay.inspect.checks.lint import LintOptions, LintReport, Target, lint
from forebay.steps.recipe import load_config
from tests.inspect.checks.planted import found, linted, of_check, one
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import PhotoCorpus, photo, photo_corpus

DEMO = Path(__file__).parents[3] / "configs" / "demo_vision.toml"


@pytest.fixture
def corpus(tmp_path: Path) -> PhotoCorpus:
    """Four photos with three questions each."""
    (tmp_path / "raw").mkdir()
    return photo_corpus(tmp_path / "raw")


def blank(width: int = 96, height: int = 80) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 200, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def of_cache(corpus: PhotoCorpus, *overrides: str) -> LintReport:
    place = build_here(corpus.config(*overrides)).cache
    return lint([Target(place=place)], [], LintOptions(progress=False))


def plant(corpus: PhotoCorpus) -> None:
    corpus.add_photo("tiny.png", photo(7, width=20, height=90, kind="PNG"))
    corpus.ask("tiny", "tiny.png")
    corpus.add_photo("blank.png", blank())
    corpus.ask("blank", ["p0.jpg", "blank.png"])
    corpus.add_photo("broken.jpg", photo(9)[:900])
    corpus.ask("broken", "broken.jpg")
    corpus.add_photo("words.jpg", b"no image")
    corpus.ask("words", "words.jpg")
    corpus.ask("silence", "p0.jpg", answer=" ")
    corpus.ask("loop", "p0.jpg", answer="a red car and " * 6)
    question: dict[str, Any] = {"role": "user", "content": "What is it?"}
    corpus.rows.append({"id": "no-answer", "image": "p0.jpg", "messages": [question]})
    corpus.rows.append({**corpus.rows[0], "id": "again"})
    corpus.write_manifest()


PLANTED = {
    ("tiny_image", "tiny"),
    ("blank_image", "blank"),
    ("unreadable_image", "broken"),
    ("unreadable_image", "words"),
    ("empty_text", "silence"),
    ("looping_text", "loop"),
    ("duplicate", "again"),
}


@pytest.mark.parametrize("most", [8, pytest.param(44, marks=pytest.mark.wide)])
def test_the_clean_demo_has_no_finding(tmp_path: Path, most: int) -> None:
    overrides = [f"run.cache_root={json.dumps(str(tmp_path))}", f"source.max_samples={most}"]
    report = linted(load_config(DEMO, overrides=overrides))
    assert found(report) == set()
    assert report.sets[0].num_samples == most


def test_every_fault_is_found_and_nothing_else(corpus: PhotoCorpus) -> None:
    assert found(linted(corpus.config())) == set()
    plant(corpus)
    report = linted(corpus.config())
    answers = {pair for pair in found(report) if pair[1] == "no-answer"}
    assert found(report) - answers == PLANTED
    assert len(answers) == 1
    tiny = next(of_check(report, "tiny_image"))
    assert (tiny.value, tiny.limit, tiny.source) == (20, 28, "train.jsonl")
    assert "20 x 90 pixels" in tiny.message


@pytest.mark.parametrize("codec", ["raw", "webp"])
def test_a_cache_tells_all_but_sizes(corpus: PhotoCorpus, codec: str) -> None:
    plant(corpus)
    report = of_cache(corpus, f"vision.codec={codec}")
    missing = {("tiny_image", "tiny"), ("empty_text", "silence")}
    assert {pair for pair in found(report) if pair[1] != "no-answer"} == PLANTED - missing
    assert report.sets[0].left_out.keys() == {"tiny_image"}
    assert report.sets[0].excluded == {"empty_text": 1}


def test_an_image_of_the_other_set_is_told_of(corpus: PhotoCorpus, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    dev = PhotoCorpus(tmp_path / "dev")
    dev.add_photo("same.jpg", photo(2, width=144))
    dev.ask("other", "same.jpg")
    report = linted(corpus.config(), against=(dev.config(),))
    assert found(report) == {("shared_image", f"q2-{turn}") for turn in range(3)}
    dev.rows[0]["question"] = "What of q2-1?"
    dev.write_manifest()
    report = linted(corpus.config(), against=(dev.config(),))
    assert found(report) == {("shared_image", "q2-0"), ("leak", "q2-1"), ("shared_image", "q2-2")}


def test_a_conversation_s_first_bad_image_is_the_reason(corpus: PhotoCorpus) -> None:
    corpus.add_photo("broken.jpg", photo(9)[:900])
    corpus.ask("broken", ["p0.jpg", "broken.jpg"])
    finding = one(linted(corpus.config()))
    assert (finding.check, finding.severity) == ("unreadable_image", "error")
    assert "broken.jpg" in finding.message
