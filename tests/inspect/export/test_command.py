"""Promises of an export about its folder, whatever the form."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from forebay.errors import CacheCorruptError, ConfigError
from forebay.inspect import export as command
from forebay.inspect.export import ExportOptions, export
from forebay.store.cache import Cache, open_cache
from tests.commands import run, run_json
from tests.preprocess.corpus import file_bytes
from tests.store_factory import make_cache

FORMS = ("parquet", "webdataset")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of twelve clips in three shards, 400 kB together."""
    root = tmp_path_factory.mktemp("cache")
    return make_cache(root, num_samples=12, max_duration_s=4.0)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_MB", 100_000)


@pytest.fixture
def cache(folder: Path) -> Cache:
    return open_cache(folder)


def options(out: Path, form: str, **changes: Any) -> ExportOptions:
    return ExportOptions(**{"form": form, "out": out, "shard_size_mb": 1, "progress": False, **changes})


def stopped_at(monkeypatch: pytest.MonkeyPatch, form: str, error: BaseException, *, sample: int) -> None:
    """Makes the writer of a form raise once it has written a sample."""
    extension, write = command._FORMS[form]

    def broken(*given: Any, **named: Any) -> Iterator[int]:
        for at in write(*given, **named):
            if at > sample:
                raise error
            yield at

    monkeypatch.setattr(command, "_FORMS", {form: (extension, broken)})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("stop"), OSError(28, "stopped: no space left on device")], ids=["int", "full"]
)
@pytest.mark.few
def test_an_interrupted_export_goes_on_and_gives_the_same_bytes(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, error: BaseException
) -> None:
    wanted = export(cache, options(tmp_path / "whole", form))
    assert wanted.num_files > 2
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stopped_at(patch, form, error, sample=6)
        with pytest.raises(type(error), match="stop"):
            export(cache, options(out, form))
    there = sorted(path.name for path in out.iterdir())
    assert there[0] == "._export.json.unfinished"
    assert 1 < len(there) <= wanted.num_files
    assert not any(".tmp-" in name for name in there)
    times = {name: (out / name).stat().st_mtime_ns for name in there[1:]}
    report = export(cache, options(out, form))
    assert (report.files_kept, report.num_files) == (len(times), wanted.num_files)
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    assert file_bytes(out) == file_bytes(tmp_path / "whole")


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_lost_its_end_is_written_again(cache: Cache, tmp_path: Path, form: str) -> None:
    wanted = export(cache, options(tmp_path / "whole", form))
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "_export.json").read_bytes())
    (tmp_path / "out" / "_export.json").unlink()
    lines = [document["identity"], *document["files"]]
    (tmp_path / "out" / "._export.json.unfinished").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "out" / document["files"][1]["name"]).write_bytes(b"short")
    assert export(cache, options(tmp_path / "out", form)).num_files == wanted.num_files
    assert file_bytes(tmp_path / "out") == file_bytes(tmp_path / "whole")


