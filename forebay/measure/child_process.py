"""A process for an arm: its memory and CPU seconds are its own, and it works only when it is told to.

Processes start by `python -m`, as those of a build do. What a process prints goes to its log file. Tasks and results
cross a socket pair by pickle; nothing is stored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError

_LAST_LINES = 12
_PATIENCE_S = 5.0
"""For a killed process to end: it does at once, unless it is in a call of the kernel that nothing interrupts."""


class Child:
    """A process that runs `work(task, connection)`. `kill` ends it and the processes that it started."""

    def __init__(self, name: str, work: str, *, log: Path, advice: str = "leave it out of --against") -> None:
        """Starts the process. It imports its work, which the first `receive` tells; the first message is its task.

        work: `module:function`, which gets the task and the connection to its parent. log: where its output goes.
        advice: what to do where it dies.
        """
        self.name, self._log, self._advice = name, log, advice
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs, open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forebay.measure.child_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": _first_device()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is the parent's, who ends all of the group
            )
        self._connection = Connection(ours.detach())
        self.send(work)

    def send(self, message: Any) -> None:
        """Gives the process a message; one that has died is noticed by `receive`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Returns what the process sends next.

        Raises what of forebay's errors ended it, with a note that names the arm; ForebayError, with the last lines of
        its log, where it died otherwise; TimeoutError where it sends nothing in time.
        """
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                raise TimeoutError(f"the arm {self.name} sent nothing in {timeout_s:.0f} s")
            message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ForebayError(self._death()) from None
        if isinstance(message, ForebayError):
            message.add_note(f"in the arm {self.name}, whose log is {self._log}")
            raise message
        return message

    def kill(self) -> None:
        """Ends the process and what it started, at once; a process that has ended stays so."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
            self._process.wait(_PATIENCE_S)

    def _death(self) -> str:
        status = self._process.wait()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        told = "\n".join(lines) if lines else "(it printed nothing)"
        return f"the arm {self.name} died ({how}); {self._advice}, or see the end of {self._log}:\n{told}"


def _first_device() -> str:
    # transformers' Trainer would cut each batch for all devices of one process.
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def main() -> None:
    """Runs the work that the parent sends over the socket of the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    connection = Connection(int(sys.argv[1]))
    try:
        work = pkgutil.resolve_name(connection.recv())
        connection.send(None)
        work(connection.recv(), connection)
    except ForebayError as err:
        connection.send(err)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the parent has gone


if __name__ == "__main__":
    main()
