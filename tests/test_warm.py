"""A process that the warm Python runs is like any other; a process that it cannot be starts from nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, python
from tests.warm.worker import COLD, warm_python, warm_workers

_SAYS = """
import json, os, sys
json.dump({"argv": sys.argv, "first": sys.path[0], "cwd": os.getcwd(), "line": sys.stdin.readline(),
           "setting": os.environ.get("SETTING"), "loaded": "torch" in sys.modules,
           "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))},
          sys.stdout)
"""


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all other tests start cold."""
    monkeypatch.delenv(COLD, raising=False)


def test_it_has_the_arguments_files_folder_and_settings_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(_SAYS, encoding="utf-8")
    for words, argv, first in (
        (["-c", _SAYS, "a", "b"], ["-c", "a", "b"], ""),
        ([str(tmp_path / "says.py"), "a"], [str(tmp_path / "says.py"), "a"], str(tmp_path)),
        (["-u", "-m", "says", "a"], [str(tmp_path / "says.py"), "a"], str(tmp_path)),
    ):
        said = {}
        for program in (warm_python(), sys.executable):
            ended = subprocess.run(
                [program, *words],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "SETTING": "5"},
                input="line\n",
                capture_output=True,
                text=True,
                check=True,
            )
            said[program] = json.loads(ended.stdout)
            assert (said[program]["argv"], said[program]["first"]) == (argv, first)
        ours, theirs = said.values()
        assert ours == theirs | {"loaded": True}
        assert not theirs["loaded"]
        assert (ours["line"], ours["setting"], ours["cwd"]) == ("line\n", "5", str(tmp_path))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_python_ends(code: str, status: int) -> None:
    ours = python("-c", f"print('out', end=''); {code}")
    assert ours.returncode == status
    theirs = python("-c", f"print('out', end=''); {code}", is_warm=False)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_it(number: signal.Signals) -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    with subprocess.Popen([warm_python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(number)
        assert process.stdout.read() == b""  # until the last process that has the pipe has ended
        assert process.wait() == -number


def test_all_processes_start_cold_where_a_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "True\n"
    monkeypatch.setenv(COLD, "1")
    assert python("-c", code).stdout == "False\n"
    settings = {"pass_fds": (), "env": {**os.environ, "PYTHONPATH": ""}, "stdin": subprocess.DEVNULL}
    process = warm_workers().Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **settings)
    assert process.communicate() == (b"False\n", None)


def test_what_python_reads_at_its_start_is_read(tmp_path: Path) -> None:
    code = "import os, sys; print('torch' in sys.modules, 'made' in os.environ)"
    assert python("-c", code).stdout == "True False\n"
    assert python("-c", code, HF_HOME=str(tmp_path)).stdout == "False False\n"
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['made'] = ''", encoding="utf-8")
    assert python("-c", code, PYTHONPATH=str(tmp_path)).stdout == "False True\n"


def test_a_worker_that_is_killed_has_ended() -> None:
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    read, write = os.pipe()
    code = f"import os, time; os.write({write}, b'%d' % os.getpid()); time.sleep(60)"
    command = [sys.executable, "-c", code]
    process = warm_workers().Popen(command, pass_fds=(write,), env=environment, stdin=subprocess.DEVNULL)
    os.close(write)
    pid = int(os.read(read, 20))
    process.kill()
    assert process.wait() == process.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(pid, 0)
    os.close(read)


def test_a_run_of_the_tests_that_was_started_in_the_background_takes_ctrl_c() -> None:
    """The run is started as under nohup: without the mend of conftest.py its children would ignore SIGINT."""
    code = "import os, signal, sys, tests.conftest; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    child = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    ended = subprocess.run(
        [sys.executable, "-c", code, child],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert "KeyboardInterrupt" in ended.stderr
