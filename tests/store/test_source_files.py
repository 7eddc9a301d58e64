from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import SourceConfig
from forebay.config.data import SOURCE_KINDS, SourceKind
from forebay.errors import CacheCorruptError
from forebay.store import source_files
from forebay.store.key import SourceDigest, cache_key, digest
from forebay.store.remote.raw.raw_sources import is_meant, walk, walk_files
from forebay.store.source_files import (
    SourceFile,
    StoredSource,
    anchor,
    dump_sources,
    hf_splits,
    listed_files,
    load_sources,
)
from tests.store.trees import flip

FOLDERS: dict[str, tuple[str, ...]] = {
    "tar": ("a.parquet", "b.parquet"),
    "filelist": ("a.tsv", "b.tsv"),
    "webdataset": ("00000.tar", "00001.tar", "00010.tar"),
    "jsonl": ("a.jsonl",),
    "ljspeech": ("metadata.csv",),
}


def files_in(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def listed(kind: str, *entries: Path | str, split: str = "train") -> list[tuple[str, int]]:
    files = listed_files(SourceConfig(kind=kind, manifest=tuple(map(str, entries)), split=split))
    for file in files:
        assert file.listed
        assert file.path == anchor(str(entries[file.entry])) / file.name
    return [(file.name, file.entry) for file in files]


@pytest.mark.parametrize("kind", list(FOLDERS))
def test_a_folder_stands_for_its_files_of_the_kind(tmp_path: Path, kind: str) -> None:
    names = FOLDERS[kind]
    other = [name for others in FOLDERS.values() if others != names for name in others]
    files_in(tmp_path, *reversed(names), *other, "README", *(f"deeper/{name}" for name in names))
    (tmp_path / f"folder{Path(names[0]).suffix}").mkdir()
    assert listed(kind, tmp_path) == [(name, 0) for name in names]


def test_a_folder_stands_for_all_files_of_a_kind_that_says_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCE_KINDS, "toy", SourceKind(reader="tests.rows.toy:READER"))
    files_in(tmp_path, "a.tsv", "b.tsv", "deeper/c.tsv")
    assert listed("toy", tmp_path) == [("a.tsv", 0), ("b.tsv", 0)]


@pytest.mark.parametrize("kind", list(FOLDERS))
def test_a_file_stands_for_itself(tmp_path: Path, kind: str) -> None:
    files_in(tmp_path, "any.name")
    assert listed(kind, tmp_path / "any.name") == [("any.name", 0)]


def test_a_glob_stands_for_what_it_matches_relative_to_its_fixed_part(tmp_path: Path) -> None:
    files_in(tmp_path, "b/1.tar", "a/2.tar", "a/1.tar", "a/1.json", "c/d/3.tar")
    assert listed("webdataset", tmp_path / "a" / "*.tar") == [("1.tar", 0), ("2.tar", 0)]
    assert listed("webdataset", tmp_path / "*" / "*.tar") == [("a/1.tar", 0), ("a/2.tar", 0), ("b/1.tar", 0)]
    assert listed("webdataset", tmp_path / "**" / "3.tar") == [("c/d/3.tar", 0)]
    assert listed("webdataset", tmp_path / "[ab]" / "1.tar") == [("a/1.tar", 0), ("b/1.tar", 0)]


def test_several_entries_keep_their_order(tmp_path: Path) -> None:
    files_in(tmp_path, "x/1.tar", "y/1.tar", "z.tar")
    entries = (tmp_path / "z.tar", tmp_path / "y", tmp_path / "x" / "*.tar")
    assert listed("webdataset", *entries) == [("z.tar", 0), ("1.tar", 1), ("1.tar", 2)]


def test_what_is_not_there_gives_nothing(tmp_path: Path) -> None:
    assert listed("tar", tmp_path / "no.parquet", tmp_path / "no" / "*.parquet", files_in(tmp_path / "empty")) == []
    (tmp_path / "empty").mkdir()
    assert listed("tar", tmp_path / "empty") == []


@pytest.mark.parametrize("name", ["data[1].tsv", "da*ta.tsv", "what?.tsv"])
def test_a_name_with_letters_of_globs_is_a_name_where_it_is_there(tmp_path: Path, name: str) -> None:
    files_in(tmp_path, name, "data1.tsv", f"folder [{name}]/x.tsv")
    assert listed("filelist", tmp_path / name) == [(name, 0)]
    assert listed("filelist", tmp_path / f"folder [{name}]" / "x.tsv") == [("x.tsv", 0)]
    assert listed("filelist", tmp_path / f"folder [{name}]") == [("x.tsv", 0)]


def test_an_hf_folder_of_splits_gives_the_split(tmp_path: Path) -> None:
    data = ("data-00000-of-00001.arrow", "dataset_info.json", "state.json")
    files_in(tmp_path, "dataset_dict.json", *(f"{split}/{name}" for split in ("train", "test") for name in data))
    names = ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"]
    assert listed("hf", tmp_path, split="test") == [(f"test/{name}", 0) for name in names]
    assert listed("hf", tmp_path / "train") == [(name, 0) for name in names]
    assert listed("hf", files_in(tmp_path / "p", "1.parquet", "0.parquet")) == [("0.parquet", 0), ("1.parquet", 0)]


