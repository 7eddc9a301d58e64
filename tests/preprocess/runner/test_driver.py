"""One driver of a build on a cluster: a second is refused by name, also where locks do nothing; a lost one is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import BuildError
from forebay.preprocess.runner import parts
from forebay.preprocess.runner.parts import sole_driver, token_in
from tests.faults.shim import without_locks

TWO = r"has a driver already \(process {pid} on {host}, since 20..-..-.. ..:..:.. UTC\).*--runner ray"


def record_of(folder: Path, **values: Any) -> Path:
    path = folder / "driver.json"
    path.write_text(json.dumps({"host": "node7", "pid": 12, "since": time.time(), "token": "t", **values}))
    return path


def test_a_driver_says_who_it_is_while_it_drives(tmp_path: Path) -> None:
    with sole_driver(tmp_path, config="a.toml") as token:
        assert token_in(tmp_path) == token
    assert token_in(tmp_path) is None
    with sole_driver(tmp_path, config="a.toml") as other:
        assert other != token


def test_a_second_one_is_refused_and_a_killed_one_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom forebay.preprocess.runner.parts import sole_driver\n"
        "with sole_driver(Path(sys.argv[1]), config='a.toml'): print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wanted = TWO.format(pid=process.pid, host=re.escape(os.uname().nodename))
        with pytest.raises(BuildError, match=wanted), sole_driver(tmp_path, config="a.toml"):
            pass
        with pytest.MonkeyPatch.context() as patch:
            without_locks(patch)
            with pytest.raises(BuildError, match=wanted), sole_driver(tmp_path, config="a.toml"):
                pass
        process.kill()
    with sole_driver(tmp_path, config="a.toml"):
        pass


def test_one_of_another_machine_is_known_by_its_time_where_locks_are_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    record = record_of(tmp_path)
    with pytest.raises(BuildError, match=TWO.format(pid=12, host="node7")), sole_driver(tmp_path, config="a.toml"):
        pass
    assert token_in(tmp_path) == "t", "the record of the other one stays"
    before_s = time.time() - parts._DEAD_S - 5
    os.utime(record, (before_s, before_s))
    with sole_driver(tmp_path, config="a.toml") as token:
        assert token_in(tmp_path) == token


def test_a_file_system_without_locks_has_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refused)
    with sole_driver(tmp_path, config="a.toml"):
        assert (tmp_path / "driver.json").exists()


def test_a_driver_is_heard_of_as_long_as_it_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_BEAT_S", 0.01)
    with sole_driver(tmp_path, config="a.toml"):
        record = tmp_path / "driver.json"
        os.utime(record, (0, 0))
        deadline_s = time.monotonic() + 30
        while not record.stat().st_mtime and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert time.time() - record.stat().st_mtime < 60
    assert "driver" not in {thread.name for thread in threading.enumerate()}


def test_a_damaged_record_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "driver.json").write_text("{")
    assert token_in(tmp_path) is None
    with sole_driver(tmp_path, config="a.toml") as token:
        assert token_in(tmp_path) == token
