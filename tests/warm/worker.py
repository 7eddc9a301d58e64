"""The Python of tests: the warm program, and workers of a pool that start warm. See `tests.warm`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import marshal
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.warm import client

_ROOT = Path(__file__).parents[2]
COLD = "FOREBAY_TEST_COLD"
"""A variable: 1 where every process starts from nothing."""
within: list[Path] = []
"""The folder of the server, in the processes that it has started."""


def is_cold() -> bool:
    """Whether every process starts from nothing."""
    return os.environ.get(COLD) == "1"


def warm_python() -> str:
    """Returns the path of a program that takes the place of `sys.executable`."""
    return sys.executable if is_cold() else str(_folder() / "python")


def no_fsync(fd: int) -> None:
    """Takes the place of `os.fsync`: only a loss of power tells, and the wait is half of a small build's time."""
    os.fstat(fd)


def warm_workers() -> SimpleNamespace:
    """Returns what pools of workers take for `subprocess`."""
    return SimpleNamespace(Popen=_worker_process, DEVNULL=subprocess.DEVNULL)


class WarmProcess:
    """A process for a pool of workers, as `subprocess.Popen`. `kill` and `wait` are of the process itself."""

    def __init__(self, folder: Path, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str]) -> None:
        """folder: that of the server; command: of Python; env: the variables of the process."""
        self._status: int | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(folder / "socket"))
        asked = {"words": command[1:], "cwd": os.getcwd(), "env": env, "parent": os.getpid(), "me": command[0]}
        with open(os.devnull, "rb") as nothing:
            client.ask(self._server, asked, {0: nothing.fileno(), **{fd: fd for fd in (1, 2, *pass_fds)}})

    def kill(self) -> None:
        """Kills the process if it runs."""
        with contextlib.suppress(OSError):
            self._server.send(bytes([signal.SIGKILL]))

    def terminate(self) -> None:
        """Asks the process to end."""
        with contextlib.suppress(OSError):
            self._server.send(bytes([signal.SIGTERM]))

    def wait(self) -> int:
        """Returns how the process has ended, when it has."""
        if self._status is None:
            self._status = client.status_of(self._server)
            self._server.close()
        return self._status


def _worker_process(command: Sequence[str], **settings: Any) -> WarmProcess | subprocess.Popen[bytes]:
    if not is_cold():
        servers = marshal.loads((_folder() / "environment").read_bytes())
        if client.can_be_warm(list(command[1:]), settings["env"], servers):
            return WarmProcess(_folder(), command, pass_fds=settings["pass_fds"], env=settings["env"])
    return subprocess.Popen(command, **settings)


def _folder() -> Path:
    return within[0] if within else _started()


@functools.cache
def _started() -> Path:
    """Starts the server of this process and returns its folder; the server ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    command = [sys.executable, "-m", "tests.warm.server", folder.name]
    server = subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"loaded\n"
    program = Path(folder.name, "python")
    text = Path(client.__file__).read_text(encoding="utf-8")
    program.write_text(f"#!{sys.executable} -IS\n{text}", encoding="utf-8")
    program.chmod(0o700)
    atexit.register(_end, server, folder)
    return Path(folder.name)


def _end(server: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    folder.cleanup()
