from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.errors import CacheCorruptError, CacheError, CacheMismatchError
from forebay.store.cache import open_cache
from forebay.store.metadata import write_metadata
from forebay.store.seal import check_shard, is_whole, seal, verify_folder
from tests.store.faults import Faults, Killed
from tests.store.sealed import contents_of
from tests.store.trees import flip, tree


def values(folder: Path) -> list[dict[str, list[int]]]:
    cache = open_cache(folder)
    return [{name: value.tolist() for name, value in cache.read(i).items()} for i in range(len(cache))]


def no_exchange(monkeypatch: pytest.MonkeyPatch, code: int = errno.EINVAL) -> None:
    """A file system without renameat2."""

    class Libc:
        @staticmethod
        def renameat2(*arguments: Any) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Libc)


def test_a_sealed_folder_opens_and_is_whole(tmp_path: Path) -> None:
    scratch = tmp_path / ".building" / "x"
    assert seal(tmp_path / "caches" / "a", contents_of(scratch), scratch=scratch)
    assert len(open_cache(tmp_path / "caches" / "a")) == 5
    assert verify_folder(tmp_path / "caches" / "a").ok
    assert sorted(os.listdir(scratch)) == ["audio", "text"]


def test_shards_are_linked_and_not_written_again(tmp_path: Path) -> None:
    contents = contents_of(tmp_path / "scratch")
    seal(tmp_path / "a", contents, scratch=tmp_path / "scratch")
    for (path, _), (kept, _) in zip(
        open_cache(tmp_path / "a").shard_entries("audio"), contents.shards["audio"], strict=True
    ):
        assert os.path.samefile(path, kept)


def test_the_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        seal(tmp_path / name, contents_of(tmp_path / f"scratch-{name}"), scratch=tmp_path / f"scratch-{name}")
    one, two = ({path: entry[0] for path, entry in tree(tmp_path / name).items()} for name in "ab")
    assert one == two


@pytest.mark.parametrize("links", [True, False])
def test_a_crash_at_any_step_leaves_a_whole_cache_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    scratch, folder = tmp_path / "scratch", tmp_path / "caches" / "a"
    contents = contents_of(scratch, num_samples=2, files={"rejected.jsonl": b"{}\n"})
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    before = tree(scratch)

    def attempt(fail_at: int) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at=fail_at)
            seal(folder, contents, scratch=scratch)
        return faults.seen

    calls = attempt(-1)
    assert calls[-2:] == ["rename", "fsync"]
    assert len(calls) > 25
    for step in range(len(calls)):
        shutil.rmtree(tmp_path / "caches")
        # A link that is refused is no crash: the shard is copied.
        if calls[step] == "link":
            attempt(step)
            assert verify_folder(folder).ok
            continue
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            attempt(step)
        if step == len(calls) - 1:  # the last fsync: the folder has its name by then
            assert verify_folder(folder).ok
        else:
            assert not folder.exists()
            (tmp_path / "caches").mkdir(exist_ok=True)
        assert tree(scratch) == {**before, **{k: v for k, v in tree(scratch).items() if v[0] == "folder"}}
        assert seal(folder, contents, scratch=scratch) is (step < len(calls) - 1)
        assert verify_folder(folder).ok


