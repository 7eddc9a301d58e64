"""Several caches as one: what it holds, what it links, what it says, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import CacheCorruptError, CacheMismatchError, ConfigError
from forebay.preprocess.combine import ManyReport
from forebay.preprocess.merge import merge, subset
from forebay.store.cache import Cache, open_cache
from forebay.store.files import hash_file
from forebay.store.metadata import read_metadata, write_metadata
from forebay.store.seal import verify_folder
from tests.flat_constants import flat
from tests.preprocess.many.oracle import contents, held, languages_of, small_cache, write_ids
from tests.store.faults import Faults
from tests.store.trees import flip, tree
from tests.store_factory import RATE_HZ


@pytest.fixture
def two(tmp_path: Path) -> list[Cache]:
    return [small_cache(tmp_path, "a", num_samples=5), small_cache(tmp_path, "b", num_samples=4, seed=1)]


def merged(caches: Sequence[Cache], out: str = "all", **options: Any) -> tuple[ManyReport, Cache]:
    report = merge([str(cache.folder) for cache in caches], out, **options)
    return report, open_cache(report.cache)


@settings(max_examples=10)
@given(st.data())
def test_a_merge_holds_the_samples_of_all_in_the_order_of_the_caches(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, caches = Path(place), []
        for number in range(data.draw(st.integers(2, 3))):
            num_samples = data.draw(st.integers(1, 6))
            failed = sorted(data.draw(st.sets(st.integers(0, num_samples), max_size=2)))
            shape = {"failed_rows": failed, "rows_per_shard": data.draw(st.integers(1, 3))}
            caches.append(small_cache(folder, f"c{number}", num_samples=num_samples, seed=number, **shape))
        report, made = merged(caches, str(folder / "all"))
        wanted = [row for cache in caches for row in held(cache)]
        assert held(made) == wanted
        assert verify_folder(made.folder).problems == []
        assert made.metadata["languages"] == languages_of(wanted, rate_hz=RATE_HZ)
        failures = sum(cache.metadata["failed"].get("corrupt_audio", 0) for cache in caches)
        assert sum(made.metadata["failed"].values()) == failures
        lines = [line for cache in caches for line in (cache.folder / "rejected.jsonl").read_text().splitlines()]
        assert (made.folder / "rejected.jsonl").read_text().splitlines() == lines
        used = sum(len(np.unique(cache.slots >> 32)) for cache in caches)
        assert (made.num_shards, report.shards_linked, report.shards_copied) == (used, 2 * used, 0)
        assert report.key == made.key
        assert made.metadata["recipe"]["merged"] == {"of": [cache.key for cache in caches]}
        _, again = merged(caches, str(folder / "again"))
        assert contents(again.folder) == contents(made.folder)
        _, turned = merged(caches[::-1], str(folder / "turned"))
        assert turned.key != made.key
        assert held(turned) == [row for cache in caches[::-1] for row in held(cache)]


def test_parts_of_one_cache_link_its_shards_once(tmp_path: Path) -> None:
    cache = small_cache(tmp_path, "clips", num_samples=9, failed_rows=[2])
    languages = {"en": "english", "es": "spanish", "": "other"}
    parts = [
        open_cache(subset(str(cache.folder), name, where=f"language == '{code}'").cache)
        for code, name in languages.items()
    ]
    assert all(part.num_shards > 1 for part in parts)
    report, made = merged(parts)
    assert made.num_shards == cache.num_shards
    assert report.size_bytes == cache.metadata["size_bytes"]
    wanted = [row for code in languages for row in held(cache) if row["language"] == code]
    assert held(made) == wanted
    assert made.metadata["languages"] == languages_of(wanted, rate_hz=RATE_HZ)
    assert verify_folder(made.folder).ok


def test_a_merge_of_merges_and_a_subset_of_a_merge(two: list[Cache], tmp_path: Path) -> None:
    _, both = merged(two, "both")
    other = small_cache(tmp_path, "c", seed=2)
    _, three = merged([both, other], "three")
    assert held(three) == [row for cache in (*two, other) for row in held(cache)]
    few = open_cache(subset(str(three.folder), "few", where="language == 'en'").cache)
    assert held(few) == [row for row in held(three) if row["language"] == "en"]
    assert [origin["key"] for origin in three.metadata["made_of"][0]["made_of"]] == [cache.key for cache in two]
    assert set(few.metadata["recipe"]) == {"source", "audio", "text", "subset"}


def test_ids_that_two_caches_have_are_refused_and_named(two: list[Cache], tmp_path: Path) -> None:
    ids = ["a-3", "new-1", "b-0", "a-4"]
    third = small_cache(tmp_path, "c", num_samples=4, seed=2, sample_ids=ids)
    with pytest.raises(
        CacheMismatchError,
        match=r"3 sample ids are in two of the caches: 'a-3' of .*/a/.* and .*/c/.*; 'b-0' of .*/b/.* and .*/c/.*"
        "--on-duplicate keep-first",
    ):
        merged([*two, third])
    report, made = merged([*two, third], on_duplicate="keep-first")
    assert report.duplicates == 3
    assert held(made) == [*held(two[0]), *held(two[1]), held(third)[1]]
    assert [origin["taken"] for origin in made.metadata["made_of"]] == [5, 4, 1]
    assert made.metadata["recipe"]["merged"]["on_duplicate"] == "keep-first"
    # Where there is nothing to keep, the choice changes nothing.
    assert merged(two, "x")[0].key == merged(two, "y", on_duplicate="keep-first")[0].key


def test_a_cache_and_its_subset_have_ids_in_common(two: list[Cache], tmp_path: Path) -> None:
    ids = write_ids(tmp_path / "ids", ["a-1", "a-2"])
    some = open_cache(subset(str(two[0].folder), "some", ids=ids).cache)
    with pytest.raises(CacheMismatchError, match="2 sample ids are in two"):
        merged([two[0], some])
    report, made = merged([some, two[0]], on_duplicate="keep-first")
    assert sorted(row["sample_id"] for row in held(made)) == [row["sample_id"] for row in held(two[0])]
    assert (report.duplicates, made.num_shards) == (2, two[0].num_shards)


_ADVICE = r"build both with one setting and one forebay, then merge: forebay preprocess CONFIG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "1" * 64}, r"text\.tokenizer is '0{16}' in the first and '1{16}' in the second"),
        ({"features": "log_mel"}, r"audio\.features is 'waveform' in the first and 'log_mel' in the second"),
        ({"tokenizer": None}, r"text is \{.* in the first and None in the second"),
        ({"metadata": {"probe": {"audio": "0" * 32, "text": "f" * 32}}}, r"probe\.text is '0{16}' .* 'f{16}'"),
        (
            {"metadata": {"constants": flat(features="waveform", sample_rate_hz=8_000).to_json()}},
            r"constants\.prompt is 'plain'",
        ),
    ],
)
def test_caches_of_two_recipes_are_refused_with_the_field(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    first, other = small_cache(tmp_path, "a"), small_cache(tmp_path, "b", seed=1, **options)
    with pytest.raises(CacheMismatchError, match=rf"cannot merge .*/a/.* and .*/b/.*: {message}.*{_ADVICE}"):
        merged([first, other])
    assert not (first.folder.parent / "all").exists()


def test_selections_and_layouts_may_differ(tmp_path: Path) -> None:
    first = small_cache(tmp_path, "a")
    recipe = {**first.metadata["recipe"], "source": {"kind": "tar", "split": "dev", "languages": ["ru"]}}
    said = {"name": "other", "split": "dev", "recipe": recipe, "unused_fields": {"snr": 3}}
    other = small_cache(tmp_path, "b", seed=1, rows_per_shard=2, metadata=said)
    _, made = merged([first, other])
    assert made.metadata["recipe"]["source"] == {"kind": "tar"}
    assert [origin["source"]["split"] for origin in made.metadata["made_of"]] == ["train", "dev"]
    names = ("name", "split", "rows_per_shard", "unused_fields")
    assert [made.metadata[name] for name in names] == ["prompts+other", "train+dev", 3, {"snr": 3}]


def test_fewer_than_two_caches_and_one_named_twice_are_refused(two: list[Cache], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a merge is of two caches or more"):
        merged(two[:1])
    with pytest.raises(ConfigError, match=f"have one key, {two[0].key[:16]}: name it once"):
        merged([*two, two[0]])
    with pytest.raises(ConfigError, match=r"s3://b/c lies in a store.*then forebay cache merge DIR"):
        merge([str(two[0].folder), "s3://b/c"], "all")


def test_a_cache_without_samples_adds_nothing(two: list[Cache], tmp_path: Path) -> None:
    empty = small_cache(tmp_path, "none", num_samples=0, failed_rows=[0, 1], seed=3)
    _, made = merged([empty, two[0]])
    assert held(made) == held(two[0])
    assert made.metadata["failed"] == {"corrupt_audio": 2}
    other = small_cache(tmp_path, "nought", num_samples=0, failed_rows=[0], seed=4)
    with pytest.raises(ConfigError, match="no cache has a sample"):
        merged([empty, other], "nothing")


def test_damage_is_found_before_anything_is_linked(two: list[Cache]) -> None:
    path = two[1].folder / "text" / "00000.tdz"
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CacheCorruptError, match=r"/b/.*text/00000\.tdz: stored xxh3-128"):
        merged(two)
    shutil.copy(two[0].folder / "rejected.jsonl", two[0].folder / "rejected.kept")
    (two[0].folder / "rejected.kept").rename(two[0].folder / "rejected.jsonl")
    with (two[0].folder / "rejected.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(CacheCorruptError, match=r"rejected\.jsonl has 3 bytes"):
        merged(two)


def test_a_crash_at_any_step_leaves_a_whole_cache_or_none(tmp_path: Path) -> None:
    caches = [small_cache(tmp_path, name, num_samples=1, seed=seed) for seed, name in enumerate("ab")]
    root = caches[0].folder.parent
    before = tree(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        calls = Faults(patch).seen
        merged(caches, str(root / "done"))
    shutil.rmtree(root / "done")
    assert "rename" in calls[-3:]
    for step in range(0, len(calls) - 1, 2):
        if calls[step] in ("link", "mkdir"):  # a link that is refused is a copy; folders may be there
            continue
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, fail_at=step, code=errno.ENOSPC)
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                merged(caches, str(root / "all"))
        assert not (root / "all").exists()
        assert {name: entry[:2] for name, entry in tree(tmp_path).items()} == {n: e[:2] for n, e in before.items()}
    assert verify_folder(Path(merged(caches, str(root / "all"))[0].cache)).ok


def test_of_several_at_once_one_seals_and_none_fails(two: list[Cache]) -> None:
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(lambda _: merged(two)[0], range(4)))
    assert sorted(report.already_there for report in reports)[0] is False
    assert len({report.key for report in reports}) == 1
    assert verify_folder(Path(reports[0].cache)).ok
    assert not list(Path(reports[0].cache).parent.glob("*.tmp-*"))


def test_a_merge_that_was_killed_is_swept(two: list[Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    left = two[0].folder.parent / "all.tmp-00000000-1-00000000"
    monkeypatch.setattr("forebay.store.files.this_place", lambda: "00000000")
    monkeypatch.setattr("forebay.store.files.is_running", lambda _: False)
    left.mkdir()
    merged(two)
    assert not left.exists()


def test_a_foreign_list_of_rows_is_refused(tmp_path: Path) -> None:
    cache = small_cache(tmp_path, "a")
    (cache.folder / "rejected.jsonl").write_text('{"sample_id": 3}\n')

    document = read_metadata(cache.folder)
    path = cache.folder / "rejected.jsonl"
    document["files"]["rejected.jsonl"] = {"size_bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
    write_metadata(cache.folder, {name: value for name, value in document.items() if name != "checksum"})
    with pytest.raises(CacheCorruptError, match=r"its metadata\.json is none that forebay writes"):
        merged([open_cache(cache.folder), small_cache(tmp_path, "b", seed=1)])
    assert json.loads(path.read_text()) == {"sample_id": 3}
