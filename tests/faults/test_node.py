"""The node's copies of stores: processes are killed at any call, the disk is full, two nodes share a bucket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import CacheError
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.holdings import counted
from forebay.store.remote.node.node import WantedFile
from tests.faults.row import Row, dice
from tests.remote.nodes import FolderBucket, disk_bytes, files, mirror_of

SHARD = 64 * 4096
SMALL = 2 * 4096
ROOM = 3
NUM = 5
_CALLS = ("open", "pread", "pwrite", "ftruncate", "fdatasync", "rename", "unlink", "mkdir")


@dataclass(frozen=True)
class Site:
    """Objects, and the number of calls that a download makes where a shard has to go for it."""

    objects: Path
    wanted: list[WantedFile]
    num_calls: int

    def bucket(self, folder: Path) -> FolderBucket:
        """The objects, with a log of requests in a folder."""
        link = folder / "objects"
        if not link.exists():
            link.symlink_to(self.objects)
        return FolderBucket(link, piece_bytes=4 * 4096)

    def mirror(self, folder: Path, *, node: str = "node") -> Mirror:
        """The mirror in a node's folder that has room for three shards."""
        return mirror_of(folder / node, self.bucket(folder), bound_bytes=ROOM * SHARD + SMALL, timeout_s=20)

    def check(self, folder: Path, *, node: str = "node") -> None:
        """Asserts that every shard that has its name is right."""
        for wanted in self.wanted:
            for path in (folder / node / "mirrors").glob(f"*/{wanted.name}"):
                assert path.read_bytes() == (self.objects / wanted.name).read_bytes()


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Makes five shards, and counts the calls of a download."""
    wanted = FolderBucket(folder / "objects").shards(NUM, size_bytes=SHARD)
    place = Site(folder / "objects", wanted, 0)
    prepare(place, folder)
    read, write = os.pipe()
    in_child(lambda: os.write(write, str(counted_calls(place, folder, at=-1)).encode()))
    yield Site(place.objects, wanted, int(os.read(read, 20)))
    os.close(read)
    os.close(write)


def prepare(place: Site, folder: Path) -> None:
    """Fills the node."""
    for wanted in place.wanted[:ROOM]:
        place.mirror(folder).require(wanted)


def counted_calls(place: Site, folder: Path, *, at: int) -> int:
    """Downloads another shard; this process is killed at its `at`-th call. Returns how many there were."""
    seen = [0]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1
            return real(*arguments, **options)

        return call

    mirror = place.mirror(folder)
    for name in _CALLS:
        setattr(os, name, counting(getattr(os, name)))
    fcntl.flock = counting(fcntl.flock)
    counted_file: Any = type("FileIO", (io.FileIO,), {"write": counting(io.FileIO.write)})
    io.FileIO = counted_file  # type: ignore[misc]
    mirror.require(place.wanted[ROOM])
    return seen[0]


def in_child(function: Callable[[], object]) -> int:
    """Runs a function in a fork; returns the signal that killed it, or 0. Its error is an AssertionError."""
    process = os.fork()
    if not process:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, "a child failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed(place: Site, number: int, folder: Path) -> str:
    at = dice("node_kill", number).randrange(place.num_calls)
    prepare(place, folder)
    assert in_child(lambda: counted_calls(place, folder, at=at)) == signal.SIGKILL
    place.check(folder)
    there = {name: path.stat().st_size for name in files(folder / "node") for path in folder.glob(f"node/*/*/{name}")}
    name = place.wanted[ROOM].name
    had, was_whole = there.get(f"{name}.{SHARD}.part"), name in there
    assert in_child(lambda: place.mirror(folder).require(place.wanted[ROOM])) == 0
    starts = [start for requested, start in place.bucket(folder).requests if requested == name]
    assert in_child(lambda: check_after(place, folder)) == 0
    place.check(folder)
    if was_whole:
        assert starts == [0]
        return "was whole"
    if had == SHARD:
        assert starts == [0]
        return "all bytes were there"
    if had:
        assert starts == [0, had]
        return "went on from the bytes that were there"
    assert starts in ([0], [0, 0])
    return "began again"


def check_after(place: Site, folder: Path) -> None:
    """Another process reads what the killed one was to read, and what came before, within the bound."""
    mirror = place.mirror(folder)
    for wanted in (place.wanted[ROOM], *place.wanted):
        mirror.require(wanted)
        with mirror.node.room.locked() as held:
            found = disk_bytes(folder / "node")
            assert found <= (held.value or 0)
            assert found <= mirror.node.bound_bytes
    left = [name for name in files(folder / "node") if name.endswith(".part")]
    assert left == []


def full_disk(place: Site, number: int, folder: Path) -> str:
    chance = dice("node_full", number)
    limit = SMALL + chance.randrange(2 * 4096, (ROOM + 1) * SHARD)

    def read() -> None:
        fill_up(folder / "node", limit)
        mirror = mirror_of(folder / "node", place.bucket(folder), bound_bytes=10**9, timeout_s=20)
        try:
            for _ in range(12):
                mirror.require(chance.choice(place.wanted))
                assert disk_bytes(folder / "node") <= limit
        except CacheError as err:
            shown = str(err)
            assert limit < SMALL + SHARD + 4096
            assert "the disk is full" in shown
            assert "set remote.shard_dir" in shown

    assert in_child(read) == 0
    place.check(folder)
    ended = files(folder / "node")
    assert in_child(lambda: [place.mirror(folder).require(wanted) for wanted in place.wanted]) == 0
    place.check(folder)
    return "all was read" if any(name.endswith(".tdz") for name in ended) else "an error with the numbers"


def fill_up(node: Path, limit: int) -> None:
    """Lets writes of this process fail where the node's files take so much."""

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if disk_bytes(node) + counted(len(data)) > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    io.FileIO = Full  # type: ignore[misc]


def two_nodes(place: Site, number: int, folder: Path) -> str:
    chance = dice("node_two", number)
    at = chance.randrange(place.num_calls)
    for node in ("one", "other"):
        (folder / node).mkdir()
        prepare(place, folder / node)
    assert in_child(lambda: counted_calls(place, folder / "one", at=at)) == signal.SIGKILL
    name = place.wanted[ROOM].name
    assert in_child(lambda: place.mirror(folder / "other").require(place.wanted[ROOM])) == 0
    assert [requested for requested, _ in place.bucket(folder / "other").requests].count(name) == 1
    for node in ("one", "other"):
        assert in_child(lambda node=node: check_after(place, folder / node)) == 0  # type: ignore[misc]
        place.check(folder / node)
    return "the other node saw nothing of it"


ROWS: list[Row[Any]] = [
    Row(
        name="node_kill",
        fault="kill -9 of a downloader at any call, where a shard has to go for the one that comes",
        outcome="nothing wrong is served; the next goes on from the bytes there; the bound holds; nothing is left",
        prepared=site,
        trial=killed,
        short=12,
        long=100,
    ),
    Row(
        name="node_full",
        fault="a disk that is full before the bound is reached",
        outcome="less is kept, or an error with folder, free and needed bytes; nothing wrong is served",
        prepared=site,
        trial=full_disk,
        short=6,
        long=100,
    ),
    Row(
        name="node_two",
        fault="two nodes on one bucket, a process of one is killed",
        outcome="each has its own cache, and the other one sees nothing of it",
        prepared=site,
        trial=two_nodes,
        short=3,
        long=50,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_node_is_right_again_at_the_next_start(row: Row[Any], tmp_path: Path) -> None:
    assert sum(row.check(tmp_path).values()) == row.short
