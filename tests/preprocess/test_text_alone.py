"""A cache of texts without audio: built by the same pipeline, with nothing of audio in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forebay.config.recipe import recipe_of
from forebay.preprocess import Options, build
from forebay.preprocess.estimate import estimate_bytes
from forebay.preprocess.listing import resolve
from forebay.preprocess.pipeline import BuildReport
from forebay.preprocess.probe import media_probe
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import find_cache
from forebay.store.memo import Memo
from forebay.store.verify import verify_folder
from tests.preprocess.corpus import json_lines
from tests.text_corpus import demo_texts, text_config


def make(folder: Path, *overrides: str, rows: list[dict[str, str]] | None = None) -> tuple[BuildReport, Cache]:
    report = build(text_config(folder, *overrides, rows=rows), Options(progress=False))
    return report, open_cache(report.cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


def test_a_build_stores_the_texts_and_nothing_of_audio(folder: Path) -> None:
    report, cache = make(folder)
    texts = demo_texts()
    assert (report.num_samples, report.shards_written, report.failed) == (len(texts), 6, {})
    assert list(cache.fields) == ["sample_id", "input_ids", "prefix_len", "text", "language", "prompt", "source"]
    assert cache.metadata["recipe"]["audio"] is None
    assert {name: int(values.max()) for name, values in cache.lengths.items() if name != "num_tokens"} == {
        "num_samples": 0,
        "num_frames": 0,
    }
    rows = cache.samples
    assert "duration_s" not in rows.column_names
    assert "num_samples" not in rows.column_names
    for name, column in (("id", "sample_id"), ("text", "text"), ("language", "language")):
        assert rows[column].to_pylist() == [row[name] for row in texts]
    for index in range(len(cache)):
        sample = cache.read(index)
        assert sample.keys() == {"input_ids", "prefix_len"}
        assert len(sample["input_ids"]) == cache.lengths["num_tokens"][index]
        assert sample["input_ids"][-1] == cache.constants["eos_token_id"]
    assert verify_folder(Path(report.cache)).ok


def test_a_second_build_does_nothing_and_an_edited_text_makes_one_text_shard(folder: Path, tmp_path: Path) -> None:
    report, _ = make(folder)
    again, _ = make(folder)
    assert again.already_sealed
    assert again.key == report.key
    shutil.copytree(folder, tmp_path / "copy")
    texts = demo_texts()
    texts[30]["text"] += " indeed"
    edited, cache = make(tmp_path / "copy", rows=texts)
    assert (edited.shards_written, edited.shards_linked) == (1, 5)
    assert edited.key != report.key
    assert cache.samples["text"][30].as_py().endswith(" indeed")


def test_a_text_that_cannot_be_used_is_counted(tmp_path: Path) -> None:
    texts = [
        {"id": "good", "text": "a word"},
        {"id": "empty", "text": " "},
        {"id": "unseen", "text": "\u200b\ufeff"},
        {"id": "long", "text": "many words " * 20},
    ]
    report, cache = make(tmp_path, "text.max_label_tokens=20", rows=texts)
    assert (report.num_samples, report.excluded) == (1, {"empty_text": 2, "label_too_long": 1})
    assert [row["sample_id"] for row in json_lines(Path(report.cache) / "rejected.jsonl")] == [
        "empty",
        "unseen",
        "long",
    ]
    assert cache.metadata["languages"] == {"unknown": {"samples": 1, "hours": 0.0}}


def test_a_manifest_taken_away_and_a_changed_one(folder: Path, tmp_path: Path) -> None:
    make(folder)
    shutil.copytree(folder, tmp_path / "copy")
    config = text_config(tmp_path / "copy")
    assert find_cache(config).state == "same"
    (tmp_path / "copy" / "texts.jsonl").unlink()
    assert find_cache(config).state == "absent"
    text_config(tmp_path / "copy", rows=demo_texts()[:9])
    assert find_cache(config).state == "changed"


def test_the_estimate_and_the_probe_read_no_audio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("audio was decoded")

    monkeypatch.setattr("forebay.preprocess.samples.decode_audio", refuse)
    config = text_config(folder)
    assert len(media_probe(recipe_of(config))) == 32

    class Here:
        map = staticmethod(lambda function, items: list(map(function, items)))

    listing = resolve(config, Memo(config.cache_root), Here())
    _, cache = make(folder)
    assert 0.2 < estimate_bytes(recipe_of(config), listing.rows) / cache.metadata["size_bytes"] < 5
