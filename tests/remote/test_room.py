from __future__ import annotations

import errno
import fcntl
import gc
import io
import json
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.remote import Url
from forebay.errors import CacheError, CacheReplacedError, RemoteError
from forebay.store.held import ORIGIN
from forebay.store.layout import Ints
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.holdings import LEDGER, NEVER, Item, Known, Ledger, ReaderUses, counted, order, scan
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.node.room import LOCK
from tests.remote.nodes import URL, FolderBucket, disk_bytes, files, mirror_of

BLOCK = 4096
SHARD = 16 * BLOCK
SMALL = 2 * BLOCK
"""What a mirror says of itself: its origin and its ledger."""


@pytest.fixture
def bucket(tmp_path: Path) -> FolderBucket:
    return FolderBucket(tmp_path / "objects")


def node_with(tmp_path: Path, bucket: FolderBucket, *, shards: int, url: Url = URL) -> Mirror:
    """A mirror in a node that has room for so many shards."""
    return mirror_of(tmp_path / "node", bucket, bound_bytes=shards * SHARD + SMALL, url=url, timeout_s=20)


def names(*numbers: int) -> set[str]:
    return {f"text/{number:05d}.tdz" for number in numbers}


def use(mirror: Mirror, wanted: WantedFile, *, seconds_ago: float) -> None:
    """Says that a shard was last used then."""
    then = time.time() - seconds_ago
    os.utime(mirror.folder / wanted.name, (then, then))


def reader(mirror: Mirror, steps: Mapping[int, int], *, shards: int) -> ReaderUses:
    told = ReaderUses(mirror.node.folder, mirror.folder.name, num_shards=shards)
    for number, step in steps.items():
        told.next_use[number] = step
    return told


def pin(mirror: Mirror, wanted: WantedFile) -> io.FileIO:
    file = io.FileIO(mirror.folder / wanted.name)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def test_the_least_recently_used_goes_where_nobody_tells(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=3), bucket.shards(4, size_bytes=SHARD)
    for number in (2, 0, 1):
        use(mirror, shards[number], seconds_ago=0) if mirror.require(shards[number]) else None
    use(mirror, shards[2], seconds_ago=100)
    use(mirror, shards[0], seconds_ago=300)
    use(mirror, shards[1], seconds_ago=200)
    mirror.require(shards[3])
    assert files(tmp_path / "node") == names(1, 2, 3)
    assert (mirror.counters.evictions, mirror.counters.evicted_bytes) == (1, SHARD)


