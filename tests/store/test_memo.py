from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.store import memo as memo_module
from forebay.store.files import hash_file, hash_opened
from forebay.store.memo import FILE_NAME, AnyPath, Memo, Stat, hash_now, stats_of
from forebay.store.remote.raw.raw_sources import stat_of_status
from tests.store.trees import set_writable

Hash = Callable[[Sequence[AnyPath]], Any]


def record(stat: Stat, hashed_at_ns: int, digest: str) -> Any:
    """Returns what hashing one file gives."""
    return np.array([(stat, hashed_at_ns, bytes.fromhex(digest))], memo_module._RECORD)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "caches").mkdir()
    return tmp_path / "caches"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files that were last changed, as far as the memo's rule goes, long before they are hashed."""
    paths = [tmp_path / f"{i}.tar" for i in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(b"data %d" % number)
    return paths


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets files that a test has just written count as old."""
    monkeypatch.setattr(memo_module, "_RACY_NS", -(10**15))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose content was read."""
    read: list[Path] = []

    def noted(file: io.FileIO) -> str:
        read.append(Path(os.fsdecode(file.name)))
        return hash_opened(file)

    monkeypatch.setattr(memo_module, "hash_opened", noted)
    return read


def test_a_file_is_read_once(root: Path, files: list[Path], settled: None, read: list[Path]) -> None:
    memo = Memo(root)
    assert [memo.known(path) for path in files] == [None] * 3
    wanted = [hash_file(path) for path in files]
    assert memo.hashes(files) == wanted
    assert memo.hashes(files) == wanted
    assert Memo(root).hashes([files[2], files[0]]) == [wanted[2], wanted[0]]
    assert Memo(root).known(files[1]) == wanted[1]
    assert read == files


def test_a_changed_file_is_read_again(root: Path, files: list[Path], settled: None, read: list[Path]) -> None:
    Memo(root).hashes(files)
    before = os.stat(files[1])
    files[1].write_bytes(b"DATA 1")
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(files[1]).st_size == before.st_size
    memo = Memo(root)
    assert memo.known(files[1]) is None
    assert memo.hashes(files)[1] == hash_file(files[1])
    assert read == [*files, files[1]]


def test_a_moved_file_is_known_and_a_copy_is_not(root: Path, files: list[Path], settled: None, tmp_path: Path) -> None:
    wanted = Memo(root).hashes(files)[0]
    (tmp_path / "copy.tar").write_bytes(files[0].read_bytes())
    inode = os.stat(files[0]).st_ino
    os.rename(files[0], tmp_path / "moved.tar")
    assert os.stat(tmp_path / "moved.tar").st_ino == inode
    memo = Memo(root)
    assert memo.hashes([tmp_path / "copy.tar", tmp_path / "moved.tar"]) == [wanted, wanted]


def test_a_file_that_changed_about_when_it_was_hashed_is_not_trusted(
    root: Path, files: list[Path], read: list[Path]
) -> None:
    Memo(root).hashes(files)
    assert [Memo(root).known(path) for path in files] == [None] * 3
    Memo(root).hashes(files)
    assert read == [*files, *files]


@given(st.integers(-(10**10), 10**10))
def test_the_distance_of_trust_is_two_seconds(tmp_path_factory: pytest.TempPathFactory, age_ns: int) -> None:
    path = tmp_path_factory.getbasetemp() / "file"
    path.write_bytes(b"data")
    status = os.stat(path)
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    memo = Memo(tmp_path_factory.getbasetemp() / "nowhere")
    hashed = record(stat_of_status(status), changed_ns + age_ns, hash_file(path))
    memo.hashes([path], map_=lambda function, paths: [hashed])
    assert (memo.known(path) is not None) == (age_ns >= 2_000_000_000)


def test_a_file_that_changes_while_it_is_read_is_never_known(
    root: Path, files: list[Path], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appended_to(file: io.FileIO) -> str:
        digest = hash_opened(file)
        with open(files[0], "ab") as more:
            more.write(b"more")
        return digest

    monkeypatch.setattr(memo_module, "hash_opened", appended_to)
    Memo(root).hashes(files[:1])
    assert Memo(root).known(files[0]) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "garbage"])
