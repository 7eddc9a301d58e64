from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.store import metadata
from forebay.store.cache import open_cache
from forebay.store.files import hash_file
from forebay.store.held import AnyFile
from forebay.store.layout import FORMAT_VERSION
from forebay.store.seal import quick_problems, verify_folder
from tests.store.trees import flip, set_writable, tree
from tests.store_factory import make_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five samples of 0.1 s among six rows, in two shards a group: about 30 kB."""
    root = tmp_path_factory.mktemp("caches")
    return make_cache(root, num_samples=5, failed_rows=[1], rows_per_shard=3, max_duration_s=0.1)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def only_problem(folder: Path) -> str:
    report = verify_folder(folder)
    assert not report.ok
    assert len(report.problems) == 1
    return report.problems[0]


def test_a_whole_cache_is_ok_and_all_but_its_metadata_is_counted(folder: Path) -> None:
    report = verify_folder(folder)
    checked = sum(path.stat().st_size for path in files_of(folder) if path.name != "metadata.json")
    assert report.to_json() == {"ok": True, "checked_bytes": checked, "problems": []}
    assert quick_problems(folder) == []


@pytest.mark.parametrize("num_samples", [0, 1])
def test_a_cache_of_hardly_any_samples_is_ok(tmp_path: Path, num_samples: int) -> None:
    assert verify_folder(make_cache(tmp_path, num_samples=num_samples)).ok


@given(draw=st.data())
def test_every_changed_byte_of_every_file_is_found(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("copy") / folder.name))
    path = draw.draw(st.sampled_from(files_of(copy)).filter(lambda file: file.stat().st_size > 0))
    flip(path, draw.draw(st.integers(0, path.stat().st_size - 1)), draw.draw(st.integers(1, 255)))
    assert path.name in only_problem(copy)
    shutil.rmtree(copy)


def test_every_bit_of_the_rows_order_and_of_the_metadata_counts(copy: Path) -> None:
    # The two whose damage opening alone could not see: slots are not parsed, and JSON has many spellings.
    slots = copy / "slots.npy"
    positions = [(slots, position) for position in range(0, slots.stat().st_size)]
    text = (copy / "metadata.json").read_bytes()
    positions += [(copy / "metadata.json", position) for position, byte in enumerate(text) if byte in b' \n"'][:150]
    for path, position in positions:
        flip(path, position, 1 << (position % 8))
        assert path.name in only_problem(copy)
        flip(path, position, 1 << (position % 8))
    assert verify_folder(copy).ok


@given(draw=st.data())
def test_every_truncation_and_every_appended_byte_is_found_by_a_stat(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("copy") / folder.name))
    path = draw.draw(st.sampled_from(files_of(copy)).filter(lambda file: file.stat().st_size > 0))
    data = path.read_bytes()
    path.write_bytes(data[: draw.draw(st.integers(0, len(data) - 1))] if draw.draw(st.booleans()) else data + b"\0")
    assert path.name in only_problem(copy)
    assert len(quick_problems(copy)) == 1
    shutil.rmtree(copy)


def test_every_missing_file_is_named(folder: Path, copy: Path) -> None:
    for path in files_of(copy):
        data = path.read_bytes()
        path.unlink()
        assert str(path) in only_problem(copy) or path.name == "metadata.json"
        path.write_bytes(data)
    assert verify_folder(copy).ok


def test_a_cache_that_was_never_sealed_is_a_problem_with_the_way_out(copy: Path) -> None:
    (copy / "metadata.json").unlink()
    found = only_problem(copy)
    assert found.startswith(f"{copy} has no metadata.json: it is not sealed; run: forebay preprocess CONFIG (of raw")


@pytest.mark.parametrize("group", ["audio", "text"])
def test_swapped_shards_are_found(copy: Path, group: str) -> None:
    first, second = copy / group / "00000.tdz", copy / group / "00001.tdz"
    os.rename(first, aside := copy.parent / "aside")
    os.rename(second, first)
    os.rename(aside, second)
    problems = verify_folder(copy).problems
    assert [str(path) in problem for path, problem in zip((first, second), problems, strict=True)] == [True, True]


def test_the_shard_of_another_cache_is_found_though_it_is_a_whole_one(copy: Path, tmp_path: Path) -> None:
    other = make_cache(tmp_path / "other", num_samples=5, failed_rows=[1], rows_per_shard=3, max_duration_s=0.1, seed=1)
    # Equal sizes: what a stat cannot tell, hashing must.
    assert (other / "audio/00000.tdz").stat().st_size == (copy / "audio/00000.tdz").stat().st_size
    os.replace(other / "audio/00000.tdz", copy / "audio/00000.tdz")
    assert quick_problems(copy) == []
    assert "audio/00000.tdz: stored xxh3-128" in only_problem(copy)


def test_foreign_files_and_dead_links_are_named(copy: Path) -> None:
    (copy / "audio" / "notes.txt").write_text("hello")
    (copy / "link").symlink_to(copy / "nothing")
    assert verify_folder(copy).problems == [
        f"{copy / 'audio' / 'notes.txt'} does not belong to this cache",
        f"{copy / 'link'} does not belong to this cache",
    ]


def test_all_damaged_files_are_listed_not_just_the_first(copy: Path) -> None:
    damaged = [copy / "lengths.npy", copy / "audio/00001.tdz", copy / "text/00000.tdz"]
    for path in damaged:
        flip(path, path.stat().st_size // 2)
    problems = verify_folder(copy).problems
    assert [str(path) in problem for path, problem in zip(damaged, problems, strict=True)] == [True] * 3
    assert all("stored xxh3-128" in problem and "computed" in problem for problem in problems)


def test_a_file_that_the_disk_cannot_read_is_a_problem_and_the_rest_is_still_checked(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: AnyFile) -> str:
        if str(path).endswith("audio/00000.tdz"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return hash_file(path)

    monkeypatch.setattr("forebay.store.metadata.hash_file", failing)
    flip(copy / "text/00001.tdz", 100)
    problems = verify_folder(copy).problems
    assert problems[0] == f"{copy / 'audio/00000.tdz'} cannot be read: Input/output error"
    assert "text/00001.tdz" in problems[1]


def test_what_is_no_cache_is_a_problem(tmp_path: Path) -> None:
    metadata.write_metadata(tmp_path, {"format_version": FORMAT_VERSION, "kind": "bucket"})
    assert "is not a cache" in only_problem(tmp_path)
    assert "is not a folder" in only_problem(tmp_path / "nowhere")


def test_opening_reading_and_verifying_change_nothing_on_disk_and_need_no_right_to(copy: Path) -> None:
    set_writable(copy, is_writable=False)
    try:
        before = tree(copy)
        cache = open_cache(copy)
        for index in range(len(cache)):
            cache.read(index)
        assert cache.samples.num_rows == 5
        assert verify_folder(copy).ok
        assert quick_problems(copy) == []
        assert tree(copy) == before
    finally:
        set_writable(copy, is_writable=True)


@pytest.mark.usefixtures("bars")
def test_progress_goes_to_standard_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_folder(folder, progress=True).ok
    out, err = capsys.readouterr()
    assert out == ""
    assert "verify: " in err
    assert "B/s" in err
    verify_folder(folder)
    assert capsys.readouterr() == ("", "")
