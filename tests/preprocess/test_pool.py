from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
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


def end_forks(path: str) -> str:
    """Kills the process that this one is a fork of, where `path` is not there yet."""
    file = Path(path)
    if not file.exists():
        file.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # this process ends with it
    return "second try" if is_second_try() else "first try"


def test_workers_whose_common_process_was_killed_are_replaced_with_it(tmp_path: Path) -> None:
    with Pool(2) as pool:
        assert "second try" in pool.map(end_forks, [str(tmp_path / "a")] * 2)
        pool.map(abs, range(8))  # an idle worker has died too, and is found so by the task that it is given
        assert pool.map(end_forks, [str(tmp_path / "a")] * 4) == ["first try"] * 4


def in_worker(name: str) -> tuple[bool, int]:
    """Whether a module was imported before this task, and how many threads run."""
    return name in sys.modules, threading.active_count()


def cold(code: str, folder: Path) -> str:
    """Returns what a process prints that has nothing loaded, and finds modules in a folder; `-B` is of no warm one."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-B", "-c", f"from forebay.preprocess.pool import Pool\n{code}"]
    made = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert made.stderr == ""
    return made.stdout


IN_WORKER = """
from tests.preprocess.test_pool import in_worker
with Pool(2, modules=("no_such_module", "fails", "given")) as pool:
    print(*sorted(set(pool.map(in_worker, ["given"] * 8))))
"""


def test_modules_are_imported_before_a_worker_begins_and_one_that_fails_is_left_to_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('not here')")
    (tmp_path / "given.py").write_text("")
    assert cold(IN_WORKER, tmp_path) == "(True, 1)\n"


def test_a_worker_begins_anew_where_a_module_has_started_a_thread(tmp_path: Path) -> None:
    """A lock that the thread held would be held in a fork for ever."""
    (tmp_path / "given.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    assert cold(IN_WORKER, tmp_path) == "(False, 1)\n"


CONVERTED = """
from tests.preprocess.test_pool import converted
with Pool(1, modules=("pyarrow",)) as pool:
    print(*pool.map(converted, [False, True]))
"""


def converted(has_pandas: bool) -> tuple[bool, list[int | None]]:  # noqa: FBT001  a task
    """Whether pandas is imported after values were converted to arrow, and the values; of a frame, if that is asked."""
    import pyarrow as pa

    array = pa.array([1, None])
    if has_pandas:
        pandas = importlib.import_module("pandas")
        array = pa.concat_arrays([array, pa.array(pandas.Series([3]))])
        assert pa.table({"a": array}).to_pandas().shape == (3, 1)
    return "pandas" in sys.modules, array.to_pylist()


def test_a_task_imports_pandas_only_if_it_asks_for_it(tmp_path: Path) -> None:
    assert cold(CONVERTED, tmp_path) == "(False, [1, None]) (True, [1, None, 3])\n"


def drawn(_: int) -> float:
    return float(np.random.random())


def test_workers_draw_other_numbers(tmp_path: Path) -> None:
    code = "from tests.preprocess.test_pool import drawn\nwith Pool(2, modules=['numpy.random']) as pool: print(%s)"
    runs = [cold(code % "*sorted(set(pool.map(drawn, range(20))))", tmp_path) for _ in range(2)]
    assert runs[0] != runs[1]
    assert all(len(run.split()) == 20 for run in runs)


def _pid(_: int) -> int:
    return os.getpid()
