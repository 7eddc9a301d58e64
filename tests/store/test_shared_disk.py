"""A disk of several machines, in one process: errors and mounts are injected, nothing is mounted."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import CacheReplacedError, ConfigError
from forebay.store import shared_disk
from forebay.store.cache import open_cache
from forebay.store.files import link_or_copy, remove_aside, sweep, temporary_name, write_bytes
from forebay.store.held import HeldFolder, readers_of
from forebay.store.remote.node.shared import locked
from forebay.store.seal import _exchange, publish, verify_folder
from forebay.store.shared_disk import has_locks, is_late, lock_for_work, move, seen
from tests.store_factory import make_cache

DAY_S = 24 * 3600
REFUSALS = [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS]


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every folder one of an NFS mount with these options; waiting ends after a second."""

    def mounted(*options: str) -> None:
        monkeypatch.setattr(shared_disk, "LATE_S", 1.0)
        monkeypatch.setattr(shared_disk, "_mount_of", lambda _: ("nfs4", frozenset(options)))

    return mounted


def without_locks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_local_disk_is_not_late_and_has_locks(tmp_path: Path) -> None:
    assert not is_late(tmp_path / "not" / "there")
    assert has_locks(tmp_path)
    assert not seen(lambda: False, tmp_path, what="nothing")


@pytest.mark.parametrize(
    ("line", "late", "locks"),
    [
        ("1 2 {device} / / rw,relatime shared:1 - nfs4 server:/disk rw,vers=4.2,local_lock=none", True, True),
        ("1 2 {device} / / rw - nfs server:/disk rw,vers=3,nolock,local_lock=all", True, False),
        ("1 2 {device} / / rw - nfs server:/disk rw,vers=3,local_lock=flock", True, False),
        ("1 2 {device} / / rw - lustre mgs:/fs rw,flock", True, True),
        ("1 2 {device} / / rw - lustre mgs:/fs rw,localflock", True, False),
        ("1 2 {device} / / rw - fuse.gcsfuse bucket rw", True, False),
        ("1 2 {device} / / rw - ext4 /dev/sda rw", False, True),
        ("1 2 0:9999 / / rw - nfs server:/disk rw", False, True),
    ],
)
def test_what_a_mount_promises_is_read_from_the_kernels_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, *, late: bool, locks: bool
) -> None:
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "mountinfo"
    table.write_text(line.format(device=f"{os.major(device)}:{os.minor(device)}") + "\n")
    monkeypatch.setattr(shared_disk, "_MOUNTS", table)
    assert (is_late(tmp_path), has_locks(tmp_path)) == (late, locks)


def test_what_shows_late_is_waited_for(tmp_path: Path, on_nfs: Callable[..., None]) -> None:
    on_nfs()
    end = time.monotonic() + 0.2
    assert seen(lambda: time.monotonic() > end, tmp_path, what="a clock")


def test_a_rename_whose_answer_is_lost_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_nfs: Callable[..., None]
) -> None:
    on_nfs()
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)  # as a client that has got no answer does

    monkeypatch.setattr(os, "rename", rename)
    write_bytes(tmp_path / "a", b"new")
    assert (os.listdir(tmp_path), (tmp_path / "a").read_bytes()) == (["a"], b"new")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        move(tmp_path / "nowhere", tmp_path / "b")


def test_a_link_whose_answer_is_lost_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "a").write_bytes(b"bytes")
    assert link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").samefile(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("code", REFUSALS)
def test_without_locks_a_replaced_cache_stays_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    one, two = (make_cache(tmp_path / str(n), num_samples=6, rows_per_shard=n, max_duration_s=0.1) for n in (2, 3))
    without_locks(monkeypatch, code)
    assert readers_of(one) == "unknown"
    reader = open_cache(one, max_open_shards=1)
    assert publish(two, one, replace=True)
    (aside,) = one.parent.glob("*.tmp-*")
    assert all(reader.read(index) for index in range(len(reader)))
    monkeypatch.setattr("forebay.store.files.is_running", lambda _: False)  # the rebuild has ended
    assert sweep(one.parent) == []
    os.utime(aside, (time.time() - DAY_S - 60,) * 2)
    assert sweep(one.parent) == [aside]
    assert open_cache(one).num_shards == 2


def test_locks_of_one_machine_say_nothing_of_the_others(tmp_path: Path, on_nfs: Callable[..., None]) -> None:
    folder = make_cache(tmp_path, num_samples=2, max_duration_s=0.1)
    on_nfs("local_lock=none")
    assert readers_of(folder) == "none"
    on_nfs("local_lock=flock")
    assert readers_of(folder) == "unknown"
    held = HeldFolder(folder)
    assert readers_of(folder) == "some"
    del held
    assert not remove_aside(folder)
    assert folder.is_dir()


def test_a_stale_file_is_of_a_replaced_cache_though_the_path_shows_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (make_cache(tmp_path / str(n), num_samples=6, rows_per_shard=n, max_duration_s=0.1) for n in (2, 3))
    cache, real, stale = open_cache(one), os.open, os.stat(one)
    monkeypatch.setattr("forebay.store.held._is_at", lambda *_: True)  # its attributes are old

    def opened(name: Any, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if dir_fd is not None and os.path.samestat(os.fstat(dir_fd), stale):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
        return real(name, flags, *mode, dir_fd=dir_fd)

    _exchange(two, one)
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(CacheReplacedError, match=r"was replaced or removed .*00002.tdz of it is gone; open it again"):
        cache.read(5)


def test_what_was_deleted_while_it_was_open_is_no_foreign_file(tmp_path: Path) -> None:
    folder = make_cache(tmp_path, num_samples=2, max_duration_s=0.1)
    (folder / "audio" / ".nfs000000000000002a00000001").touch()
    assert verify_folder(folder).ok


def test_a_folder_that_silly_names_keep_is_swept_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary_name(tmp_path / "plan")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / ".nfs01").touch()
    monkeypatch.setattr("forebay.store.files.is_running", lambda _: False)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as with a file in it that is open
    assert sweep(tmp_path) == [folder]
    monkeypatch.undo()
    monkeypatch.setattr("forebay.store.files.is_running", lambda _: False)
    assert sweep(tmp_path) == [folder]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", REFUSALS)
def test_without_locks_work_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    without_locks(monkeypatch, code)
    with open(tmp_path / "lock", "wb") as file:
        assert not lock_for_work(file.fileno(), tmp_path / "lock")


def test_a_lock_that_nobody_gives_back_is_not_waited_for_without_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open(tmp_path / "lock", "wb") as dead, open(tmp_path / "lock", "wb") as file:
        fcntl.flock(dead, fcntl.LOCK_EX)
        assert not lock_for_work(file.fileno(), tmp_path / "lock", patience_s=0.05)
        assert "going on without it" in caplog.text
        fcntl.flock(dead, fcntl.LOCK_UN)
        assert lock_for_work(file.fileno(), tmp_path / "lock")


def test_a_nodes_folder_with_locks_that_do_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with (
        pytest.raises(ConfigError, match=r"grants a lock that another process holds.*set remote\.shard_dir"),
        locked(tmp_path / "room.lock", timeout_s=1.0),
    ):
        pass
