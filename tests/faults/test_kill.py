"""kill -9 of the builder, or of one of its workers, at any call that changes a file."""

from __future__ import annotations

from pathlib import Path

from tests.faults.building import NUM_WORKERS, Site, check_caches, check_settled, finished_shards, site
from tests.faults.row import Row, dice
from tests.faults.shim import Fault


def killed(place: Site, number: int, folder: Path) -> str:
    chance = dice("kill", number)
    root = folder / "caches"
    who = chance.choice(["builder", "builder", "worker"])
    ended = place.build(root, Fault(at=chance.randrange(place.num_calls[who]), what="SIGKILL", who=who))
    assert ended.error is None, ended.error
    caches = check_caches(root, place.wanted)
    finished = finished_shards(root)
    made = len(list(root.glob(".building/*/*/*.tdz")))
    assert made - finished <= NUM_WORKERS
    again = place.build(root)
    assert again.error is None, again.error
    check_settled(root, place.wanted)
    if caches:
        assert again.value["already_sealed"]
        return "sealed before the kill" if ended.signal else "a worker died and the build went on"
    assert ended.signal
    assert again.value["shards_kept"] >= finished
    assert again.value["shards_written"] + finished <= len(place.wanted)
    return "went on from the finished shards" if finished else "began again"


ROW = Row(
    name="kill",
    fault="kill -9 of the builder or of one worker mid-build",
    outcome="never opens wrong; resumes; at most one shard a worker redone; bytes equal an uninterrupted build",
    prepared=site,
    trial=killed,
    short=8,
    long=1000,
)


def test_a_killed_build_never_opens_wrong_and_goes_on(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
