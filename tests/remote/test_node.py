from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash

from forebay.errors import CacheError, ConfigError, RemoteError, RemoteReplacedError
from forebay.store.remote.node.node import WantedFile, check_bound
from forebay.store.remote.node.shared import Turns, shared
from tests.processes import ROOT
from tests.remote.nodes import FolderBucket, files, mirror_of

MB = 1_000_000


@pytest.fixture
def bucket(tmp_path: Path) -> FolderBucket:
    return FolderBucket(tmp_path / "objects")


def part_of(path: Path, wanted: WantedFile) -> Path:
    return path.with_name(f"{path.name}.{wanted.size_bytes}.part")


def start(node: Path, bucket: FolderBucket, wanted: WantedFile, *, pause_s: float = 0.0) -> subprocess.Popen[str]:
    """Starts a process that downloads one object when it is told to."""
    arguments = (node, bucket.folder, pause_s, wanted.name, wanted.size_bytes, wanted.xxh3_128)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.remote.nodes", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_file_is_the_object_whole_and_counted(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", 3 * MB)
    mirror = mirror_of(tmp_path / "node", bucket)
    path = mirror.require(wanted)
    assert path.read_bytes() == (bucket.folder / wanted.name).read_bytes()
    assert mirror.require(wanted) == path
    assert bucket.requests == [(wanted.name, 0)]
    counters = mirror.counters.to_json()
    assert counters["stall_s"] > 0
    del counters["stall_s"]
    assert counters == {
        "hits": 1,
        "misses": 1,
        "downloads": 1,
        "bytes": 3 * MB,
        "evictions": 0,
        "evicted_bytes": 0,
        "stalls": 1,
        "damaged": 0,
    }
    assert mirror.node.fetch(path, wanted, bucket) == wanted.xxh3_128


def test_processes_and_threads_download_an_object_once(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", 4 * MB)
    processes = [start(tmp_path / "node", bucket, wanted, pause_s=0.005) for _ in range(4)]
    mirror = mirror_of(tmp_path / "node", bucket)
    for process in processes:
        go(process)
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(lambda _: mirror.require(wanted), range(4)))
    assert [process.communicate()[0] for process in processes] == ["done\n"] * 4
    assert len(paths) == 1
    assert bucket.requests == [(wanted.name, 0)]
    assert files(tmp_path / "node") == {wanted.name}


