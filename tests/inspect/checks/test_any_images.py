"""Faults planted in images of any processor, their classes and captions: found in raw data and in caches."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import ViTImageProcessorPil

from forebay import load_config
from forebay.config import Config
from forebay.inspect.checks.judge import class_findings
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.lint import LintOptions, LintReport, Target, lint
from forebay.inspect.checks.measured import Classes
from forebay.rows.meanings.image_class import empty_classes
from tests.images.processors import tiny, tiny_corpus
from tests.inspect.checks.planted import found, linted
from tests.inspect.checks.test_planted_images import blank
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import photo
from tests.steps.text.test_caption import clip


def config_of(root: Path, prompt: str, *overrides: str, processor: str = "vit") -> Config:
    text = {"tokenizer": str(root / processor)} if prompt == "plain" else {}
    document: dict[str, Any] = {
        "name": "x",
        "source": {"kind": "folder", "manifest": str(root / "set")},
        "vision": {"processor": str(root / processor)},
        "text": {"prompt": prompt, **text},
        "plan": {"batch_size": 3},
        "run": {"cache_root": str(root / "caches"), "num_workers": 1, "max_failed_share": 1.0},
    }
    return load_config(document, overrides=overrides)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Classes of three photos each, and a processor."""
    for number, name in enumerate(("cat", "cat", "cat", "dog", "dog", "dog")):
        write(tmp_path / "set" / name / f"{number}.jpg", photo(number))
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    return tmp_path


def of_cache(config: Config) -> LintReport:
    return lint([Target(place=build_here(config).cache)], [], LintOptions(progress=False))


def test_faults_of_images_and_classes_are_found_in_raw_data_and_in_a_cache(root: Path) -> None:
    config = config_of(root, "label")
    assert found(linted(config)) == set() == found(of_cache(config))
    write(root / "set" / "cat" / "dark.png", blank())
    write(root / "set" / "cat" / "again.jpg", photo(1))
    write(root / "set" / "cat" / "small.png", photo(9, width=20, height=90, kind="PNG"))
    write(root / "set" / "dog" / "cat.jpg", photo(0))
    write(root / "set" / "dog" / "torn.jpg", photo(8)[:900])
    write(root / "set" / "fox" / "one.jpg", photo(10))
    (root / "set" / "owl" / ".hidden").mkdir(parents=True)
    write(root / "set" / "owl" / ".hidden" / ".a.jpg", photo(11))
    of_both = {
        ("blank_image", "cat/dark"),
        ("duplicate", "cat/again"),
        ("contradiction", "cat/0"),
        ("contradiction", "dog/cat"),
        ("unreadable_image", "dog/torn"),
        ("small_class", "fox/one"),
    }
    raw = linted(config)
    assert found(raw) == {*of_both, ("tiny_image", "cat/small"), ("empty_class", "")}
    text = "\n".join(raw.lines())
    assert "folders of classes without an image, 1: 'owl'" in text
    assert "its class 'fox' has 1 sample, the limit is 2" in text
    assert {each.source for each in raw.findings if each.check == "blank_image"} == {"cat/dark.png"}
    report = of_cache(config)
    assert found(report) == of_both
    assert set(report.sets[0].left_out) == {"tiny_image"}


def test_one_class_for_all_is_said_by_lint_and_by_a_build(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in (root / "set" / "dog").iterdir():
        path.unlink()
    config = config_of(root, "label")
    assert found(linted(config)) == {("single_class", ""), ("empty_class", "")}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        cache = build_here(config)
    assert "1 folder holds no image, so no class has its name: 'dog'" in caplog.text
    assert "all 3 rows have one class, 'cat'" in caplog.text
    assert found(lint([Target(place=cache.cache)], [], LintOptions(progress=False))) == {("single_class", "")}
    assert empty_classes(config_of(root, "label", "source.kind=jsonl").source) == []


def test_classes_that_are_uneven_or_declared_without_samples(root: Path) -> None:
    measured = linted(config_of(root, "label", 'text.classes=["cat","dog","owl"]'))
    assert found(measured) == {("empty_class", "")}
    assert "classes without a sample, 1: 'owl'" in "\n".join(measured.lines())

    class Set:
        name, classes = "x", Classes(names=[["a"]] * 50 + [["b", "a"]] * 2, known=())
        places = np.arange(52)

        def usable(self) -> Any:
            return np.ones(52, bool)

    checks = [each.check for each in class_findings(Set(), Limits())]  # type: ignore[arg-type]
    assert checks == ["uneven_classes"]
    assert not list(class_findings(Set(), Limits(class_ratio=30)))  # type: ignore[arg-type]


def test_captions_are_judged_as_texts(root: Path) -> None:
    clip().save_pretrained(root / "clip")
    said = ["a photo of a cat", "go go go go go", " ", "a photo of a cat " * 40, "кaт on a mat", "two dogs"]
    for path, text in zip(sorted((root / "set").rglob("*.jpg")), said, strict=True):
        path.with_suffix(".txt").write_text(text)
    config = config_of(root, "plain", "text.truncation=true", processor="clip")
    # The text of a space is no text: the listing leaves it out.
    expected = {("looping_text", "cat/1"), ("looping_text", "dog/3"), ("mixed_word", "dog/4")}
    raw = linted(config)
    assert found(raw) >= {*expected, ("cut_text", "dog/3")}
    assert {check for check, _ in found(raw)} <= {"looping_text", "mixed_word", "cut_text", "mixed_scripts"}
    assert raw.sets[0].excluded == {"no_text": 1}
    report = of_cache(config)
    assert found(report) >= expected
    assert "cut_text" in report.sets[0].left_out
    long = linted(config_of(root, "plain", "text.truncation=false", processor="clip"))
    assert ("label_too_long", "dog/3") in found(long)


@pytest.mark.usefixtures(tiny.__name__)
@pytest.mark.parametrize("kind", ["nest", "float", "wide"])
def test_conversations_over_any_processor_are_linted(kind: str, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, kind=kind)
    corpus.add_photo("blank.png", blank())
    corpus.ask("blank", "blank.png")
    corpus.ask("loop", "p0.jpg", answer="a red car and " * 6)
    corpus.rows.append({**corpus.rows[0], "id": "again"})
    corpus.write_manifest()
    config = corpus.config()
    wanted = {("blank_image", "blank"), ("looping_text", "loop"), ("duplicate", "again")}
    assert found(linted(config)) == wanted
    report = of_cache(config)
    assert found(report) == wanted
    assert ("its images are floats" in "\n".join(report.lines())) == (kind == "float")
    assert json.dumps(report.to_json())
