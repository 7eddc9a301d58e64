"""A cache of texts without audio: built by the same pipeline, with nothing of audio in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.listing import resolve
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import find_cache
from forebay.store.memo import Memo
from forebay.store.seal import verify_folder
from tests.preprocess.corpus import json_lines, shard_bytes
from tests.preprocess.here_pool import build_here
from tests.text_corpus import demo_texts, text_config


def make(folder: Path, *overrides: str, rows: list[dict[str, str]] | None = None) -> tuple[BuildReport, Cache]:
    report = build_here(text_config(folder, *overrides, rows=rows))
    return report, open_cache(report.cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


def test_a_build_stores_the_texts_and_nothing_of_audio(folder: Path) -> None:
    report, cache = make(folder)
    texts = demo_texts()
    assert (report.num_samples, report.shards_written, report.failed) == (len(texts), 4, {})
    assert list(cache.fields) == ["input_ids", "prefix_len", "sample_id", "text", "language", "prompt", "source"]
    assert "audio" not in cache.metadata["recipe"]
    assert list(cache.lengths) == ["num_tokens"]
    rows = cache.samples
    assert "duration_s" not in rows.column_names
    assert "num_audio_samples" not in rows.column_names
    for name, column in (("id", "sample_id"), ("text", "text"), ("language", "language")):
        assert rows[column].to_pylist() == [row[name] for row in texts]
    for index in range(len(cache)):
        sample = cache.read(index)
        assert sample.keys() == {"input_ids", "prefix_len"}
        assert len(sample["input_ids"]) == cache.lengths["num_tokens"][index]
        assert sample["input_ids"][-1] == cache.constants["eos_token_id"]
    assert verify_folder(Path(report.cache)).ok
    assert sorted(path.name for path in Path(report.cache).rglob("*.tdz")) == [f"{i:05d}.tdz" for i in range(4)]
    assert not (Path(report.cache) / "audio").exists()
    assert (cache.groups, cache.metadata["probe"].keys()) == (("text",), {"text"})
    assert cache.metadata["rows_per_shard"] == 16


def test_a_second_build_does_nothing_and_an_edited_text_makes_one_text_shard(folder: Path, tmp_path: Path) -> None:
    report, _ = make(folder)
    again, _ = make(folder)
    assert again.already_sealed
    assert again.key == report.key
    shutil.copytree(folder, tmp_path / "copy")
    texts = demo_texts()
    texts[30]["text"] += " indeed"
    edited, cache = make(tmp_path / "copy", rows=texts)
    assert (edited.shards_written, edited.shards_linked) == (1, 3)
    assert edited.key != report.key
    assert cache.samples["text"][30].as_py().endswith(" indeed")


class Backwards(HerePool):
    """Does what it is given in the other order, as workers of different speed may."""

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        yield from HerePool.run(self, function, reversed(list(tasks)))


def test_shards_do_not_depend_on_who_made_which_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = shard_bytes(Path(make(folder)[0].cache))
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", Backwards)
    report = build(text_config(tmp_path), Options(progress=False))
    assert shard_bytes(Path(report.cache)) == wanted


@pytest.mark.wide
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_shards_do_not_depend_on_the_number_of_workers(folder: Path, tmp_path: Path, num_workers: int) -> None:
    wanted = shard_bytes(Path(make(folder)[0].cache))
    report = build(text_config(tmp_path, f"run.num_workers={num_workers}"), Options(progress=False))
    assert shard_bytes(Path(report.cache)) == wanted
    assert report.shards_written == len(wanted)


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
    assert find_cache(config, recipe_of(config)).state == "same"
    (tmp_path / "copy" / "texts.jsonl").unlink()
    assert find_cache(config, recipe_of(config)).state == "absent"
    text_config(tmp_path / "copy", rows=demo_texts()[:9])
    assert find_cache(config, recipe_of(config)).state == "changed"


def test_the_estimate_and_the_probe_read_no_audio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("audio was decoded")

    monkeypatch.setattr("forebay.preprocess.audio_group.decode_audio", refuse)
    config = text_config(folder)
    recipe = recipe_of(config)
    listing = resolve(config, Memo(config.cache_root), map, recipe=recipe)
    assert listing.groups.names == ("text",)
    assert len(listing.groups.probe("text")) == 32
    _, cache = make(folder)
    assert 0.2 < listing.groups.estimate_bytes(listing) / cache.metadata["size_bytes"] < 5


def test_texts_that_are_added_make_the_last_shard_and_no_other(folder: Path, tmp_path: Path) -> None:
    make(folder)
    shutil.copytree(folder, tmp_path / "copy")
    more = [{"id": f"new-{number}", "text": f"one more text {number}"} for number in range(3)]
    report, cache = make(tmp_path / "copy", rows=[*demo_texts(), *more])
    assert (report.shards_written, report.shards_linked) == (1, 3)
    assert [cache.sample_id(index) for index in range(-3, 0)] == ["new-0", "new-1", "new-2"]


def test_parts_of_a_build_of_texts_make_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make(folder)
    config = text_config(tmp_path, rows=demo_texts())
    first = build_here(config, part=(0, 2))
    assert (first.shards_written, first.sealed) == (2, False)
    second = build_here(config, part=(1, 2))
    assert (second.shards_written, second.sealed) == (2, True)
    assert shard_bytes(Path(second.cache)) == shard_bytes(Path(make(folder)[0].cache))


def test_a_damaged_shard_of_texts_is_made_again(folder: Path, tmp_path: Path) -> None:
    report, _ = make(folder)
    shutil.copytree(folder, tmp_path / "copy")
    config = text_config(tmp_path / "copy")
    damaged = next((tmp_path / "copy" / "caches").rglob("00002.tdz"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.unlink()  # the copy is a file of its own already; the old bytes are not written through
    damaged.write_bytes(data)
    mended = build_here(config, verify=True)
    assert (mended.shards_written, mended.shards_linked, mended.key) == (1, 3, report.key)
    assert verify_folder(Path(mended.cache)).ok
