from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import RemoteMissingError
from forebay.store.files import (
    TEMPORARY_MARK,
    fsync_folder,
    hash_file,
    link_or_copy,
    remove_tree,
    write_all,
    write_aside,
    write_bytes,
)
from tests.store.faults import Faults


class ShortWriter:
    """Takes at most three bytes a call, as a pipe or a write above 2 GiB may."""

    def __init__(self) -> None:
        self.taken = b""

    def write(self, data: memoryview) -> int:
        self.taken += bytes(data[:3])
        return min(3, len(data))


def test_a_written_file_holds_the_bytes_and_nothing_else_is_there(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"one")
    write_bytes(tmp_path / "a", memoryview(b"second"))
    assert (tmp_path / "a").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a"]


def test_the_file_has_its_name_only_when_the_block_ends(tmp_path: Path) -> None:
    with write_aside(tmp_path / "a") as file:
        file.write(b"x")
        assert [TEMPORARY_MARK in name for name in os.listdir(tmp_path)] == [True]
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"old")

    def stopped() -> None:
        with write_aside(tmp_path / "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        stopped()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("has_old", [False, True])
def test_each_call_that_fails_leaves_old_or_new_and_no_temporary(tmp_path: Path, *, has_old: bool, code: int) -> None:
    target = tmp_path / "a"

    def write(fail_at: int) -> Faults:
        target.unlink(missing_ok=True)
        if has_old:
            target.write_bytes(b"old")
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at=fail_at, code=code)
            with write_aside(target) as file:
                write_all(file, b"new ")
                write_all(file, b"bytes")
        return faults

    assert write(-1).seen == ["open", "write", "write", "fsync", "rename", "fsync"]
    for step in range(6):
        with pytest.raises(OSError, match=os.strerror(code)):
            write(step)
        expected = b"new bytes" if step == 5 else b"old" if has_old else None
        assert (target.read_bytes() if target.exists() else None) == expected
        assert os.listdir(tmp_path) == (["a"] if expected is not None else [])


@given(st.binary(max_size=40))
def test_short_writes_are_continued(data: bytes) -> None:
    writer = ShortWriter()
    write_all(writer, data)  # type: ignore[arg-type]
    assert writer.taken == data


def test_an_array_of_any_shape_is_written_whole(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    write_bytes(tmp_path / "a", array.data)
    assert (tmp_path / "a").read_bytes() == array.tobytes()


@pytest.mark.parametrize("size", [0, 1, 4 * 1024 * 1024, 4 * 1024 * 1024 + 1])
def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "a").write_bytes(data)
    assert hash_file(tmp_path / "a") == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("old", ["none", "other", "same inode"])
@pytest.mark.parametrize("links", [True, False])
def test_link_or_copy_gives_the_same_bytes_and_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, old: str, links: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"bytes" * 1000)
    if old == "other":
        target.write_bytes(b"other")
    elif old == "same inode":
        os.link(source, target)
    if not links:

        def refused(*args: object, **kwargs: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", refused)
    assert link_or_copy(source, target) is links
    assert target.read_bytes() == source.read_bytes()
    assert os.path.samefile(source, target) is links
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_a_copy_onto_a_full_disk_leaves_the_old_target(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"bytes")
    target.write_bytes(b"old")
    for step in range(1, 5):  # after the link that is refused first: open, write, fsync, rename
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at=step)

            def refused(*args: object, faults: Faults = faults) -> None:
                faults.hit("link")
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

            patch.setattr(os, "link", refused)
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                link_or_copy(source, target)
        assert target.read_bytes() == b"old"
        assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_fsync_of_a_folder_that_is_none_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="file"):
        fsync_folder(tmp_path / "file")


def test_an_error_of_write_or_fsync_names_the_file(tmp_path: Path) -> None:
    target = tmp_path / "a"
    for step in (1, 2, 4):  # write, fsync, and the folder's fsync
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, fail_at=step, code=errno.EIO)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
                write_bytes(target, b"bytes")
        assert caught.value.filename == str(tmp_path if step == 4 else target)


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("after", range(8))
def test_a_folder_whose_removal_was_killed_says_of_none_that_it_is_whole(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "build"
    for name in ("metadata.json", "audio.npy", "cache/metadata.json", "cache/audio/0.tdz", "cache/audio/1.tdz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    unlink, left = os.unlink, iter(range(after))

    def counted(*arguments: Any, **options: Any) -> None:
        if next(left, None) is None:
            raise KilledError
        unlink(*arguments, **options)

    monkeypatch.setattr(os, "unlink", counted)
    with contextlib.suppress(KilledError):
        remove_tree(folder)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert len(files) == max(5 - after, 0)
    assert not [name for name in files if name.endswith("metadata.json")] or "cache/audio/0.tdz" in files
    assert folder.exists() == (after < 5)


def test_an_error_of_forebay_that_ends_a_file_keeps_its_words(tmp_path: Path) -> None:
    said = "s3://bucket/cache/audio/0.tdz: there is no such object"
    with pytest.raises(RemoteMissingError) as raised, write_aside(tmp_path / "a"):
        raise RemoteMissingError(said)
    assert str(raised.value) == said
    with pytest.raises(OSError, match=str(tmp_path / "a")), write_aside(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
