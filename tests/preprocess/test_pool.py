from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from forebay.preprocess.pool import PINNED, Pool
from forebay.task_map import WorkerDied, is_second_try, mark


def die_at(row: int) -> None:
    mark(row)
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(path: str) -> str:
    """Dies where `path` is not there yet, and leaves it for the next try."""
    file = Path(path)
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second try" if is_second_try() else "first try"


def thread_setting(name: str) -> str | None:
    return os.environ.get(name)


def is_running(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_results_keep_the_order_of_the_items() -> None:
    with Pool(2) as pool:
        assert pool.map(math.sqrt, range(50)) == [math.sqrt(i) for i in range(50)]
        assert pool.map(abs, []) == []


def test_run_yields_every_task_once() -> None:
    with Pool(2) as pool:
        assert sorted(pool.run(abs, range(-20, 0))) == [(i, -i) for i in range(-20, 0)]


def wait_at(row: int, go: str) -> None:
    mark(row)
    while not Path(go).exists():
        time.sleep(0.01)


def test_rows_that_are_under_way_are_known(tmp_path: Path) -> None:
    with Pool(2) as pool:
        wait = partial(wait_at, go=str(tmp_path / "go"))
        found = threading.Thread(target=lambda: list(pool.run(wait, [3, 5])))
        found.start()
        while sorted(pool.at_work()) != [(3, 3), (5, 5)]:
            time.sleep(0.01)
        (tmp_path / "go").touch()
        found.join()
        assert pool.at_work() == []


def test_workers_have_one_thread_each() -> None:
    with Pool(1) as pool:
        assert pool.map(thread_setting, list(PINNED)) == list(PINNED.values())


def test_an_exception_in_a_task_is_raised_here_and_the_pool_goes_on() -> None:
    with Pool(1) as pool:
        with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
            pool.map(math.sqrt, [-1.0])
        assert pool.map(math.sqrt, [4.0]) == [2.0]


def test_a_worker_that_dies_twice_is_reported_with_its_task_and_row() -> None:
    with Pool(2) as pool, pytest.raises(WorkerDied, match="signal SIGKILL") as caught:
        list(pool.run(die_at, [7]))
    assert (caught.value.task, caught.value.position) == (7, 7)


def test_a_worker_that_dies_once_costs_nothing(tmp_path: Path) -> None:
    with Pool(2) as pool:
        assert pool.map(die_once, [str(tmp_path / name) for name in "abc"]) == ["second try"] * 3
        assert pool.map(die_once, [str(tmp_path / "a")] * 4) == ["first try"] * 4


def test_no_worker_outlives_the_pool() -> None:
    with Pool(2) as pool:
        processes = pool.map(_pid, range(8))
        assert all(is_running(process) for process in processes)
    assert not any(is_running(process) for process in processes)


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        "import sys; from forebay.preprocess.pool import Pool; from tests.preprocess.test_pool import _pid\n"
        "pool = Pool(2); print(*pool.map(_pid, range(4)), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        processes = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    deadline_s = time.monotonic() + 30
    while any(is_running(process) for process in processes) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(processes) == 4
    assert not any(is_running(process) for process in processes)


def _pid(_: int) -> int:
    return os.getpid()
