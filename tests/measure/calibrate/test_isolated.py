"""Calls in processes of their own: results, errors, and deaths that cost the call alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from forebay.errors import ConfigError, ForebayError
from forebay.measure.child_process import Died, Isolated
from tests.measure.calibrate import calls


@pytest.fixture(scope="module")
def processes() -> Iterator[Isolated]:
    """One server for the module: its start imports torch and transformers, which takes seconds of CPU."""
    with Isolated() as started:
        yield started


def test_a_call_returns_what_the_function_returns_from_another_process(processes: Isolated) -> None:
    assert processes.call(calls.double, 21, plus=1) == 43
    first, second = processes.call(os.getpid), processes.call(os.getpid)
    assert len({first, second, os.getpid()}) == 3


def test_a_call_is_alone_whatever_launched_its_caller(processes: Isolated) -> None:
    assert processes.call(calls.world_size) is None


def test_a_process_that_is_killed_costs_its_call(processes: Isolated) -> None:
    died = processes.call(calls.die, int(signal.SIGKILL))
    assert died == Died(signal=signal.SIGKILL)
    assert str(died) == "killed by SIGKILL"
    assert processes.call(calls.double, 1) == 2


def test_an_error_of_ours_is_raised_here_and_any_other_is_named(processes: Isolated) -> None:
    with pytest.raises(ConfigError, match="a setting is wrong"):
        processes.call(calls.refuse)
    with pytest.raises(ForebayError, match="a trial ended with exit status 1; its traceback is above"):
        processes.call(calls.fail)


def test_memory_that_a_call_took_is_gone_with_it(processes: Isolated) -> None:
    small = processes.call(calls.peak_of, 0)
    large = processes.call(calls.peak_of, 200_000_000)
    again = processes.call(calls.peak_of, 0)
    assert isinstance(small, int)
    assert isinstance(large, int)
    assert isinstance(again, int)
    assert 190_000_000 < large - small < 300_000_000
    assert abs(again - small) < 50_000_000