@given(st.sets(st.text("ab[1-", min_size=1, max_size=4), min_size=1, max_size=4))
def test_names_do_not_know_where_their_folder_stands(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    root = tmp_path_factory.mktemp("r")
    files_in(root / "one", *(f"{name}.tar" for name in names))
    before = listed("webdataset", root / "one")
    globbed = listed("webdataset", root / "one" / "*.tar")
    (root / "else[where]").mkdir()
    shutil.move(root / "one", root / "else[where]" / "one")
    assert listed("webdataset", root / "else[where]" / "one") == before
    assert sorted(before) == sorted((f"{name}.tar", 0) for name in names) == sorted(globbed)


@given(
    st.lists(
        st.builds(
            StoredSource,
            st.binary(min_size=1, max_size=8).map(lambda b: b.decode("utf-8", "surrogateescape")),
            st.integers(0, 3),
            st.booleans(),
            st.sampled_from(["", "ab" * 16]),
            st.integers(-1, 2**62),
        ),
        max_size=5,
    )
)
def test_sources_come_back(tmp_path_factory: pytest.TempPathFactory, sources: list[StoredSource]) -> None:
    path = tmp_path_factory.getbasetemp() / "sources.parquet"
    path.write_bytes(dump_sources(sources))
    stored = load_sources(path)
    assert stored == sources
    for part, own in ((stored, sources), (stored[1:], sources[1:])):
        assert part.numbers("listed").tolist() == [source.listed for source in own]
        assert part.is_hashed.tolist() == [source.xxh3_128 != "" for source in own]
        assert part.where(part.is_hashed) == [source for source in own if source.xxh3_128]


def test_many_sources_are_written_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "BLOCK_SOURCES", 2)
    sources = [StoredSource(f"{n}.wav", n % 3, listed=n % 2 == 0, xxh3_128="ab" * 16, size_bytes=n) for n in range(21)]
    path = tmp_path / "sources.parquet"
    path.write_bytes(dump_sources(sources))
    assert pq.ParquetFile(path).num_row_groups == 3
    assert load_sources(path) == sources
    assert load_sources(path).numbers("size_bytes").tolist() == [*range(21)]


def test_what_is_no_list_of_sources_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "sources.parquet"
    with pytest.raises(CacheCorruptError, match=r"sources\.parquet is not the sources of a cache: .*; run: forebay"):
        load_sources(path)
    path.write_bytes(dump_sources([StoredSource("a", 0, listed=True, xxh3_128="ab" * 16, size_bytes=3)]))
    flip(path, path.stat().st_size - 6)
    with pytest.raises(CacheCorruptError, match=r"sources\.parquet is not the sources of a cache"):
        load_sources(path)


def test_a_source_file_is_listed_and_of_the_first_entry_unless_said_otherwise(tmp_path: Path) -> None:
    assert SourceFile("a", tmp_path / "a") == SourceFile("a", tmp_path / "a", entry=0, listed=True)


def test_a_glob_leaves_out_what_forebay_writes_beside_the_config(tmp_path: Path) -> None:
    cache, index = "caches/x-train-0123", f"caches/tar_index/{'0' * 32}.parquet"
    files_in(
        tmp_path, *(f"{cache}/{name}" for name in ("metadata.json", "slots.npy", "sources.parquet", "rejected.jsonl"))
    )
    files_in(
        tmp_path,
        index,
        "runs/x/logs/data_usage.jsonl",
        "data/sources.parquet",
        "data/rejected.jsonl",
        "tar_index/a.parquet",
    )
    assert listed("tar", tmp_path / "**" / "*.parquet") == [("data/sources.parquet", 0), ("tar_index/a.parquet", 0)]
    assert listed("jsonl", tmp_path / "**" / "*.jsonl") == [("data/rejected.jsonl", 0)]
    assert listed("jsonl", tmp_path / cache / "rejected.jsonl") == [("rejected.jsonl", 0)]  # named outright


def test_a_split_picks_its_files_where_all_names_tell(tmp_path: Path) -> None:
    names = ["test-00000-of-00001.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    files_in(tmp_path, *names)
    assert listed("hf", tmp_path) == [(name, 0) for name in names[1:]]
    assert listed("hf", tmp_path, split="test") == [(names[0], 0)]
    assert listed("hf", tmp_path, split="dev") == []
    assert hf_splits(tmp_path) == ["test", "train"]
    files_in(tmp_path, "more.parquet")
    assert len(listed("hf", tmp_path, split="dev")) == 4
    only = files_in(tmp_path / "only", "data-00000-of-00001.parquet")
    assert listed("hf", only, split="dev") == [("data-00000-of-00001.parquet", 0)]


@given(links=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([".", "a", "a/b", "x", "gone", "a/f"]))))
def test_reading_folders_finds_what_looking_at_each_file_does(
    tmp_path_factory: pytest.TempPathFactory, links: list[tuple[str, str]]
) -> None:
    root = tmp_path_factory.mktemp("walk")
    files_in(root, "f.wav", "a/f", "a/b/g", ".h/i", "x/y")
    for number, (folder, target) in enumerate(links):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / f"link{number}").symlink_to(root / target)
    wanted = [  # a link to what is gone is a file that will be missing
        (os.path.relpath(base, root), sorted(folders), sorted(name for name in names if is_meant(Path(base) / name)))
        for base, folders, names in walk(root)
    ]
    gone = (root / base / name for base, _, names in wanted for name in names)
    assert all(os.readlink(path) == str(root / "gone") for path in gone if not path.exists())
    found = [(below or ".", sorted(folders), sorted(names)) for below, folders, names in walk_files(root)]
    assert {below for below, _, _ in found} == {below for below, _, _ in wanted}
    assert {(below, *names) for below, _, names in found} == {(below, *names) for below, _, names in wanted}


@given(st.lists(st.builds(SourceDigest, name=st.text(max_size=3), xxh3_128=st.text("01", max_size=2)), max_size=9))
def test_a_key_taken_piece_by_piece_is_the_digest_of_its_document(sources: list[SourceDigest]) -> None:
    document = {"recipe_key": "r", "sources": [[source.name, source.xxh3_128] for source in sources]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.store.key._BLOCK", 2)
        assert cache_key("r", iter(sources)) == digest(document)
