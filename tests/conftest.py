"""Settings of all tests: the machines are shared and noisy, so hypothesis judges no speed."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from forebay.terminal import Progress
from tests.warm.worker import is_cold, no_fsync, warm_workers

# Every run draws anew: what `make test` leaves out in one run comes in another. `make test-wide` draws more at once.
_ALWAYS = settings(deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("forebay", _ALWAYS, max_examples=25)
settings.register_profile("wide", _ALWAYS, max_examples=200)
settings.load_profile("forebay")

# `nohup`, `setsid` and a shell's `&` start a process that ignores Ctrl-C, and its children inherit that: tests of it
# would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# While modules are loaded there is next to no garbage, and looking for it takes a fifth of that time.
gc.disable()
_seen = SimpleNamespace(blocks=0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of a test that is marked `few` become `wide`, but those that it names, or that show each value once."""
    shown: dict[tuple[str, str], set[object]] = {}
    named: dict[str, set[str]] = {}
    cases = [item for item in items if item.get_closest_marker("few") and not item.get_closest_marker("wide")]
    kept = set()
    for least in (2, 1):  # first the cases of which all values are new, then what still lacks one
        for item in cases:
            mark, call = item.get_closest_marker("few"), item.callspec  # type: ignore[attr-defined]
            test, names = item.nodeid.partition("[")[0], sorted(call.params)
            named.setdefault(test, {*(mark.args if mark else ())}).discard(call.id)
            new = [id(call.params[name]) not in shown.setdefault((test, name), set()) for name in names]
            if call.id in mark.args if mark and mark.args else any(new) if least == 1 else all(new):
                kept.add(item)
                for name in names:
                    shown[test, name].add(id(call.params[name]))
    for item in set(cases) - kept:
        item.add_marker(pytest.mark.wide)
    for test, absent in named.items():
        if absent and not any("[" in given for given in config.args):
            raise pytest.UsageError(f"{test} is marked few({', '.join(sorted(absent))}), which is no case of it")


def pytest_collection_finish() -> None:
    """Collections that nobody asks for come less often: they are a part of the CPU of tests that make small objects."""
    _pass_over_what_is_there()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def _pass_over_what_is_there() -> None:
    """Objects that are loaded by now stay: full collections of garbage, for which accelerate asks, skip them."""
    gc.collect()
    gc.freeze()
    _seen.blocks = sys.getallocatedblocks()


def pytest_runtest_teardown() -> None:
    """Modules that tests have imported since are passed over too, now and then."""
    if sys.getallocatedblocks() > _seen.blocks + 500_000:
        _pass_over_what_is_there()


@pytest.fixture(scope="session", autouse=True)
def _workers_start_warm() -> Iterator[None]:
    """Workers of builds are processes of their own that have transformers loaded: else that is most of their time.

    No disk is waited for either, unless all is as a user has it (`tests.warm`).
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("forebay.preprocess.pool.subprocess", warm_workers())
        if not is_cold():
            monkeypatch.setattr(os, "fsync", no_fsync)
        yield


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are as wide as in a file, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True)
def _levels_of_the_commands() -> Iterator[None]:
    """The commands set levels of the process's loggers; a test must not see those of the test before it."""
    yield
    for logger in map(logging.getLogger, ("forebay", "forebay.train")):
        if logger.level != logging.NOTSET:  # setting a level goes through all loggers of the process
            logger.setLevel(logging.NOTSET)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bar says at its end, as a plain line on standard error, how far it came: quick work shows none."""
    close = Progress.close

    def closed(self: Progress) -> None:
        if self.is_shown:
            print(self.line(), file=sys.stderr)
        close(self)

    monkeypatch.setattr(Progress, "close", closed)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the life of a process, and a test must not see that of the test before it."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
