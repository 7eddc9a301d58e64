"""Processes that measure: memory, CPU seconds and device are their own, and what breaks in one ends with it.

Every such process starts by `python -m`, as those of a build do, and dies with the process that started it. Tasks and
results cross a socket pair by pickle; nothing is stored. A whole arm is one process. Short calls are forks of one
process, which has torch loaded: a fork takes milliseconds where a start takes seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from forebay.errors import ForebayError

R = TypeVar("R")
_PATIENCE_S = 5.0
"""For a killed process to end: it does at once, unless it is in a call of the kernel that nothing interrupts."""
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets: a process that measures is alone, whatever started its parent."""


class Child:
    """A process that runs `work(task, connection)`. `kill` ends it and the processes that it started."""

    def __init__(self, name: str, work: str, *, log: Path | None, advice: str, code: str | None = None) -> None:
        """Starts the process. It imports its work, which the first `receive` tells; the first message is its task.

        work: `module:function`, which gets the task and the connection to its parent. log: where its output goes; None:
        where that of its parent goes. advice, code: what to do where it dies, and the code of that error.
        """
        self.name, self._log, self._advice, self.code = name, log, advice, code
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            output = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(open(log, "wb"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forebay.measure.child_process", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
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

        Raises what of forebay's errors ended it, with a note that names the process; ForebayError, with the last lines
        of its log, where it died otherwise; TimeoutError where it sends nothing in time.
        """
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                raise TimeoutError(f"{self.name} sent nothing in {timeout_s:.0f} s")
            message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ForebayError(self._death(), code=self.code) from None
        if isinstance(message, ForebayError):
            message.add_note(f"in {self.name}, whose log is {self._log}")
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
        told = f"{self.name} died ({how}); {self._advice}"
        if self._log is None:
            return told
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return "\n".join([f"{told}, or see the end of {self._log}:", *(lines or ["(it printed nothing)"])])


def _environment() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    found["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [found.get("PYTHONPATH")])])
    # One device: transformers' Trainer would cut each batch for all devices of one process.
    return {**found, "CUDA_VISIBLE_DEVICES": found.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Died:
    """A call whose process was killed, by the kernel for its memory more often than not."""

    signal: int

    def __str__(self) -> str:
        return f"killed by {signal.Signals(self.signal).name}"


class Isolated:
    """Calls functions, each in a fork of one process that never touches a device; a context, whose end ends both."""

    def __init__(self) -> None:
        """Starts nothing yet: the first call does."""
        self._server: Child | None = None

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None

    def call(self, function: Callable[..., R], *arguments: Any, **named: Any) -> R | Died:
        """Returns what `function(*arguments, **named)` returns in a new process, `Died` where a signal ended that one.

        function: of a module, by its name. A ForebayError that it raises is raised here; any other error has its
        traceback on standard error and raises ForebayError here.
        """
        if self._server is None:
            advice = "what was measured is kept, run the command again to go on"
            self._server = Child("the server of trials", f"{__name__}:serve", log=None, advice=advice, code="FB706")
            self._server.receive()
            self._server.send(None)
        self._server.send((function, arguments, named))
        status, answer = self._server.receive()
        if status < 0:
            return Died(signal=-status)
        if answer is None:
            raise ForebayError(f"a trial ended with exit status {status}; its traceback is above", code="FB706")
        failed, value = answer
        if failed:
            raise value
        found: R = value
        return found


def serve(_task: None, parent: Connection) -> None:
    """Forks for every call that comes, and answers with (exit status, (failed, value) or None), until nobody asks."""
    import torch  # noqa: F401  here, once: the forks have it
    import transformers  # noqa: F401

    logging.getLogger().setLevel(logging.ERROR)
    while True:
        function, arguments, named = parent.recv()
        parent.send(_forked(partial(function, *arguments, **named)))


def _forked(call: Callable[[], Any]) -> tuple[int, tuple[bool, Any] | None]:
    ours, theirs = socket.socketpair()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        _end_with(parent)
        ours.close()
        _answer(Connection(theirs.detach()), call)
    theirs.close()
    answer = None
    with Connection(ours.detach()) as reader, contextlib.suppress(EOFError, ConnectionResetError):
        answer = reader.recv()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer


def _answer(writer: Connection, call: Callable[[], Any]) -> None:
    """Sends the result of a call and ends this process; never returns to what the fork was in."""
    status = 1
    try:
        try:
            writer.send((False, call()))
        except ForebayError as err:
            writer.send((True, err))
        status = 0
    except BaseException:  # noqa: BLE001  its traceback is all that can be said
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; it ends at once where the parent has died already."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Runs the work that the parent, whose id is the second argument, sends over the socket of the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(int(sys.argv[2]))
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