def test_a_killed_owner_is_taken_over_where_it_was(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", 8 * MB)
    mirror = mirror_of(tmp_path / "node", bucket)
    part = part_of(mirror.folder / wanted.name, wanted)
    owner = start(tmp_path / "node", bucket, wanted, pause_s=0.02)
    go(owner)
    while not part.exists() or part.stat().st_size < MB:
        time.sleep(0.005)
    waiter = ThreadPoolExecutor(1).submit(mirror.require, wanted)
    time.sleep(0.1)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert waiter.result(20).read_bytes() == (bucket.folder / wanted.name).read_bytes()
    (_, first), (_, second) = bucket.requests
    assert first == 0
    assert second >= MB
    owner.communicate()


def test_a_reset_leaves_its_bytes_to_the_next(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", 2 * MB)
    mirror = mirror_of(tmp_path / "node", bucket)
    bucket.fail_at = MB
    with pytest.raises(RemoteError, match=r"s3://bucket/data/text/00000\.tdz: the connection was reset"):
        mirror.require(wanted)
    bucket.fail_at = None
    mirror.require(wanted)
    assert bucket.requests[0] == (wanted.name, 0)
    assert 0 < bucket.requests[1][1] <= MB


@pytest.mark.parametrize("damage", ["other bytes", "too long", "whole"])
def test_what_a_dead_owner_left_is_not_believed(tmp_path: Path, bucket: FolderBucket, damage: str) -> None:
    wanted = bucket.add("text/00000.tdz", MB)
    mirror = mirror_of(tmp_path / "node", bucket)
    path = mirror.require(wanted)
    data = path.read_bytes()
    left = {"other bytes": b"x" * 1000, "too long": data + b"x", "whole": data}[damage]
    part_of(path, wanted).write_bytes(left)
    path.unlink()
    assert mirror.require(wanted).read_bytes() == data
    assert len(bucket.requests) == {"other bytes": 3, "too long": 2, "whole": 1}[damage]
    assert bucket.requests[-1][1] == 0
    assert files(tmp_path / "node") == {wanted.name}


def test_without_a_hash_nothing_is_gone_on_with(tmp_path: Path, bucket: FolderBucket) -> None:
    known = bucket.add("tars/a.tar", MB)
    wanted = WantedFile(name=known.name, size_bytes=MB)
    mirror = mirror_of(tmp_path / "node", bucket)
    path = mirror.folder / wanted.name
    path.parent.mkdir()
    part_of(path, wanted).write_bytes(b"x" * 1000)
    assert mirror.node.fetch(path, wanted, bucket) == known.xxh3_128
    assert bucket.requests == [(wanted.name, 0)]
    assert mirror.node.fetch(path, wanted, bucket) == known.xxh3_128


def test_another_object_is_an_error_with_both_hashes(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", MB)
    other = bucket.add("text/00000.tdz", MB, seed=7)
    mirror = mirror_of(tmp_path / "node", bucket)
    shown = f"s3://bucket/data/text/00000.tdz: its xxh3-128 is {other.xxh3_128}, wanted {wanted.xxh3_128}, after two"
    with pytest.raises(RemoteReplacedError, match=shown):
        mirror.require(wanted)
    assert bucket.requests == [(wanted.name, 0)] * 2
    assert files(tmp_path / "node") == set()


@pytest.mark.parametrize(("size", "message"), [(MB - 1, "it has 999999 bytes"), (MB + 1, "it has more than 1000000")])
def test_an_object_of_another_size_is_an_error(tmp_path: Path, bucket: FolderBucket, size: int, message: str) -> None:
    wanted = bucket.add("text/00000.tdz", MB)
    bucket.add("text/00000.tdz", size)
    with pytest.raises(RemoteReplacedError, match=f"{message} bytes, wanted 1000000|{message}, wanted 1000000"):
        mirror_of(tmp_path / "node", bucket).require(wanted)
    assert files(tmp_path / "node") == set()


def test_a_file_that_was_cut_off_is_made_again(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", MB)
    mirror = mirror_of(tmp_path / "node", bucket)
    path = mirror.require(wanted)
    os.truncate(path, 1000)
    assert mirror.require(wanted).read_bytes() == (bucket.folder / wanted.name).read_bytes()


def test_waiters_do_not_wait_longer_than_a_request_may_take(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", MB)
    mirror = mirror_of(tmp_path / "node", bucket, timeout_s=0.3, retries=0)
    part = part_of(mirror.folder / wanted.name, wanted)
    part.parent.mkdir()
    with open(part, "wb") as stopped:
        stopped.write(b"x" * 10)
        stopped.flush()
        fcntl.flock(stopped, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(RemoteError, match=r"got no byte in 0\.3 s .*10 of 1000000 bytes are there"):
            mirror.require(wanted)
        assert time.monotonic() - began < 10
    assert bucket.requests == []


def test_a_stopped_process_with_the_room_lock_is_named(tmp_path: Path, bucket: FolderBucket) -> None:
    wanted = bucket.add("text/00000.tdz", MB)
    mirror = mirror_of(tmp_path / "node", bucket, timeout_s=0.2)
    with open(tmp_path / "node" / "room.lock", "rb+") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with pytest.raises(CacheError, match=r"room\.lock is locked for .* longer than remote\.timeout_s = 0\.2"):
            mirror.require(wanted)


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, bucket: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be locked .* local disk: set remote\.shard_dir"):
        mirror_of(tmp_path / "node", bucket)


def test_a_file_larger_than_the_bound_is_refused_at_once(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror = mirror_of(tmp_path / "node", bucket, bound_bytes=MB)
    wanted = bucket.add("tars/a.tar", 2 * MB)
    with pytest.raises(
        ConfigError, match=r"remote\.cache_size_gb = 0\.001 \(1\.000 MB\) is less than tars/a\.tar needs"
    ):
        mirror.require(wanted)
    assert not mirror.node.room.free_bytes > MB


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, bucket: FolderBucket) -> None:
    (tmp_path / "node").write_text("a file")
    with pytest.raises(ConfigError, match=r"node cannot be used .* set remote\.shard_dir to a folder of a local disk"):
        mirror_of(tmp_path / "node", bucket)


def test_a_disk_that_fails_is_named(tmp_path: Path, bucket: FolderBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = mirror_of(tmp_path / "node", bucket)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    wanted = bucket.add("text/00000.tdz", MB)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(CacheError, match=r"text/00000\.tdz cannot be written: Input/output error; set remote\.shard"):
        mirror.require(wanted)
    monkeypatch.undo()
    assert xxhash.xxh3_128_hexdigest(mirror.require(wanted).read_bytes()) == wanted.xxh3_128


def test_who_needs_it_now_goes_first() -> None:
    turns, order = Turns(), []

    def take(distance: int) -> None:
        with turns.turn(distance, most=1):
            order.append(distance)

    with turns.turn(0, most=1):
        threads = [threading.Thread(target=take, args=(distance,)) for distance in (9, 3, 0, 5)]
        for thread in threads:
            thread.start()
        while len(turns._waiting) < 4:
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [0, 3, 5, 9]


def test_no_more_at_once_than_are_allowed(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path / "objects", pause_s=0.001)
    mirror = mirror_of(tmp_path / "node", bucket, max_concurrent=2)
    wanted = bucket.shards(8, size_bytes=MB)
    most, busy = [0], mirror.node.shared.turns

    def watched(item: WantedFile) -> None:
        mirror.require(item)
        most[0] = max(most[0], busy._num_busy)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(watched, wanted))
    assert most[0] <= 2
    assert mirror.counters.downloads == 8


def test_a_child_counts_for_itself(tmp_path: Path) -> None:
    ours = shared(tmp_path)
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.write(write, b"1" if shared(tmp_path) is ours else b"0")
        os._exit(0)
    os.waitpid(process, 0)
    assert os.read(read, 1) == b"0"
    assert shared(tmp_path) is ours


def test_a_bound_below_what_one_step_needs_is_refused_with_both_numbers() -> None:
    check_bound(10**9, 10**9, what="a step")
    with pytest.raises(ConfigError, match=r"remote\.cache_size_gb = 1 \(1\.00 GB\) is less than a step .* 2\.00 GB; "):
        check_bound(10**9, 2 * 10**9, what="a step")
