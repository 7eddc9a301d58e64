"""Many readers at once: forked before and after the cache was opened, or spawned, while the parent reads."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.cache import Cache, open_cache
from tests.faults.children import Children, serving
from tests.faults.row import Row
from tests.store_factory import make_cache

_NUM_READERS = 4
_ROUNDS = 20
Sums = list[int]


def readers(children: Children, number: int, folder: Path) -> str:
    cache = make_cache(folder, num_samples=24, rows_per_shard=2, max_duration_s=0.2, features="waveform")
    ended = children.run(_CASES[number], cache)
    assert not ended.signal
    assert ended.error is None, ended.error
    return f"{_CASES[number].__name__.strip('_').replace('_', ' ')}: right data"


def _forked_after_open(folder: Path) -> None:
    _fork_while_reading(open_cache(folder))


def _forked_with_one_mapping(folder: Path) -> None:
    _fork_while_reading(open_cache(folder, max_open_shards=1))


def _forked_before_open(folder: Path) -> None:
    wanted = _sums(open_cache(folder))
    processes = [_forked(lambda: _check(open_cache(folder), wanted)) for _ in range(_NUM_READERS)]
    _check(open_cache(folder), wanted)
    _wait(processes)


def _spawned(folder: Path) -> None:
    cache = open_cache(folder)
    wanted = _sums(cache)
    context = multiprocessing.get_context("spawn")
    # Without a main module that would be run again in each.
    sys.modules["__main__"].__spec__ = None
    with contextlib.suppress(AttributeError):
        del sys.modules["__main__"].__file__
    processes = [context.Process(target=_check, args=(cache, wanted)) for _ in range(_NUM_READERS)]
    for process in processes:
        process.start()
    _check(cache, wanted)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * _NUM_READERS


def _fork_while_reading(cache: Cache) -> None:
    """Children are forked at any instant of the reads of two threads."""
    wanted = _sums(open_cache(cache.folder))
    problems: list[BaseException] = []

    def read() -> None:
        try:
            _check(cache, wanted)
        except BaseException as err:
            problems.append(err)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    processes = [_forked(lambda: _check(cache, wanted)) for _ in range(_NUM_READERS)]
    read()
    for thread in threads:
        thread.join()
    _wait(processes)
    assert problems == []


def _check(cache: Cache, wanted: Sums) -> None:
    for _ in range(_ROUNDS):
        assert _sums(cache) == wanted


def _sums(cache: Cache) -> Sums:
    return [sum(int(value.astype(np.int64).sum()) for value in cache.read(i).values()) for i in range(len(cache))]


def _forked(function: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        function()
        status = 0
    finally:
        os._exit(status)


def _wait(processes: list[int]) -> None:
    assert [os.waitpid(process, 0)[1] for process in processes] == [0] * len(processes)


_CASES = (_forked_after_open, _forked_with_one_mapping, _forked_before_open, _spawned)

ROW: Row[Any] = Row(
    name="readers",
    fault="4 reader processes, forked and spawned, while the parent reads; fork after open",
    outcome="right data, no deadlock",
    prepared=serving,
    trial=readers,
    short=len(_CASES),
)


def test_readers_of_many_processes_get_the_right_data(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
