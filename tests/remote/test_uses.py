from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.remote.foresight import NextUses
from forebay.store.remote.node.holdings import FOLDER, NEVER, ReaderUses, distances


def test_the_soonest_use_of_all_readers(tmp_path: Path) -> None:
    assert distances(tmp_path, "mirror") is None
    one, other = (ReaderUses(tmp_path, "mirror", num_shards=4) for _ in range(2))
    one.next_use[:] = [10, 30, NEVER, 2]
    other.next_use[:] = [50, 25, NEVER, NEVER]
    one.now, other.now = 5, 20
    found = distances(tmp_path, "mirror")
    assert found is not None
    assert found.tolist() == [5, 5, NEVER, 0]  # what a reader has behind it, it needs now
    assert (one.now, other.now) == (5, 20)
    one.close()
    found = distances(tmp_path, "mirror")
    assert found is not None
    assert found.tolist() == [30, 5, NEVER, NEVER]
    other.close()
    assert distances(tmp_path, "mirror") is None
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_mirrors_do_not_mix(tmp_path: Path) -> None:
    one, other = ReaderUses(tmp_path, "a[b]", num_shards=2), ReaderUses(tmp_path, "ab", num_shards=3)
    found = [distances(tmp_path, name) for name in ("a[b]", "ab")]
    assert [None if steps is None else steps.tolist() for steps in found] == [[NEVER] * 2, [NEVER] * 3]
    one.close()
    other.close()


def test_a_dead_reader_counts_for_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    process = os.fork()
    if not process:
        uses = ReaderUses(tmp_path, "mirror", num_shards=2)
        uses.next_use[:] = 1
        os.write(write, b"1")
        time.sleep(30)
        os._exit(0)
    os.read(read, 1)
    found = distances(tmp_path, "mirror")
    assert found is not None
    assert found.tolist() == [1, 1]
    os.kill(process, 9)
    os.waitpid(process, 0)
    assert distances(tmp_path, "mirror") is None
    assert list((tmp_path / FOLDER).iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"x", np.zeros(1, np.int64).tobytes(), np.zeros(9, np.int64).tobytes()])
def test_a_file_of_another_length_counts_for_nothing(tmp_path: Path, data: bytes) -> None:
    uses = ReaderUses(tmp_path, "mirror", num_shards=2)
    path = tmp_path / FOLDER / "mirror.zz.uses"
    path.write_bytes(data[: len(data) - len(data) % 8])
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = distances(tmp_path, "mirror")
    assert found is not None
    uses.close()


def test_a_file_taken_away_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        distances(tmp_path, "mirror")
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    uses = ReaderUses(tmp_path, "mirror", num_shards=2)
    assert list((tmp_path / FOLDER).iterdir()) == [uses.path]
    assert distances(tmp_path, "mirror") is not None
    uses.close()


NUM_SHARDS = 6
steps_of_shards = st.lists(st.sets(st.integers(0, NUM_SHARDS - 1)), max_size=60)


def plain(needed: list[set[int]], *, now: int, looked_at: int) -> list[int]:
    return [
        next((step for step in range(now, looked_at) if shard in needed[step]), NEVER) for shard in range(NUM_SHARDS)
    ]


@given(needed=steps_of_shards, moves=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30))
def test_the_next_use_of_a_shard_is_what_a_scan_of_the_steps_finds(
    needed: list[set[int]], moves: list[tuple[bool, int]]
) -> None:
    uses, now, looked_at = NextUses(NUM_SHARDS), 0, 0
    for looks, count in moves:
        if looks:
            part = needed[looked_at : looked_at + count]
            uses.extend([np.array(sorted(shards), np.int64) for shards in part])
            looked_at += len(part)
        else:
            now += count  # behind what was looked at too: a loader may be faster
            uses.advance(now)
        assert uses.next_use.tolist() == plain(needed, now=now, looked_at=looked_at)
        assert len(uses) == sum(len(shards) for shards in needed[now:looked_at])
        assert uses.num_known == sum(step < NEVER for step in uses.next_use.tolist())


def test_more_uses_than_the_rings_were_made_for_are_kept() -> None:
    rng = np.random.default_rng(0)
    needed = [set(rng.integers(0, NUM_SHARDS, 4).tolist()) for _ in range(2000)]
    uses = NextUses(NUM_SHARDS)
    uses.extend([np.array(sorted(shards)) for shards in needed[:200]])
    uses.advance(150)
    uses.extend([np.array(sorted(shards)) for shards in needed[200:]])
    for now in (150, 151, 900, 1990, 2000):
        uses.advance(now)
        assert uses.next_use.tolist() == plain(needed, now=now, looked_at=2000)


def test_time_does_not_go_back() -> None:
    uses = NextUses(2)
    uses.extend([np.array([0]), np.array([1])])
    uses.advance(1)
    uses.advance(0)
    assert (uses.now, uses.next_use.tolist()) == (1, [NEVER, 1])