def test_a_full_disk_leaves_what_is_whole(folder: Path, tmp_path: Path) -> None:
    cache = open_cache(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            export(cache, options(tmp_path / "out", "parquet"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["._export.json.unfinished"]
    assert export(cache, options(tmp_path / "out", "parquet")).files_kept == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_export_is_left_alone_and_says_so(cache: Cache, tmp_path: Path, form: str) -> None:
    first = export(cache, options(tmp_path, form))
    before = file_bytes(tmp_path)
    again = export(cache, options(tmp_path, form))
    assert file_bytes(tmp_path) == before
    assert (again.files_kept, again.num_files, again.size_bytes) == (first.num_files, first.num_files, first.size_bytes)
    document = json.loads(before["_export.json"])
    assert document["identity"]["key"] == document["about"]["key"] == cache.key
    files = document["files"]
    assert all(entry["size_bytes"] == len(before[entry["name"]]) for entry in files)
    assert (files[0]["start"], files[-1]["stop"]) == (0, 12)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"form": "webdataset"}, "form is parquet there, webdataset is wanted"),
        ({"shard_size_mb": 2}, "shard_size_mb is 1 there, 2 is wanted"),
        ({"max_samples": 3}, "num_samples is 12 there, 3 is wanted"),
    ],
)
def test_a_folder_of_another_export_is_refused(cache: Cache, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    export(cache, options(tmp_path, "parquet"))
    before = file_bytes(tmp_path)
    with pytest.raises(ConfigError, match=why):
        export(cache, options(tmp_path, **{"form": "parquet", **change}))
    assert file_bytes(tmp_path) == before


def test_another_cache_into_the_same_folder_is_refused(cache: Cache, tmp_path: Path) -> None:
    export(cache, options(tmp_path / "out", "parquet"))
    other = open_cache(make_cache(tmp_path / "other", seed=1))
    with pytest.raises(ConfigError, match=rf"key is {cache.key[:20]}.* there, {other.key[:20]}.* is wanted"):
        export(other, options(tmp_path / "out", "parquet"))


def test_ids_and_a_number_choose_samples_in_the_order_of_the_cache(cache: Cache, tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_bytes(b"clip-0009\nclip-0002\r\n\nclip-0002\nclip-0005")
    report = export(cache, options(tmp_path / "out", "parquet", ids=ids))
    table = pq.read_table(tmp_path / "out", columns=["index", "sample_id"])
    assert table.to_pydict() == {"index": [2, 5, 9], "sample_id": ["clip-0002", "clip-0005", "clip-0009"]}
    assert report.num_samples == 3
    export(cache, options(tmp_path / "two", "parquet", ids=ids, max_samples=2))
    assert pq.read_table(tmp_path / "two", columns=["index"])["index"].to_pylist() == [2, 5]


def test_an_id_may_hold_what_unicode_calls_a_line_end(tmp_path: Path) -> None:
    names = ["a\u2028b", "a", "b", "\udcff", "c", "d"]
    cache = open_cache(make_cache(tmp_path, sample_ids=names))
    (tmp_path / "ids.txt").write_bytes(b"a\xe2\x80\xa8b\n\xff\n")
    export(cache, options(tmp_path / "out", "parquet", ids=tmp_path / "ids.txt"))
    assert pq.read_table(tmp_path / "out", columns=["index"])["index"].to_pylist() == [0, 3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("clip-0001\nnobody\nnowhere\n", r"has no sample with 2 of its 3 ids \('nobody', 'nowhere'\)"),
        ("\n", "names no id; write an id a line"),
    ],
)
def test_ids_that_are_not_there_are_named(cache: Cache, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "ids.txt").write_text(text)
    with pytest.raises(ConfigError, match=why):
        export(cache, options(tmp_path / "out", "parquet", ids=tmp_path / "ids.txt"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"form": "csv"}, "--form csv: wanted one of parquet, webdataset"),
        ({"shard_size_mb": 0}, "--shard-size-mb 0: wanted 1 or more"),
        ({"max_samples": 0}, "--max-samples 0: wanted 1 or more"),
        ({"ids": Path("/nowhere")}, "--ids /nowhere: No such file or directory"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    cache: Cache, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        export(cache, options(tmp_path / "out", **{"form": "parquet", **change}))
    assert not (tmp_path / "out").exists()


def test_a_sealed_cache_is_no_place_for_an_export(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="lies inside the cache"):
        export(cache, options(cache.folder / "out", "parquet"))


def test_a_cache_without_samples_is_refused(tmp_path: Path) -> None:
    empty = open_cache(make_cache(tmp_path, num_samples=0, failed_rows=[0]))
    with pytest.raises(ConfigError, match="has no samples, so there is nothing to export"):
        export(empty, options(tmp_path / "out", "parquet"))


def test_damaged_bytes_are_never_exported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / folder.name)
    shard = tmp_path / folder.name / "audio" / "00001.tdz"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CacheCorruptError, match=r"00001.tdz.*stored"):
        export(open_cache(tmp_path / folder.name), options(tmp_path / "out", "webdataset", shard_size_mb=1))
    assert not (tmp_path / "out" / "_export.json").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("bars")
def test_the_command_prints_a_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    found = run_json(capsys, "export", folder, "--form", form, "--out", tmp_path / "a", "--no-progress")
    assert (found["form"], found["num_samples"], found["num_files"]) == (form, 12, 1)
    code, out, err = run(capsys, "export", folder, "--form", form, "--out", tmp_path / "b", "--max-samples", "5")
    assert code == 0
    assert out.startswith(f"{form}: 5 samples in 1 files, ")
    assert "export: 5/5 samples" in err
    code, _, err = run(capsys, "export", tmp_path / "none.toml", "--form", form, "--out", tmp_path / "c")
    assert code == 2
    assert "none.toml: no such cache or config" in err


@pytest.mark.parametrize("form", FORMS)
def test_a_signed_cache_of_a_stranger_writes_nothing_elsewhere(tmp_path: Path, form: str) -> None:
    folder = make_cache(tmp_path, metadata={"name": "../../x", "split": "a/b"})
    export(open_cache(folder), options(tmp_path / "out", form))
    first, *_ = sorted(path.name for path in (tmp_path / "out").glob("%*"))
    assert first.startswith("%2E%2E%2F%2E%2E%2Fx-a%2Fb-000000.")
    bare = open_cache(make_cache(tmp_path / "bare", metadata={"recipe": {}}))
    assert export(bare, options(tmp_path / "two", form)).num_samples == 6
    none = open_cache(folder)
    none.metadata = {name: value for name, value in none.metadata.items() if name != "recipe"}
    with pytest.raises(CacheCorruptError, match="reading by it ends in KeyError"):
        export(none, options(tmp_path / "three", form))