def refuse_link(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def test_a_builder_killed_at_any_step_leaves_nothing_that_is_sealed_before_its_end(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    contents = contents_of(scratch, num_samples=2)
    with pytest.MonkeyPatch.context() as patch:
        calls = Faults(patch).seen
        seal(tmp_path / "done", contents, scratch=scratch)
    sealed_aside = 0
    for step in range(len(calls) - 1):  # all but the last fsync
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # a dead process tidies up nothing
            patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
            Faults(patch, fail_at=step, code=0)
            with pytest.raises(Killed, match="killed"):
                seal(tmp_path / "a", contents, scratch=scratch)
        assert not (tmp_path / "a").exists()
        left = [path for path in scratch.iterdir() if path.name.startswith("a.tmp-")]
        for path in left:
            if (path / "metadata.json").exists():
                sealed_aside += 1
                open_cache(path)
            else:
                with pytest.raises(CacheError, match="not sealed"):
                    open_cache(path)
            shutil.rmtree(path)
    assert sealed_aside == 3  # killed at the fsync after metadata.json, at mkdir of the root, at the last rename


def test_a_second_builder_is_told_that_another_was_first(tmp_path: Path) -> None:
    for name, expected in (("one", True), ("two", False)):
        scratch = tmp_path / name
        assert seal(tmp_path / "a", contents_of(scratch), scratch=scratch) is expected
        assert sorted(os.listdir(scratch)) == ["audio", "text"]


def test_of_many_builders_at_once_one_wins_and_none_fails(tmp_path: Path) -> None:
    contents = [(tmp_path / f"s{i}", contents_of(tmp_path / f"s{i}")) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(lambda c: seal(tmp_path / "a", c[1], scratch=c[0]), contents))
    assert sorted(won) == [False] * 5 + [True]
    assert verify_folder(tmp_path / "a").ok


def _seal_in_child(root: str, name: str, barrier: Any, results: Any) -> None:
    scratch = Path(root) / name
    contents = contents_of(scratch)
    barrier.wait(60)
    results.put(seal(Path(root) / "a", contents, scratch=scratch))


def test_two_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    children = [context.Process(target=_seal_in_child, args=(str(tmp_path), n, barrier, results)) for n in ("x", "y")]
    for child in children:
        child.start()
    won = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join(60)
    assert sorted(won) == [False, True]
    assert verify_folder(tmp_path / "a").ok


@pytest.mark.parametrize("has_exchange", [True, False])
def test_replacing_leaves_readers_on_what_they_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_exchange: bool
) -> None:
    if not has_exchange:
        no_exchange(monkeypatch)
    seal(tmp_path / "a", contents_of(tmp_path / "one", seed=1), scratch=tmp_path / "one")
    old = values(tmp_path / "a")
    reader = open_cache(tmp_path / "a", verify="never")
    before = [reader.read(index) for index in range(5)]
    shards = [reader.shard("audio", index) for index in range(3)]
    assert seal(tmp_path / "a", contents_of(tmp_path / "two", seed=2), scratch=tmp_path / "two", replace=True)
    for index in range(5):
        again = reader.read(index)
        assert {name: value.tolist() for name, value in again.items()} == old[index]
        assert {name: value.tolist() for name, value in before[index].items()} == old[index]
    # The row table of what is open, and not of what stands at its path now.
    assert [len(shard.column("waveform")[1]) for shard in shards] == [3, 3, 2]
    assert np.concatenate([shard.column("waveform")[0] for shard in shards]).tolist() == [
        value for sample in old for value in sample["waveform"]
    ]
    assert values(tmp_path / "a") != old
    assert sorted(os.listdir(tmp_path / "two")) == ["audio", "text"]


@pytest.mark.parametrize("damage", ["metadata", "arrays", "files", "unsealed", "garbage", "missing array"])
def test_what_no_longer_opens_does_not_stand_in_the_way(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "a"
    contents = contents_of(tmp_path / "one", files={"sources.parquet": b"sources"})
    seal(folder, contents, scratch=tmp_path / "one")
    if damage == "metadata":
        flip(folder / "metadata.json", 100)
    elif damage == "arrays":
        flip(folder / "slots.npy", 130)
    elif damage == "files":
        flip(folder / "sources.parquet", 1)
    elif damage == "unsealed":
        (folder / "metadata.json").unlink()
    elif damage == "missing array":
        (folder / "lengths.npy").unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    assert seal(folder, contents, scratch=tmp_path / "one")
    assert verify_folder(folder).ok


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert seal(tmp_path / "a", contents_of(tmp_path / "one"), scratch=tmp_path / "one")


def test_a_cache_of_a_newer_forebay_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_metadata(tmp_path / "a", {"format_version": 99})
    before = tree(tmp_path / "a")
    with pytest.raises(CacheMismatchError, match="format_version is 99"):
        seal(tmp_path / "a", contents_of(tmp_path / "one"), scratch=tmp_path / "one")
    assert tree(tmp_path / "a") == before


def test_a_file_in_the_place_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(NotADirectoryError, match="a"):
        seal(tmp_path / "a", contents_of(tmp_path / "one"), scratch=tmp_path / "one")
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_two_renames_put_the_old_cache_back_where_the_second_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_exchange(monkeypatch, errno.ENOSYS)
    seal(tmp_path / "a", contents_of(tmp_path / "one", seed=1), scratch=tmp_path / "one")
    before = tree(tmp_path / "a")
    contents = contents_of(tmp_path / "two", seed=2)
    with pytest.MonkeyPatch.context() as patch:
        real, calls = os.rename, []

        def third_fails(source: Any, target: Any) -> None:
            calls.append(source)
            if len(calls) == 3:  # to the folder: refused since it is there; the old one aside; the new one in
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(source, target)

        patch.setattr(os, "rename", third_fails)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            seal(tmp_path / "a", contents, scratch=tmp_path / "two", replace=True)
    assert tree(tmp_path / "a") == before
    assert sorted(os.listdir(tmp_path / "two")) == ["audio", "text"]


def test_an_exchange_that_fails_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_exchange(monkeypatch, errno.EACCES)
    seal(tmp_path / "a", contents_of(tmp_path / "one"), scratch=tmp_path / "one")
    before = tree(tmp_path / "a")
    with pytest.raises(PermissionError, match="Permission denied"):
        seal(tmp_path / "a", contents_of(tmp_path / "two"), scratch=tmp_path / "two", replace=True)
    assert tree(tmp_path / "a") == before


def test_a_shard_is_whole_or_not(tmp_path: Path) -> None:
    path, entry = contents_of(tmp_path).shards["audio"][0]
    check_shard(path, entry)
    assert is_whole(path, entry)
    flip(path, path.stat().st_size - 1)
    assert not is_whole(path, entry)
    with pytest.raises(CacheCorruptError, match=r"00000\.tdz: stored xxh3-128"):
        check_shard(path, entry)
    path.unlink()
    assert not is_whole(path, entry)
