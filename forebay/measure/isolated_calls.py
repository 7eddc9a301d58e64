"""Calls in processes of their own: what a call breaks (its memory, a device) ends with it, and the caller goes on.

A server process, started by `python -m`, imports torch once and forks for every call. A fork takes milliseconds where a
start takes seconds. The server itself never touches a device, so every call begins without one. Functions, arguments
and results cross a socket pair between these processes by pickle, and nothing is stored.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
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

_PR_SET_PDEATHSIG = 1
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets: a call is alone, whatever started its caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Died:
    """A call whose process was killed, by the kernel for its memory more often than not."""

    signal: int

    def __str__(self) -> str:
        return f"killed by {signal.Signals(self.signal).name}"


class Isolated:
    """Calls functions in processes of their own; a context manager, whose end ends the server."""

    def __init__(self) -> None:
        """Starts nothing yet: the first call does."""
        self._server: tuple[subprocess.Popen[bytes], Connection] | None = None

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            process, connection = self._server
            connection.close()
            process.kill()  # the call that it may wait for ends with it
            process.wait()
            self._server = None

    def call(self, function: Callable[..., R], *arguments: Any, **named: Any) -> R | Died:
        """Returns what `function(*arguments, **named)` returns in a new process, `Died` where a signal ended that one.

        function: of a module, by its name. A ForebayError that it raises is raised here; any other error has its
        traceback on standard error and raises ForebayError here.
        """
        process, connection = self._server or self._start()
        self._server = process, connection
        try:
            connection.send((function, arguments, named))
            status, answer = connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError) as err:
            raise ForebayError(
                f"the server of trials ended with status {process.wait()}; what was measured is kept, run the command "
                "again to go on",
                code="FB706",
            ) from err
        if status < 0:
            return Died(signal=-status)
        if answer is None:
            raise ForebayError(f"a trial ended with exit status {status}; its traceback is above", code="FB706")
        failed, value = answer
        if failed:
            raise value
        found: R = value
        return found

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay.measure.isolated_calls", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            env={**environment, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        return process, Connection(ours.detach())


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; it ends at once where the parent has died already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(connection: Connection) -> None:
    """Forks for every call that comes, and answers with (exit status, (failed, value) or None), until nobody asks."""
    import torch  # noqa: F401  here, once: the forks have it
    import transformers  # noqa: F401

    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    while True:
        try:
            function, arguments, named = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(_forked(partial(function, *arguments, **named)))


def _forked(call: Callable[[], Any]) -> tuple[int, tuple[bool, Any] | None]:
    ours, theirs = socket.socketpair()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        end_with(parent)
        ours.close()
        _work(Connection(theirs.detach()), call)
    theirs.close()
    answer = None
    with Connection(ours.detach()) as reader, contextlib.suppress(EOFError, ConnectionResetError):
        answer = reader.recv()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer


def _work(writer: Connection, call: Callable[[], Any]) -> None:
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


if __name__ == "__main__":
    # Under its real name, not `__main__`: what is sent back is of the classes that the caller knows.
    from forebay.measure import isolated_calls as isolated

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the caller decides what ends
    isolated.end_with(int(sys.argv[2]))
    isolated.serve(Connection(int(sys.argv[1])))