def test_a_damaged_memo_costs_time_only(
    root: Path, files: list[Path], settled: None, read: list[Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Memo(root).hashes(files)
    data = (root / FILE_NAME).read_bytes()
    for position in range(0, len(data), 11) if damage == "flip" else (0,):
        damaged = {
            "flip": data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :],
            "truncate": data[:-1],
            "empty": b"",
            "garbage": os.urandom(len(data)),
        }[damage]
        (root / FILE_NAME).write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            memo = Memo(root)
        assert "ignoring damaged memo" in caplog.text
        assert [memo.known(path) for path in files] == [None] * 3
    assert Memo(root).hashes(files) == wanted
    assert Memo(root).known(files[0]) == wanted[0]


def test_a_root_that_cannot_be_written_is_no_error(
    root: Path, files: list[Path], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [hash_file(path) for path in files]

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(memo_module, "write_aside", refused)  # rights do not hold the tests' user, where that is root
    memo = Memo(root)
    assert memo.hashes(files) == wanted
    assert memo.known(files[0]) == wanted[0]
    assert os.listdir(root) == []


def test_a_read_only_root_is_left_as_it_is(root: Path, files: list[Path], settled: None) -> None:
    Memo(root).hashes(files)
    set_writable(root, is_writable=False)
    try:
        assert Memo(root).known(files[2]) == hash_file(files[2])
    finally:
        set_writable(root, is_writable=True)


def test_two_that_save_take_each_others_entries_in(root: Path, files: list[Path], settled: None) -> None:
    one, two = Memo(root), Memo(root)
    one.hashes(files[:1])
    two.hashes(files[1:])
    memo = Memo(root)
    assert [memo.known(path) for path in files] == [hash_file(path) for path in files]


def test_of_two_entries_the_later_counts(root: Path, files: list[Path], tmp_path: Path) -> None:
    path = files[0]
    status = os.stat(path)
    stat = stat_of_status(status)
    late_ns = max(status.st_mtime_ns, status.st_ctime_ns) + 10**10
    dumps = []
    for digest, hashed_at_ns in (("a" * 32, late_ns), ("b" * 32, late_ns + 1)):
        memo = Memo(tmp_path / digest[0])
        memo.hashes([path], map_=lambda f, p, d=digest, ns=hashed_at_ns: [record(stat, ns, d)])  # type: ignore[misc]
        dumps.append(memo.dump())
    for order in (dumps, dumps[::-1]):
        memo = Memo(tmp_path / "none2")
        for number, data in enumerate(order):
            (tmp_path / f"memo{number}").write_bytes(data)
            memo.add_file(tmp_path / f"memo{number}")
        assert memo.known(path) == "b" * 32


def test_a_dump_of_some_files_knows_these_as_they_are_now(
    root: Path, files: list[Path], settled: None, tmp_path: Path
) -> None:
    memo = Memo(root)
    memo.hashes(files)
    files[1].write_bytes(b"changed")
    (tmp_path / "part").write_bytes(memo.dump(files[:2]))
    other = Memo(tmp_path / "none")
    other.add_file(tmp_path / "part")
    assert [other.known(path) for path in files] == [hash_file(files[0]), None, None]
    assert memo.dump(files[::-1]) == memo.dump([files[0], files[2]])
    memo.forget()
    assert memo.known(files[0]) is None
    assert memo.hashes(files[:1]) == [hash_file(files[0])]
    assert Memo(root).known(files[2]) == hash_file(files[2])  # what it had written stays


def test_only_files_that_are_not_known_go_through_the_map(root: Path, files: list[Path], settled: None) -> None:
    memo = Memo(root)
    memo.hashes(files[:1])
    asked: list[AnyPath] = []

    def noted(function: Hash, tasks: Sequence[Sequence[AnyPath]]) -> Iterable[Any]:
        asked.extend(path for task in tasks for path in task)
        return map(function, tasks)

    memo.hashes(files, map_=noted)
    assert asked == files[1:]


def test_the_hash_carries_the_time_before_the_read(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", iter([1, 2, 3]).__next__)
    hashed = hash_now(files[0])
    assert (hashed.hashed_at_ns, hashed.stat[2], hashed.xxh3_128) == (1, 6, hash_file(files[0]))


def test_an_absent_file_raises(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.tar"):
        Memo(root).known(root / "gone.tar")


def test_a_file_that_changed_once_while_it_was_read_is_read_again(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def changed_once(file: io.FileIO) -> str:
        digest = hash_opened(file)
        if not read:
            files[0].write_bytes(b"other")
        read.append(1)
        return digest

    monkeypatch.setattr(memo_module, "hash_opened", changed_once)
    hashed = hash_now(files[0])
    assert len(read) == 2
    assert (hashed.stat, hashed.xxh3_128) == (stat_of_status(files[0].stat()), hash_file(files[0]))


def test_the_stat_is_of_the_file_that_was_read_and_not_of_one_that_took_its_place(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stat is of the old bytes, so that no entry maps the stat of the new file to them."""
    wanted = hash_file(files[0])

    def replaced(file: io.FileIO) -> str:
        digest = hash_opened(file)
        if files[1].exists():
            os.link(files[0], files[0].with_name("kept"))
            files[1].replace(files[0])
        return digest

    monkeypatch.setattr(memo_module, "hash_opened", replaced)
    hashed = hash_now(files[0])
    old, new = files[0].with_name("kept").stat(), files[0].stat()
    assert hashed.stat[1] in (old.st_ino, new.st_ino)
    assert hashed.xxh3_128 == (wanted if hashed.stat[1] == old.st_ino else hash_file(files[0]))


def test_an_interrupted_run_goes_on_behind_the_last_piece(
    root: Path, files: list[Path], settled: None, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo_module, "_PIECE_FILES", 2)
    asked: list[list[AnyPath]] = []

    def interrupted(function: Hash, tasks: Sequence[Sequence[AnyPath]]) -> Iterable[Any]:
        asked.append([path for task in tasks for path in task])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [function(task) for task in tasks]

    with pytest.raises(KeyboardInterrupt):
        Memo(root).hashes(files, map_=interrupted)
    assert asked == [files[:2], files[2:]]
    assert Memo(root).hashes(files) == [hash_file(path) for path in files]
    assert read.count(files[0]) == read.count(files[2]) == 1


@given(st.lists(st.integers(-1, 9), max_size=20), st.integers(1, 6), st.integers(1, 20))
def test_a_piece_ends_at_its_files_and_its_bytes(sizes: list[int], files: int, size: int) -> None:
    stats = np.zeros((len(sizes), 5), np.int64)
    stats[:, memo_module.SIZE] = sizes
    pieces = [p.tolist() for p in memo_module._pieces(np.arange(len(sizes)), stats, files=files, size=size)]
    assert [place for piece in pieces for place in piece] == list(range(len(sizes)))
    for number, piece in enumerate(pieces):
        of_piece = [max(0, sizes[place]) for place in piece]
        assert sum(of_piece[:-1]) < size
        assert len(piece) <= files
        assert number == len(pieces) - 1 or len(piece) == files or sum(of_piece) >= size


@given(data=st.data())
def test_the_memo_is_a_mapping_by_stat(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever comes in whichever order, the latest entry of a stat counts; the device is another one elsewhere."""
    number = st.integers(0, 2)
    entry = st.tuples(number, number, number, number, number, st.integers(10**10, 10**10 + 2), st.sampled_from("abcd"))
    blocks = data.draw(st.lists(st.lists(entry, max_size=6), max_size=4))
    memo, wanted = Memo(tmp_path_factory.getbasetemp() / "none"), dict[tuple[int, ...], tuple[int, str]]()
    for block in blocks:
        records = [record(row[:5], row[5], row[6] * 32) for row in block]
        memo._add(np.concatenate([np.zeros(0, memo_module._RECORD), *records]))
        for *stat, ns, digest in block:
            known = wanted.get(tuple(stat[1:]))
            if known is None or known[0] < ns:
                wanted[tuple(stat[1:])] = ns, digest
    asked = np.array([(7, *stat) for stat in np.ndindex(3, 3, 3, 3)], np.int64)
    digests, is_known = memo.known_of([""] * len(asked), asked)
    places = np.flatnonzero(is_known).tolist()
    found = {tuple(asked[place, 1:].tolist()): digests[place].tobytes().hex() for place in places}
    assert found == {stat: digest * 32 for stat, (_, digest) in wanted.items()}


def test_small_files_share_a_task_and_all_are_hashed(root: Path, tmp_path: Path, settled: None) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(600)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number)
    tasks: list[int] = []

    def counted(function: Hash, given: Sequence[Sequence[AnyPath]]) -> Iterable[Any]:
        tasks.extend(map(len, given))
        return map(function, given)

    wanted = [hash_file(path) for path in paths]
    assert Memo(root).hashes(paths, map_=counted) == wanted
    assert tasks == [256, 256, 88]
    assert Memo(root / "other").hashes(paths) == wanted


def test_stats_of_what_is_not_there(files: list[Path], tmp_path: Path) -> None:
    stats, is_there = stats_of([files[0], tmp_path / "gone", "a\0b", str(files[1])])
    assert is_there.tolist() == [True, False, False, True]
    assert tuple(stats[3].tolist()) == stat_of_status(files[1].stat())
