from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.config import BucketConfig, PlanConfig
from forebay.inspect.facts import plans_of
from forebay.plan.make import kept_plan, samples_of
from forebay.plan.names import plan_folder
from forebay.store.cache import Cache, open_cache
from forebay.store.metadata import checksum
from tests.store.trees import flip
from tests.store_factory import make_cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(make_cache(tmp_path, num_samples=9))


def save(root: Path, cache: Cache, settings: PlanConfig) -> Path:
    """Saves the plan of a cache as training does."""
    name: dict[str, Any] = {"cache_key": cache.key, "settings": settings}
    _, folder = kept_plan(plan_folder(root, dataset="prompts", split="train", **name), samples_of(cache), **name)
    assert folder is not None
    return folder


def test_plans_are_those_that_training_saved(tmp_path: Path, cache: Cache) -> None:
    folders = [save(tmp_path, cache, BucketConfig(edges_s=(1.0, 2.0), batch_size=size)) for size in (2, 3)]
    found = {plan["folder"]: plan for plan in plans_of(cache.key, [tmp_path])}
    assert sorted(found) == sorted(map(str, folders))
    for folder, size in zip(folders, (2, 3), strict=True):
        metadata = json.loads((folder / "metadata.json").read_text())
        plan = found[str(folder)]
        assert plan["statistics"] == json.loads((folder / "packing_stats.json").read_text())
        assert plan["settings"]["batch_size"] == size
        figures = [plan[name] for name in ("key", "kind", "num_batches", "padding")]
        assert figures == [metadata[name] for name in ("plan_key", "kind", "num_batches", "padding")]


def test_plans_of_other_caches_are_left_out(tmp_path: Path, cache: Cache) -> None:
    other = open_cache(make_cache(tmp_path, num_samples=9, seed=1))
    save(tmp_path, other, BucketConfig(batch_size=2))
    assert plans_of(cache.key, [tmp_path]) == []
    assert plans_of(cache.key, [tmp_path / "nowhere"]) == []


def test_a_plan_under_two_roots_is_listed_once(tmp_path: Path, cache: Cache) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, cache, BucketConfig(batch_size=2))
    assert len(plans_of(cache.key, [tmp_path / "a", tmp_path / "b"])) == 1


@pytest.mark.parametrize("name", ["metadata.json", "packing_stats.json"])
def test_a_damaged_plan_is_left_out_by_name(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = save(tmp_path, cache, BucketConfig(batch_size=2))
    whole = save(tmp_path, cache, BucketConfig(batch_size=3))
    flip(folder / name, (folder / name).read_bytes().index(b"padding"))
    assert [plan["folder"] for plan in plans_of(cache.key, [tmp_path])] == [str(whole)]
    assert f"leaving out a plan: {folder / name}" in caplog.text
    assert "stored" in caplog.text
    assert "run: forebay preprocess CONFIG" in caplog.text


@pytest.mark.parametrize("content", ["[]", "{", '{"format_version": 1}', '{"format_version": 1, "checksum": NaN}'])
def test_what_is_no_plan_is_left_out(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / "plans" / "x").mkdir(parents=True)
    (tmp_path / "plans" / "x" / "metadata.json").write_text(content)
    assert plans_of(cache.key, [tmp_path]) == []
    assert "leaving out a plan" in caplog.text


def test_a_plan_without_its_parts_is_left_out(tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path, cache, BucketConfig(batch_size=2))
    document = json.loads((folder / "metadata.json").read_text())
    del document["plan_key"]
    (folder / "metadata.json").write_text(json.dumps({**document, "checksum": checksum(document)}))
    assert plans_of(cache.key, [tmp_path]) == []
    assert "is none that forebay writes: it has no plan_key" in caplog.text


def test_a_newer_plan_is_left_out_by_its_version(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path, cache, BucketConfig(batch_size=2))
    document = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps({**document, "format_version": 3}))
    assert plans_of(cache.key, [tmp_path]) == []
    assert "format_version differs (3 stored, 2 is the newest that this forebay reads)" in caplog.text


def test_reading_changes_nothing(tmp_path: Path, cache: Cache) -> None:
    folder = save(tmp_path, cache, BucketConfig(batch_size=2))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    assert len(plans_of(cache.key, [tmp_path])) == 1
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before
