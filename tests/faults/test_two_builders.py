"""Two builders of one cache at once, none, one or both killed; also where locks do nothing and clocks are off."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.faults.building import Site, build_here, check_caches, check_settled, site
from tests.faults.row import Row, dice
from tests.faults.shim import Fault, without_locks

_DAY_S = 24 * 3600


def two_builders(place: Site, number: int, folder: Path) -> str:
    chance = dice("two", number)
    root = folder / "caches"
    ends = chance.choice([(False, False), (True, False), (True, True)])
    faults = [
        Fault(at=chance.randrange(place.num_calls["builder"]), what="SIGKILL") if end else Fault() for end in ends
    ]
    ended = place.children.run_all([(build_here, place.config, root, fault, {}) for fault in faults])
    assert [end.error for end in ended] == [None, None]
    check_caches(root, place.wanted)
    again = place.build(root)
    assert again.error is None, again.error
    check_settled(root, place.wanted)
    return f"{sum(end.signal > 0 for end in ended)} killed, one result"


def without_locks_and_clocks(place: Site, number: int, folder: Path) -> str:
    chance = dice("locks", number)
    root = folder / "caches"
    at = chance.randrange(place.num_calls["builder"])
    offset_s = chance.choice([-_DAY_S, 0, _DAY_S])
    is_killed = chance.random() < 0.3
    ended = place.children.run(_one_inside_another, place.config, root, at, offset_s, is_killed)
    assert ended.error is None, ended.error
    again = place.children.run(_another_clock, place.config, root, -offset_s)
    assert again.error is None, again.error
    place.build(root)
    check_settled(root, place.wanted)
    return "one killed, one result" if is_killed else "one result"


def _one_inside_another(config: Path, root: Path, at: int, offset_s: int, is_killed: bool) -> None:  # noqa: FBT001
    """Builds; at its `at`-th call a whole other build, by another clock, runs from its beginning to its end."""

    def meanwhile() -> None:
        process = os.fork()
        if not process:
            try:
                _another_clock(config, root, offset_s)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(process, 0)[1] == 0, "the build inside another failed"
        if is_killed:
            os._exit(0)

    with pytest.MonkeyPatch.context() as patch:
        without_locks(patch)
        build_here(config, root, Fault(at=at, what="meanwhile", meanwhile=meanwhile), {})


def _another_clock(config: Path, root: Path, offset_s: int) -> dict[str, Any]:
    real, real_ns = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        without_locks(patch)
        patch.setattr(time, "time", lambda: real() + offset_s)
        patch.setattr(time, "time_ns", lambda: real_ns() + offset_s * 10**9)
        return build_here(config, root, Fault(), {})


ROWS: list[Row[Any]] = [
    Row(
        name="two",
        fault="two builders at once, none, one or both killed",
        outcome="exactly one result",
        prepared=site,
        trial=two_builders,
        short=6,
        long=1000,
    ),
    Row(
        name="locks",
        fault="flock a no-op and clocks a day off, one whole build inside every call of another",
        outcome="still one right result",
        prepared=site,
        trial=without_locks_and_clocks,
        short=6,
        long=100,
    ),
]


def test_two_builders_make_one_cache(tmp_path: Path) -> None:
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


def test_neither_locks_nor_clocks_carry_correctness(tmp_path: Path) -> None:
    assert sum(ROWS[1].check(tmp_path).values()) == ROWS[1].short
