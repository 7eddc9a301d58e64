"""Detected languages: stored beside the manifest's, used by prompts, filters and mixtures, equal uncached, shown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forebay.config import Config
from forebay.errors import ConfigError
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.steps.recipe import Recipe, load_config, recipe_of
from forebay.steps.text.transcript import DETECTED_FIELDS, Transcript
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import FORMAT_VERSION
from forebay.train.select import make_loader, select
from tests.commands import inspect
from tests.preprocess.here_pool import build_here
from tests.processes import ROOT
from tests.text_corpus import text_config

NAMES = [field.name for field in DETECTED_FIELDS]
LANGUAGES = 'text.languages=["de", "en", "fr", "hi"]'
ROWS = [
    {"id": "right", "text": "The window of the house is open.", "language": "en"},
    {"id": "named", "text": "Das Fenster des Hauses steht offen.", "language": "German"},
    {"id": "wrong", "text": "La fenêtre de la maison est ouverte.", "language": "en-US"},
    {"id": "again", "text": "La fenêtre de la maison est ouverte."},
    {"id": "hindi", "text": "घर की खिड़की खुली है।"},
    {"id": "digits", "text": "1 2 3", "language": "en"},
    {"id": "nothing", "text": "1 2 3"},
    {"id": "mixed", "text": "खिड़की Windows"},
    {"id": "empty", "text": " "},
]
SAID = ["en", "de", "fr", "fr", "hi", "", "", "hi"]
EFFECTIVE = ["en", "de", "fr", "fr", "hi", "en", "", "hi"]
MANIFEST = ["en", "German", "en-US", "", "", "en", "", ""]


def config_of(folder: Path, mode: str, *overrides: str) -> Config:
    own = [f'text.language="{mode}"', LANGUAGES] if mode != "manifest" else []
    return text_config(folder, *own, *overrides, rows=ROWS)


def built(config: Config) -> Cache:
    return open_cache(build_here(config).cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def cache(folder: Path) -> Cache:
    return built(config_of(folder, "detect"))


def columns(source: Any, *names: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = source.table(names).to_pydict()
    return found


def test_rows_have_what_was_detected_and_what_was_stated(cache: Cache) -> None:
    found = columns(cache, "language", *NAMES)
    assert found["language"] == EFFECTIVE
    assert found["language_detected"] == SAID
    assert found["language_manifest"] == MANIFEST
    assert all(
        (confidence > 0.5) == bool(said) for confidence, said in zip(found["language_confidence"], SAID, strict=True)
    )
    assert found["language_confidence"][2] == found["language_confidence"][3]
    assert {name: entry["samples"] for name, entry in cache.metadata["languages"].items()} == {
        **{"de": 1, "en": 2, "fr": 2, "hi": 2},
        "unknown": 1,
    }
    assert cache.metadata["format_version"] == FORMAT_VERSION


def test_only_rows_without_a_language_are_asked(folder: Path) -> None:
    found = columns(built(config_of(folder, "detect_missing")), "language", *NAMES)
    assert found["language"] == ["en", "German", "en-US", "fr", "hi", "en", "", "hi"]
    assert found["language_detected"] == ["", "", "", "fr", "hi", "", "", "hi"]
    assert found["language_manifest"] == MANIFEST


def test_the_manifest_alone_changes_nothing(folder: Path) -> None:
    cache = built(config_of(folder, "manifest"))
    assert not set(NAMES) & set(cache.column_names)
    assert columns(cache, "language")["language"] == MANIFEST
    assert cache.metadata["recipe"]["text"].keys() == {
        *("tokenizer", "prompt", "language_tag_mode", "normalize", "max_label_tokens", "version")
    }


def test_below_the_confidence_the_manifest_stays(folder: Path) -> None:
    found = columns(built(config_of(folder, "detect", "text.min_confidence=0.6")), "language", *NAMES)
    assert found["language"] == [*EFFECTIVE[:-1], ""]
    assert found["language_detected"] == [*SAID[:-1], ""]
    # Three letters of three bytes in 16, and what the model says of Hindi among all languages of the script.
    assert found["language_confidence"][-1] == 0.5074


def test_uncached_rows_are_those_of_the_cache(folder: Path, cache: Cache) -> None:
    for mode in ("detect", "detect_missing"):
        stored = built(config_of(folder, mode))
        online = select(config_of(folder, mode, 'loader.cache="off"'))
        assert online.fields == stored.fields
        assert online.table(stored.column_names).to_pydict() == stored.table().to_pydict()
        for name in ("language", *NAMES):
            (ours, mine), (theirs, yours) = online.categories(name), stored.categories(name)  # type: ignore[misc]
            assert (ours, mine.tolist()) == (theirs, yours.tolist())
        for index in range(len(stored)):
            assert online.read(index)["input_ids"].tolist() == stored[index]["input_ids"].tolist()


def test_filters_and_mixtures_see_what_was_detected(folder: Path, cache: Cache) -> None:
    where = "filter.where=\"language_detected == 'fr' and language_confidence > 0.9 and language_manifest != 'fr'\""
    for loader in (
        make_loader(config_of(folder, "detect", where, over)) for over in ("loader.seed=1", 'loader.cache="off"')
    ):
        assert len(loader.source) == 2
        assert {loader.source.sample_id(i) for i in range(2)} == {"wrong", "again"}
    weights = "mixture.weights={fr = 2.0, de = 1.0, en = 1.0, hi = 1.0, unknown = 1.0}"
    plan = make_loader(config_of(folder, "detect", 'mixture.column="language_detected"', weights)).plan
    assert isinstance(plan, MixturePlan)


def test_prompts_are_written_in_the_detected_language() -> None:
    overrides = ['text.language="detect"', 'text.languages=["en", "fr"]']
    recipe = recipe_of(load_config(ROOT / "configs" / "demo_speech.toml", overrides=overrides))
    assert isinstance(recipe.text.step, Transcript)
    encoder = recipe.text.step.opened(ROOT / "demo" / "speech" / "model")
    text = "La fenêtre de la maison est ouverte."
    wrong, none = (encoder.encode(text, language, None, sample_id="a")["input_ids"] for language in ("en", None))
    stated = recipe_of(load_config(ROOT / "configs" / "demo_speech.toml"))
    assert isinstance(stated, Recipe)
    assert isinstance(stated.text.step, Transcript)
    plain = stated.text.step.opened(ROOT / "demo" / "speech" / "model")
    right = plain.encode(text, "fr", None, sample_id="a")["input_ids"]
    assert wrong.tolist() == none.tolist() == right.tolist()


def test_modes_have_keys_of_their_own(folder: Path) -> None:
    keys = Counter(recipe_of(config_of(folder, mode)).key for mode in ("manifest", "detect", "detect_missing"))
    assert set(keys.values()) == {1}
    other = recipe_of(config_of(folder, "detect", 'text.languages=["hi", "fr", "en", "de"]'))
    assert other.key in keys


def test_columns_that_would_be_written_twice_are_refused(folder: Path) -> None:
    keep = 'source.keep_columns=["language_detected"]'
    with pytest.raises(ConfigError, match=r'keep_columns has language_detected, and text\.language = "detect" writes'):
        recipe_of(config_of(folder, "detect", keep))
    assert recipe_of(config_of(folder, "manifest", keep)).key


def test_inspect_counts_and_names_disagreements(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = inspect(capsys, cache.folder)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["detected", "samples", "confidence"] in lines
    assert [line[:2] for line in lines if line[:1] == ["fr"]] == [["fr", "2"], ["fr", "2"]]
    assert "1 keep the manifest's language: nothing was said of them" in out
    assert "1 have no language: nothing was said, and the manifest has none" in out
    assert "1 detected languages are not the manifest's" in out
    assert ["en-US", "fr", "1", "wrong"] in lines
    code, out, err = inspect(capsys, cache.folder, "--json")
    found = json.loads(out)["detection"]
    assert [(entry["language"], entry["samples"]) for entry in found["languages"]] == [
        *[("fr", 2), ("hi", 2), ("de", 1), ("en", 1)]
    ]
    assert all(0.5 < entry["confidence"] <= 1 for entry in found["languages"])
    assert (found["unsaid"], found["unknown"], found["num_disagreements"]) == (1, 1, 1)
    assert found["disagreements"] == [{"manifest": "en-US", "detected": "fr", "samples": 1, "ids": ["wrong"]}]


def test_inspect_of_a_cache_without_detection_has_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = built(config_of(folder, "manifest"))
    code, out, _ = inspect(capsys, cache.folder, "--json")
    assert (code, json.loads(out)["detection"]) == (0, None)


def test_the_page_shows_what_inspect_prints(cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    code, _, err = inspect(capsys, cache.folder, "--html", str(page))
    assert (code, err) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "Detected languages" in text
    assert "en-US, detected fr" in text


def test_a_stranger_s_language_is_shown_and_moves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": "odd\x1b[2J", "text": "The window of the house is open.", "language": "<b>\x1b[1mx"}]
    cache = built(text_config(tmp_path, 'text.language="detect"', LANGUAGES, rows=rows))
    _, out, _ = inspect(capsys, cache.folder)
    assert "\x1b" not in out
    assert "1 detected languages are not the manifest's" in out
    _, out, _ = inspect(capsys, cache.folder, "--html", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "\x1b" not in page
    assert "<b>" not in page


def test_where_shards_begin_changes_nothing_that_is_said(tmp_path: Path) -> None:
    lines = (ROOT / "demo" / "text" / "sentences.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:40]]
    tables = [
        built(
            text_config(
                tmp_path,
                'text.language="detect"',
                f"layout.rows_per_shard={count}",
                f'run.cache_root="{tmp_path}/{count}"',
                rows=rows,
            )
        ).table(["sample_id", "language", *NAMES])
        for count in (1, 2, 512)
    ]
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])
    assert tables[0]["language"].to_pylist() == [row["id"][:2] for row in rows]
