from __future__ import annotations

import threading
import time

import pytest

from forebay.measure.machine import StageClock
from forebay.spans import span


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the clock reads, which tests move."""
    found = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: found[0])
    return found


def test_a_moment_falls_to_the_innermost_stretch(now: list[float]) -> None:
    found = StageClock()
    with found.running():
        with span("read"):
            now[0] += 1
            with span("decode"):
                now[0] += 5
            now[0] += 2
        now[0] += 100
        with span("decode"):
            now[0] += 1
    assert found.wall_s == {"read": 3, "decode": 6}


def test_nothing_is_heard_outside_of_the_block(now: list[float]) -> None:
    found = StageClock()
    with span("read"):
        now[0] += 1
    assert not found.wall_s


def test_an_error_ends_its_stretch(now: list[float]) -> None:
    found = StageClock()

    def broken() -> None:
        with span("read"):
            now[0] += 1
            raise ValueError("broken")

    with found.running():
        with pytest.raises(ValueError, match="broken"):
            broken()
        now[0] += 9
        with span("decode"):
            now[0] += 2
    assert found.wall_s == {"read": 1, "decode": 2}


def test_threads_do_not_share_their_stretches() -> None:
    found, inside = StageClock(), threading.Barrier(2)

    def work() -> None:
        with span("read"):
            inside.wait(10)
            time.sleep(0.01)

    with found.running():
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found.wall_s["read"] >= 0.02  # both threads', though they slept at the same time
