from __future__ import annotations

import time
from pathlib import Path

import pytest

from forebay.measure import doctor as sessions
from forebay.measure.doctor import DoctorSession
from forebay.measure.doctor_bench import DoctorTask
from forebay.measure.predict import OpeningTimes
from tests.measure.doctor.figures import demo


def task(root: Path, *, prepare: str | None = None) -> DoctorTask:
    config = demo(f'run.cache_root="{root / "caches"}"')
    return DoctorTask(config=config, root=str(root), cores=2, prepare=prepare)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_arm_that_hangs_is_killed_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_SET_UP_S", 1.0)
    with DoctorSession(
        task(tmp_path, prepare="tests.measure.doctor.plants:hang"), deadline_s=time.monotonic() + 100
    ) as bench:
        answer = bench.ask("find", 0.5)
        assert "did not end in 2 s and was stopped" in answer.why
        pids = list(map(int, (tmp_path / "pids").read_text().split()))
        assert len(pids) == 2
        ends = time.monotonic() + 10
        while any(map(is_running, pids)) and time.monotonic() < ends:
            time.sleep(0.05)
        assert not any(map(is_running, pids))


def test_another_process_goes_on_where_one_died(tmp_path: Path) -> None:
    with DoctorSession(
        task(tmp_path, prepare="tests.measure.doctor.plants:die"), deadline_s=time.monotonic() + 100
    ) as bench:
        answer = bench.ask("find", 1.0)
        assert "died (exit status 7)" in answer.why
        bench.limit(10)
        bench.task = task(tmp_path)
        assert isinstance(bench.ask("find", 1.0).value, OpeningTimes)


def test_nothing_is_waited_for_behind_the_deadline(tmp_path: Path) -> None:
    with DoctorSession(task(tmp_path), deadline_s=time.monotonic() - 1) as bench:
        assert bench.ask("find", 1.0).why == "no time was left for it"