def test_a_file_counts_as_used_when_it_is_asked_for(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, (wanted, *_) = node_with(tmp_path, bucket, shards=3), bucket.shards(1, size_bytes=SHARD)
    mirror.require(wanted)
    use(mirror, wanted, seconds_ago=100)
    mirror.require(wanted)
    assert time.time() - (mirror.folder / wanted.name).stat().st_mtime < 50


def test_what_is_needed_last_goes_first(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=3), bucket.shards(6, size_bytes=SHARD)
    told = reader(mirror, {0: 5, 1: 50, 2: 7, 3: 1, 4: 3}, shards=6)
    for number in (0, 1, 2, 3):
        mirror.require(shards[number])
    assert files(tmp_path / "node") == names(0, 2, 3)
    mirror.require(shards[4])
    assert files(tmp_path / "node") == names(0, 3, 4)
    told.next_use[3] = NEVER
    mirror.require(shards[5])
    assert files(tmp_path / "node") == names(0, 4, 5)
    told.close()


def test_the_reader_that_needs_it_first_counts(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=2), bucket.shards(3, size_bytes=SHARD)
    one, other = reader(mirror, {0: 100, 1: 20}, shards=3), reader(mirror, {0: 10, 1: 200}, shards=3)
    for wanted in shards:
        mirror.require(wanted)
    assert files(tmp_path / "node") == names(0, 2)
    one.close()
    other.close()


def test_files_that_nobody_tells_of_go_before_those_of_readers(tmp_path: Path, bucket: FolderBucket) -> None:
    shards = bucket.shards(3, size_bytes=SHARD)
    mirror = mirror_of(tmp_path / "node", bucket, bound_bytes=2 * SHARD + 2 * SMALL)
    other = mirror_of(tmp_path / "node", bucket, bound_bytes=2 * SHARD + 2 * SMALL, url=Url("s3", "bucket", "other"))
    other.require(shards[0])
    mirror.require(shards[0])
    told = reader(mirror, {0: 1_000}, shards=3)
    mirror.require(shards[1])
    assert not (other.folder / shards[0].name).exists()
    assert files(tmp_path / "node") == names(0, 1)
    told.close()


def test_a_download_ahead_takes_nothing_that_is_needed_as_soon(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=2), bucket.shards(4, size_bytes=SHARD)
    told = reader(mirror, {0: 5, 1: 9, 2: 9, 3: 8}, shards=4)
    mirror.require(shards[0])
    mirror.require(shards[1])
    assert not mirror.fetch_ahead(shards[2], distance=9)
    assert files(tmp_path / "node") == names(0, 1)
    assert mirror.fetch_ahead(shards[3], distance=8)
    assert mirror.fetch_ahead(shards[3], distance=8)
    assert files(tmp_path / "node") == names(0, 3)
    assert mirror.counters.stalls == 2
    told.close()


def test_partial_files_of_nobody_go_first(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=2), bucket.shards(3, size_bytes=SHARD)
    bucket.fail_at = bucket.piece_bytes = BLOCK
    with pytest.raises(RemoteError, match="reset"):
        mirror.require(shards[0])
    bucket.fail_at = None
    mirror.require(shards[1])
    use(mirror, shards[1], seconds_ago=1_000)
    assert files(tmp_path / "node") == {f"{shards[0].name}.{SHARD}.part", shards[1].name}
    mirror.require(shards[2])
    assert files(tmp_path / "node") == names(1, 2)
    assert mirror.counters.evictions == 0


def test_what_is_read_or_downloaded_stays(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=2), bucket.shards(3, size_bytes=SHARD)
    mirror.require(shards[0])
    mirror.require(shards[1])
    use(mirror, shards[0], seconds_ago=1_000)
    with pin(mirror, shards[0]):
        mirror.require(shards[2])
        assert files(tmp_path / "node") == names(0, 2)


def test_where_all_is_read_the_error_has_the_numbers(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=2), bucket.shards(3, size_bytes=SHARD)
    mirror.node.room.timeout_s, mirror.node.settings = 0.3, replace(mirror.settings, timeout_s=0.3)
    with ExitStack() as stack:
        for wanted in shards[:2]:
            mirror.require(wanted)
            stack.enter_context(pin(mirror, wanted))
        message = (
            r"no room after \d+ s: text/00002\.tdz needs 0\.066 MB; of the bound of 0\.139 MB 0\.139 MB are taken, "
        )
        with pytest.raises(CacheError, match=message + r"0\.131 MB of these .*; raise remote\.cache_size_gb"):
            mirror.require(shards[2])
        assert not mirror.fetch_ahead(shards[2], distance=1)
    assert mirror.require(shards[2])


def test_who_waits_for_room_goes_on_when_it_is_there(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=1), bucket.shards(2, size_bytes=SHARD)
    mirror.require(shards[0])
    with ThreadPoolExecutor(1) as threads:
        with pin(mirror, shards[0]):
            waiter = threads.submit(mirror.require, shards[1])
            time.sleep(0.1)
            assert not waiter.done()
        assert waiter.result(5).exists()


class Keeper:
    """Keeps shards mapped in case they are read again."""

    def __init__(self, mirror: Mirror) -> None:
        self.folder = mirror.folder
        self.kept: dict[str, io.FileIO] = {}

    def let_go(self, name: str | None) -> None:
        for key in [name] if name else list(self.kept)[: -(-len(self.kept) // 2)]:
            if (file := self.kept.pop(key, None)) is not None:
                file.close()


def test_our_own_mappings_are_closed_for_it(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=3), bucket.shards(4, size_bytes=SHARD)
    keeper = Keeper(mirror)
    mirror.node.shared.hold(keeper)
    for number, wanted in enumerate(shards[:3]):
        mirror.require(wanted)
        keeper.kept[wanted.name] = pin(mirror, wanted)
        use(mirror, wanted, seconds_ago=1_000 - number)
    mirror.require(shards[3])
    assert set(keeper.kept) == names(1, 2)
    keeper.let_go(None)
    keeper.let_go(None)


def test_other_processes_close_theirs(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=2), bucket.shards(3, size_bytes=SHARD)
    mirror.require(shards[0])
    mirror.require(shards[1])
    read, write = os.pipe()
    process = os.fork()
    if not process:  # reads nothing, keeps everything
        keeper = Keeper(mirror)
        keeper.kept = {wanted.name: pin(mirror, wanted) for wanted in shards[:2]}
        mirror.node.shared.hold(keeper)
        os.write(write, b"1")
        time.sleep(20)
        os._exit(0)
    os.read(read, 1)
    try:
        mirror.require(shards[2])
        assert shards[2].name in files(tmp_path / "node")
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)


def test_a_squeeze_asks_no_more_often_than_it_should(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror = mirror_of(tmp_path / "node", bucket)
    node = mirror.node.shared
    assert node.squeezed_ns == 0
    node.squeeze(at_most_every_s=100)
    first = node.squeezed_ns
    assert first > 0
    node.squeeze(at_most_every_s=100)
    assert node.squeezed_ns == first
    node.squeeze(at_most_every_s=0)
    assert node.squeezed_ns > first


def test_the_watch_ends_with_the_last_holder(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror = mirror_of(tmp_path / "node", bucket)
    keeper = Keeper(mirror)
    mirror.node.shared.hold(keeper)
    watch = mirror.node.shared._watcher
    assert watch is not None
    del keeper
    gc.collect()
    watch.join(10)
    assert not watch.is_alive()
    again = Keeper(mirror)
    mirror.node.shared.hold(again)
    assert mirror.node.shared._watcher is not watch


def test_strangers_are_left_alone(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=2), bucket.shards(4, size_bytes=SHARD)
    mirror.require(shards[0])
    outside = tmp_path / "outside"
    (outside / "text").mkdir(parents=True)
    node = tmp_path / "node"
    planted = [
        mirror.folder / "text" / "00009.tdz",
        mirror.folder / "notes.txt",
        mirror.folder / "text" / "00009.tdz.100.part",
        node / "text" / "00000.tdz",
        node / "mirrors" / "caches" / "text" / "00000.tdz",
        outside / "text" / "00000.tdz",
    ]
    for path in planted:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * SHARD)
        os.utime(path, (0, 0))
    # Another mirror whose folder, or whose file, leads out.
    other = mirror_of(node, bucket, bound_bytes=10**9, url=Url("s3", "bucket", "other"))
    Ledger(other.folder).add(shards[0].name, Known(0))
    (other.folder / "text").symlink_to(outside / "text")
    third = mirror_of(node, bucket, bound_bytes=10**9, url=Url("s3", "bucket", "third"))
    Ledger(third.folder).add(shards[0].name, Known(0))
    (third.folder / "text").mkdir()
    (third.folder / shards[0].name).symlink_to(outside / shards[0].name)
    (node / "mirrors" / "link").symlink_to(third.folder)
    # A ledger that a stranger wrote.
    line = json.dumps(["../../../outside/text/00000.tdz", 0, False]) + "\n"
    (third.folder / LEDGER).write_text((third.folder / LEDGER).read_text() + line)
    bound = mirror_of(node, bucket, bound_bytes=2 * SHARD + 3 * SMALL)
    for wanted in shards:
        bound.require(wanted)
    assert files(node) & names(0, 1, 2, 3) >= names(2, 3)
    assert not (mirror.folder / shards[0].name).exists()
    assert all(path.read_bytes() == b"x" * SHARD for path in planted)
    assert (third.folder / shards[0].name).is_symlink()


def test_a_sum_that_lies_or_is_damaged_is_counted_anew(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=3), bucket.shards(6, size_bytes=SHARD)
    lock = tmp_path / "node" / LOCK
    for wanted in shards[:3]:
        mirror.require(wanted)
    with mirror.node.room.locked() as held:
        assert held.value == 3 * SHARD + SMALL
    for damaged in (b"", b"x" * 7, b"x" * 16, lock.read_bytes() + b"x"):
        lock.write_bytes(damaged)
        with mirror.node.room.locked() as held:
            assert held.value is None
            held.add(5)
            assert held.value is None
        mirror.require(shards[3])
        mirror.require(shards[4])
        mirror.require(shards[5])
        assert disk_bytes(tmp_path / "node") <= mirror.node.bound_bytes
        for wanted in shards[:3]:
            mirror.require(wanted)
    with mirror.node.room.locked() as held:  # too high, as a killed process leaves it: nothing is evicted for it
        held.value = 10**9
    (mirror.folder / shards[2].name).unlink()
    before = mirror.counters.evictions
    mirror.require(shards[2])
    assert mirror.counters.evictions == before
    with mirror.node.room.locked() as held:
        assert held.value == 3 * SHARD + SMALL


def test_two_kept_files_and_a_mirror_that_nobody_opens_any_more(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror = mirror_of(tmp_path / "node", bucket, bound_bytes=SHARD + 2 * SMALL + BLOCK)
    old = mirror_of(tmp_path / "node", bucket, bound_bytes=10**9, url=Url("s3", "bucket", "old"))
    young = mirror_of(tmp_path / "node", bucket, bound_bytes=10**9, url=Url("s3", "bucket", "young"))
    shards = bucket.shards(4, size_bytes=SHARD)
    for each in (old, young):
        each.node.keep(each.folder / "a" / "small", WantedFile(name="a/small", size_bytes=5, is_kept=True), b"small")
    (old.folder / "mine.txt").write_text("a stranger's")
    os.utime(old.folder / ORIGIN, (0, 0))
    mirror.require(shards[0])
    assert sorted(path.name for path in old.folder.iterdir()) == ["mine.txt"]
    assert (young.folder / "a" / "small").read_bytes() == b"small"
    with pytest.raises(CacheReplacedError, match=r"the mirror of s3://bucket/old, was removed; open s3://bucket/old"):
        old.require(shards[1])


def test_a_mirror_that_is_open_stays(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror, shards = node_with(tmp_path, bucket, shards=1), bucket.shards(3, size_bytes=SHARD)
    old = mirror_of(tmp_path / "node", bucket, bound_bytes=10**9, url=Url("s3", "bucket", "old"))
    (old.folder / "metadata.json").write_text("{}")
    os.utime(old.folder / ORIGIN, (0, 0))
    bound = mirror_of(tmp_path / "node", bucket, bound_bytes=SHARD + 2 * SMALL)
    with open(old.folder / "metadata.json") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        bound.require(shards[0])
        bound.require(shards[1])
        assert (old.folder / ORIGIN).exists()
    assert mirror.folder == bound.folder
    bound.node.shared.listing.took_s = 0.0  # it is counted anew
    bound.require(shards[2])
    assert not (old.folder / ORIGIN).exists()
    assert (old.folder / "metadata.json").exists()  # it is in no ledger


def test_a_full_disk_halves_what_is_kept(
    tmp_path: Path, bucket: FolderBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, shards = mirror_of(tmp_path / "node", bucket), bucket.shards(12, size_bytes=SHARD)
    limit = 6 * SHARD + SMALL
    fill_up(monkeypatch, tmp_path / "node", limit)
    for wanted in shards:
        mirror.require(wanted)
        assert (mirror.folder / wanted.name).read_bytes() == (bucket.folder / wanted.name).read_bytes()
        assert disk_bytes(tmp_path / "node") <= limit
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert (
        "the disk is full at 0.467 MB, below the bound of 1.00 GB (remote.cache_size_gb); this process" in warnings[0]
    )
    assert mirror.counters.evictions >= 6


def test_a_full_disk_where_nothing_can_go(
    tmp_path: Path, bucket: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, shards = mirror_of(tmp_path / "node", bucket), bucket.shards(1, size_bytes=SHARD)
    fill_up(monkeypatch, tmp_path / "node", SMALL + BLOCK)
    with pytest.raises(
        CacheError, match=r"node: the disk is full: .* are free, text/00000\.tdz needs 0\.066 MB, .* rem"
    ):
        mirror.require(shards[0])


def fill_up(patch: pytest.MonkeyPatch, node: Path, limit: int) -> None:
    """Lets the disk be full where the node's files take so much."""
    real = io.FileIO

    class Full(real):  # type: ignore[misc, valid-type]
        def write(self, data: bytes) -> int:
            if disk_bytes(node) + counted(len(data)) > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written: int = super().write(data)
            return written

    patch.setattr(io, "FileIO", Full)


def test_the_bound_holds_while_many_read(tmp_path: Path, bucket: FolderBucket) -> None:
    """Four processes over a node with room for three shards; each reads one at a time."""
    mirror, shards = node_with(tmp_path, bucket, shards=3), bucket.shards(8, size_bytes=SHARD)
    mirror.node.room.timeout_s, mirror.node.settings = 30, replace(mirror.settings, timeout_s=30)
    processes = []
    for seed in range(4):
        process = os.fork()
        if not process:
            os._exit(_read_at_random(mirror, shards, bucket, seed))
        processes.append(process)
    highest, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            with mirror.node.room.locked():  # else a file counts that went before another one came
                highest[0] = max(highest[0], disk_bytes(tmp_path / "node"))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ends = [os.waitpid(process, 0)[1] for process in processes]
    is_over.set()
    watcher.join()
    assert ends == [0, 0, 0, 0]
    assert 3 * SHARD <= highest[0] <= mirror.node.bound_bytes


def _read_at_random(mirror: Mirror, shards: list[WantedFile], bucket: FolderBucket, seed: int) -> int:
    numbers = np.random.default_rng(seed).integers(0, len(shards), 60)
    for wanted in (shards[number] for number in numbers):
        while True:
            path = mirror.require(wanted)
            try:
                file = pin(mirror, wanted)
            except FileNotFoundError:
                continue
            if os.fstat(file.fileno()).st_nlink:
                break
            file.close()
        if file.readall() != (bucket.folder / wanted.name).read_bytes():
            return 1
        file.close()
        assert path
    return 0


ITEMS = st.lists(
    st.builds(
        Item,
        mirror=st.sampled_from("abc"),
        name=st.uuids().map(str),
        size_bytes=st.just(1),
        used_ns=st.integers(0, 5),
        number=st.integers(-1, 6),
        kind=st.sampled_from(["file", "file", "partial", "kept"]),
    ),
    max_size=12,
)
STEPS = st.lists(st.one_of(st.integers(0, 6), st.just(NEVER)), min_size=5, max_size=5)


@given(items=ITEMS, told=st.dictionaries(st.sampled_from("ab"), st.none() | STEPS), distance=st.integers(0, 6))
def test_the_order_is_that_of_a_plain_model(
    items: list[Item], told: dict[str, list[int] | None], distance: int
) -> None:
    arrays: dict[str, Ints | None] = {key: np.array(steps) if steps else None for key, steps in told.items()}
    found = order(items, arrays, distance=distance)
    left, expected = [item for item in items if item.kind != "kept"], []
    while left:
        partials = [item for item in left if item.kind == "partial"]
        untold = [item for item in left if _steps(item, told) is None]
        group = partials or untold or left
        farthest = max(_steps(item, told) or 0 for item in group) if group is left else None
        group = [item for item in group if farthest is None or _steps(item, told) == farthest]
        if farthest is not None and distance and farthest <= distance:
            break
        next_one = min(group, key=lambda item: item.used_ns)
        expected.append(next_one)
        left.remove(next_one)
    assert [(item.kind, _steps(item, told), item.used_ns) for item in found] == [
        (item.kind, _steps(item, told), item.used_ns) for item in expected
    ]


def _steps(item: Item, told: Mapping[str, list[int] | None]) -> int | None:
    steps = told.get(item.mirror)
    return steps[item.number] if steps and 0 <= item.number < len(steps) else None


def test_a_ledger_reads_only_what_is_whole(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.known() == {}
    ledger.add("text/00000.tdz", Known(0))
    other = Ledger(tmp_path)
    other.add("text/00001.tdz", Known(1))
    other.add("text/00001.tdz", Known(1))
    assert len((tmp_path / LEDGER).read_text().splitlines()) == 2
    with open(tmp_path / LEDGER, "ab") as file:
        file.write(b'["text/00002.t')
    assert set(ledger.known()) == names(0, 1)
    ledger.add("text/00003.tdz", Known(3))
    assert set(ledger.known()) == set(other.known()) == names(0, 1, 3)
    for line in (
        b"[]\n",
        b"\xff\n",
        b'["/etc/x", 1, false]\n',
        b'["a/../b", 1, false]\n',
        b'["origin.json", 1, true]\n',
    ):
        with open(tmp_path / LEDGER, "ab") as file:
            file.write(line)
    assert set(ledger.known()) == names(0, 1, 3)
    (tmp_path / LEDGER).unlink()
    assert ledger.known() == {}


def test_what_is_counted_is_what_the_disk_says(tmp_path: Path, bucket: FolderBucket) -> None:
    mirror = mirror_of(tmp_path / "node", bucket)
    for number, size in enumerate((1, BLOCK, BLOCK + 1, SHARD)):
        mirror.require(bucket.add(f"text/{number:05d}.tdz", size, number=number))
    os.sync()
    assert sum(item.size_bytes for item in scan(tmp_path / "node", {})) == disk_bytes(tmp_path / "node")
    with mirror.node.room.locked() as held:
        assert held.value == disk_bytes(tmp_path / "node")
