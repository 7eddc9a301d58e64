"""Children that start in milliseconds: a server process has everything loaded, runs nothing itself, and forks.

It has one thread, so that its children inherit no lock; it adopts what a killed child leaves running, and waits until
that has ended too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.warm.worker import warm_python

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120
_LOADED = (
    "forebay.preprocess.pipeline",
    "numpy.random",
    "pandas",  # pyarrow loads it where it is there
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    "soundfile",
    "soxr",
    "tests.faults.building",
)

Call = tuple[Any, ...]
"""A function of a module, and its arguments."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: what it returned or raised, the signal that killed it or 0, its highest resident memory."""

    signal: int
    value: Any
    error: BaseException | None
    peak_bytes: int


class Children:
    """The server; closed with its `with` block. A child that hangs is an AssertionError, and the server begins anew.

    loaded: modules that it has beside those of the speech line.
    """

    def __init__(self, *loaded: str, program: str = "tests.faults.children") -> None:
        """program: what runs as the server."""
        self._loaded, self._program = loaded, program

    def __enter__(self) -> Children:
        self._begin()
        return self

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        command = [warm_python(), "-m", self._program, str(theirs.fileno()), *self._loaded]
        environment = {**os.environ, "ARROW_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=_ROOT, env=environment)
        theirs.close()
        self._connection = Connection(ours.detach())

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._server.kill()
        self._server.wait()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Ended:
        """Returns how a child that calls the function ended."""
        return self.run_all([(function, *arguments)])[0]

    def run_all(self, calls: Sequence[Call]) -> list[Ended]:
        """Returns how children that run at the same time ended."""
        self.start(calls)
        return self.collect()

    def start(self, calls: Sequence[Call]) -> None:
        """Starts children; `collect` waits for them."""
        self._connection.send(calls)

    def is_running(self) -> bool:
        """Says whether one of the children that were started has not ended."""
        return not self._connection.poll(0)

    def collect(self) -> list[Ended]:
        """Returns how the children that were started ended."""
        if not self._connection.poll(_TIMEOUT_S):
            self.__exit__()
            self._begin()
            raise AssertionError(f"a child, or what it started, still runs after {_TIMEOUT_S} s")
        ended: list[Ended] = self._connection.recv()
        return ended


@contextlib.contextmanager
def serving(_folder: Path) -> Iterator[Children]:
    """Prepares a server."""
    with Children() as children:
        yield children


def serve(connection: Connection) -> None:
    """Forks a child for every call that comes, until the connection ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            calls = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send([_end_of(*started) for started in [_fork(libc, call) for call in calls]])


def _fork(libc: ctypes.CDLL, call: Call) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _answer(write, call)
    finally:
        os._exit(99)


def _answer(write: int, call: Call) -> None:
    function, *arguments = call
    value, error = None, None
    try:
        value = function(*arguments)
    except BaseException as err:
        error = err
    try:
        data = pickle.dumps((value, error))
    except (pickle.PicklingError, TypeError, AttributeError):
        data = pickle.dumps((None, RuntimeError(repr(error or value))))
    with open(write, "wb") as file:
        file.write(data)
    os._exit(0)


def _end_of(pid: int, read: int) -> Ended:
    with open(read, "rb") as file:
        data = file.read()
    _, status, usage = os.wait4(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)  # what it left behind must end too
    value, error = pickle.loads(data) if data else (None, None)  # noqa: S301  our own child's
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Ended(killed_by, value, error, usage.ru_maxrss * 1024)


def limit(kind: int, value: int) -> None:
    """Lowers a resource limit of this process."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def load(*names: str) -> None:
    """Loads what children need. It is never used here: a library that has run would have started threads."""
    for name in (*_LOADED, *names):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()


if __name__ == "__main__":
    from tests.faults import children

    children.load(*sys.argv[2:])
    children.serve(Connection(int(sys.argv[1])))
