"""Some samples of a cache as a cache of its own: what it holds, what it links, what it says, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import CacheCorruptError, CacheMismatchError, CacheNotFoundError, ConfigError
from forebay.inspect.facts import cache_facts
from forebay.inspect.inspect_lines import report_lines
from forebay.preprocess.combine import ManyReport
from forebay.preprocess.merge import subset
from forebay.store.by_hand import read_ids
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import FIELDS
from forebay.store.lookup import sealed_caches
from forebay.store.metadata import read_metadata, write_metadata
from forebay.store.seal import verify_folder
from forebay.store.shard import shard_name
from tests.golden import make_v4_audio, make_v4_patches, make_v4_text
from tests.preprocess.many.oracle import contents, held, languages_of, small_cache, value_bytes, write_ids
from tests.store.trees import flip, tree
from tests.store_factory import RATE_HZ


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Seven samples in three shards, and a row that failed."""
    return small_cache(tmp_path, "clips", failed_rows=[4])


def of_ids(cache: Cache, folder: Path, ids: list[str], out: str = "some", **options: Any) -> tuple[ManyReport, Cache]:
    report = subset(str(cache.folder), out, ids=write_ids(folder / "ids.txt", ids), **options)
    return report, open_cache(report.cache)


@settings(max_examples=12)
@given(st.data())
def test_a_subset_holds_the_samples_and_links_their_shards(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        num_samples = data.draw(st.integers(1, 9))
        failed = data.draw(st.sets(st.integers(0, num_samples), max_size=2))
        cache = small_cache(
            folder,
            "x",
            num_samples=num_samples,
            failed_rows=sorted(failed),
            rows_per_shard=data.draw(st.integers(1, 4)),
        )
        ids = cache.samples["sample_id"].to_pylist()
        kept = sorted(data.draw(st.sets(st.integers(0, num_samples - 1), min_size=1)))
        before = tree(cache.folder)
        report, made = of_ids(cache, folder, data.draw(st.permutations([ids[index] for index in kept])))
        whole = held(cache)
        wanted = [whole[index] for index in kept]
        assert held(made) == wanted
        shards = sorted({int(slot >> 32) for slot in cache.slots[kept]})
        assert made.num_shards == len(shards)
        for group in made.groups:
            for number, old in enumerate(shards):
                assert os.path.samefile(made.folder / shard_name(group, number), cache.folder / shard_name(group, old))
        assert verify_folder(made.folder).problems == []
        assert made.metadata["languages"] == languages_of(wanted, rate_hz=RATE_HZ)
        assert report.hours == pytest.approx(sum(row["duration_s"] for row in wanted) / 3600)
        assert (report.num_samples, report.shards_linked, report.shards_copied) == (len(kept), 2 * len(shards), 0)
        assert report.sample_bytes == value_bytes(cache, kept) <= report.size_bytes == made.metadata["size_bytes"]
        after = tree(cache.folder)
        assert {name: entry[0] for name, entry in before.items()} == {name: entry[0] for name, entry in after.items()}
        again = subset(str(cache.folder), str(folder / "again"), ids=folder / "ids.txt")
        assert contents(Path(again.cache)) == contents(made.folder)
        assert again.key == report.key == made.key != cache.key


def test_a_where_keeps_the_rows_for_which_it_holds(cache: Cache, tmp_path: Path) -> None:
    text = "language in ('en', 'es') and num_tokens > 4"
    report = subset(str(cache.folder), "spoken", where=f" {text} ")
    made = open_cache(report.cache)
    assert held(made) == [row for row in held(cache) if row["language"] in ("en", "es") and row["num_tokens"] > 4]
    assert 0 < len(made) < len(cache)
    assert made.folder == cache.folder.parent / "spoken"
    section = made.metadata["recipe"]["subset"]
    assert (section["of"], section["where"], len(section["samples"])) == (cache.key, text, 32)
    assert made.metadata["recipe"].keys() == {*cache.metadata["recipe"], "subset"}
    assert (made.metadata["failed"], made.metadata["excluded"]) == ({}, {})
    [origin] = made.metadata["made_of"]
    assert (origin["key"], origin["num_samples"], origin["taken"]) == (cache.key, 7, len(made))


def test_nothing_is_decoded_and_no_shard_is_written(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a shard was made")

    for name in ("forebay.store.shard.write_shard", "forebay.store.tdz.write_tdz", "soundfile.read"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr("forebay.preprocess.groups.Groups.of", refuse)
    assert subset(str(cache.folder), "all", where="True").num_samples == 7


def test_a_shard_that_cannot_be_linked_is_copied(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr(os, "link", refuse)
    report = subset(str(cache.folder), "copied", where="True")
    assert (report.shards_linked, report.shards_copied) == (0, 6)
    made = open_cache(report.cache)
    assert held(made) == held(cache)
    assert all(path.stat().st_nlink == 1 for path, _ in made.shard_entries("audio"))


def test_links_are_counted_by_the_file_system(cache: Cache) -> None:
    made = open_cache(subset(str(cache.folder), "linked", where="True").cache)
    links = [path.stat().st_nlink for group in made.groups for path, _ in made.shard_entries(group)]
    before = [path.stat().st_nlink for group in cache.groups for path, _ in cache.shard_entries(group)]
    assert links == before
    assert min(links) >= 2


def test_a_second_run_finds_it_and_another_subset_is_refused(cache: Cache, tmp_path: Path) -> None:
    first = subset(str(cache.folder), "some", where="num_tokens > 4")
    before = tree(Path(first.cache))
    again = subset(str(cache.folder), "some", where="num_tokens > 4")
    assert (first.already_there, again.already_there, again.key) == (False, True, first.key)
    with pytest.raises(CacheMismatchError, match=rf"some is there and is the cache of key {first.key[:16]}, wanted"):
        subset(str(cache.folder), "some", where="num_tokens > 5")
    assert tree(Path(first.cache)) == before
    (Path(first.cache) / "text" / "00000.tdz").unlink()
    mended = subset(str(cache.folder), "some", where="num_tokens > 4")
    assert not mended.already_there
    assert verify_folder(Path(mended.cache)).ok


def test_a_place_that_is_taken_is_left_alone(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    for name in ("notes", "file"):
        with pytest.raises(CacheMismatchError, match=f"{name} is there and is no sealed cache"):
            subset(str(cache.folder), str(tmp_path / name), where="True")
    with pytest.raises(CacheMismatchError, match=r"lies in the cache .*; name a folder outside of it"):
        subset(str(cache.folder), str(cache.folder / "text" / "sub"), where="True")
    with pytest.raises(CacheMismatchError, match="is there and is the cache of key"):
        subset(str(cache.folder), str(cache.folder), where="True")
    with pytest.raises(ConfigError, match=r"--out s3://bucket/x: .*forebay cache push DIR URL"):
        subset(str(cache.folder), "s3://bucket/x", where="True")
    for name in ("plans", "./tar_index", ".hidden", "x.tmp-00000000-1-00000000"):
        with pytest.raises(ConfigError, match="no cache is looked for in a folder of the name"):
            subset(str(cache.folder), name, where="True")
    assert tree(tmp_path) == before


def test_a_name_is_below_the_root_that_was_named(cache: Cache, tmp_path: Path) -> None:
    report = subset(str(cache.folder), "all", where="True", cache_root=str(tmp_path / "other"))
    assert Path(report.cache) == tmp_path / "other" / "all"


def test_which_samples_must_be_said_once(cache: Cache, tmp_path: Path) -> None:
    for options in ({}, {"where": "True", "ids": tmp_path / "ids.txt"}):
        with pytest.raises(ConfigError, match="--where EXPR, or --ids FILE; one of the two"):
            subset(str(cache.folder), "some", **options)  # type: ignore[arg-type]


def test_a_condition_that_cannot_be_used_is_refused(cache: Cache) -> None:
    with pytest.raises(ConfigError, match=r"--where: 'langage' at character 1 is no column; did you mean language\?"):
        subset(str(cache.folder), "some", where="langage == 'en'")
    with pytest.raises(ConfigError, match="--where: this is no condition"):
        subset(str(cache.folder), "some", where="exit()")
    with pytest.raises(ConfigError, match=r"--where language == 'xx': none of the 7 samples of .* is so"):
        subset(str(cache.folder), "some", where="language == 'xx'")
    assert not (cache.folder.parent / "some").exists()


def test_ids_that_are_not_there_are_named(cache: Cache, tmp_path: Path) -> None:
    asked = ["clips-0", "clips-4", *(f"other-{n}" for n in range(9)), "clips-0"]
    with pytest.raises(ConfigError, match=r"10 of 11 ids are no samples of .*: 'clips-4', 'other-0', .*--missing ok"):
        of_ids(cache, tmp_path, asked)
    report, made = of_ids(cache, tmp_path, asked, missing="ok")
    assert (report.num_samples, report.missing, report.repeated) == (1, 10, 1)
    # One of them is a row that failed: the subset says why it has no such sample.
    assert [json.loads(line)["sample_id"] for line in (made.folder / "rejected.jsonl").read_text().splitlines()] == [
        "clips-4"
    ]
    assert made.metadata["failed"] == {"corrupt_audio": 1}
    with pytest.raises(ConfigError, match="none of its 1 ids is a sample"):
        of_ids(cache, tmp_path, ["nothing"], out="other", missing="ok")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\r\nb", ["a", "b"]),
        (b"\n\na b \n\r\n\n", ["a b "]),
        ("हि\u2028x\na\x0bb\n".encode(), ["हि\u2028x", "a\x0bb"]),
        (b"a\na\n", ["a", "a"]),
    ],
)
def test_a_list_of_ids_is_lines_of_utf_8(tmp_path: Path, data: bytes, wanted: list[str]) -> None:
    (tmp_path / "ids").write_bytes(data)
    assert read_ids(tmp_path / "ids", setting="--ids").to_pylist() == wanted


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    with pytest.raises(ConfigError, match=r"--ids .*ids cannot be read: No such file"):
        read_ids(path, setting="--ids")
    for data, message in ((b"a\nb\xff\n", r"line 2 is no UTF-8 \(byte 0xff\)"), (b"\r\n\n", "holds no id")):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            read_ids(path, setting="--ids")


def test_a_damaged_shard_is_found_before_it_is_linked(cache: Cache) -> None:
    path = cache.folder / "audio" / "00001.tdz"
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CacheCorruptError, match=r"audio/00001\.tdz: stored xxh3-128"):
        subset(str(cache.folder), "some", where="True")
    assert not (cache.folder.parent / "some").exists()
    assert not list(cache.folder.parent.glob("*.tmp-*"))
    first = cache.sample_id(0)  # of another shard
    assert subset(str(cache.folder), "some", where=f"sample_id == '{first}'").num_samples == 1


def test_no_cache_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError, match="is not a folder"):
        subset(str(tmp_path / "nothing"), "some", where="True")
    with pytest.raises(
        ConfigError, match=r"s3://b/c lies in a store.*cache pull s3://b/c DIR, then forebay cache subset"
    ):
        subset("s3://b/c", "some", where="True")


def test_a_subset_of_a_subset(cache: Cache) -> None:
    some = open_cache(subset(str(cache.folder), "some", where="num_tokens > 4").cache)
    few = open_cache(subset(str(some.folder), "few", where="language == 'es'").cache)
    assert held(few) == [row for row in held(cache) if row["num_tokens"] > 4 and row["language"] == "es"]
    assert few.metadata["recipe"]["subset"]["of"] == some.key
    assert few.metadata["made_of"][0]["made_of"][0]["key"] == cache.key
    assert {sealed.key for sealed in sealed_caches(few.folder.parent)} == {cache.key, some.key, few.key}


def test_a_report_says_what_it_was_made_of(cache: Cache) -> None:
    report = subset(str(cache.folder), "some", where="num_tokens > 4")
    lines = list(report_lines(cache_facts(open_cache(report.cache), plan_roots=[])))
    assert f"  made of     {cache.key[:16]} prompts: {report.num_samples} of 7 samples" in lines
    assert any("where" in line and "num_tokens > 4" in line for line in lines)
    printed = "\n".join(report.lines())
    assert f'cache_dir = "{report.cache}"' in printed
    assert f"shards: {report.shards_linked} linked, 0 copied" in printed
    assert json.loads(json.dumps(report.to_json()))["made_of"] == [cache.key]


def golden_caches() -> list[Path]:
    visions = [make_v4_patches.FOLDER / make_v4_patches.name(codec) for codec in make_v4_patches.CODECS]
    return [make_v4_audio.FOLDER / make_v4_audio.NAME, make_v4_text.FOLDER / make_v4_text.NAME, *visions]


def described(folder: Path) -> Path:
    """Adds to the metadata of a golden cache what every build says of its cache, where it is not there."""
    document = read_metadata(folder)
    del document["checksum"]
    write_metadata(folder, {"made_with": {}, "size_bytes": 0, **document})
    return folder


def image_hashes(cache: Cache, shard: int) -> list[str]:
    return cache.shard("image", shard).strings("image_hash")


@pytest.mark.parametrize("folder", golden_caches(), ids=lambda folder: folder.name)
def test_golden_caches_have_subsets(tmp_path: Path, folder: Path) -> None:
    cache = open_cache(described(shutil.copytree(folder, tmp_path / "golden")))
    for kept in ([0], [len(cache) - 1], list(range(len(cache)))):
        ids = [cache.sample_id(index) for index in kept]
        report, made = of_ids(cache, tmp_path, ids, out=f"some-{len(kept)}-{kept[0]}")
        whole = held(cache)
        assert held(made) == [whole[index] for index in kept]
        assert verify_folder(made.folder).problems == []
        assert (made.groups, made.metadata["format_version"]) == (cache.groups, cache.metadata["format_version"])
        assert 0 < report.sample_bytes <= report.size_bytes
        if "image" in cache.groups:
            assert FIELDS[made.metadata["codec"]] in made.fields
            names = [name for shard in range(made.unit_count("image")) for name in image_hashes(made, shard)]
            assert made.metadata["num_images"] == len(set(names)) <= cache.metadata["num_images"]
    assert np.array_equal(open_cache(report.cache).slots, cache.slots)
