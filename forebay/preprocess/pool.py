"""Worker processes for the tasks of a build.

Own processes instead of `concurrent.futures`: they are forks of a process that starts by `python -m`, so that a user's
script needs no `__main__` guard, no lock of a thread is inherited, and what they need is imported once; BLAS threads
are pinned before numpy loads; and when one dies, its task and the sample it was at are known. Tasks and results cross a
socket pair between these processes by pickle; nothing is stored.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from forebay.preprocess.worker import ORDER, START, STATUS, WAIT
from forebay.store.memo import hash_files
from forebay.task_map import WorkerDied
from forebay.terminal import Progress

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Who makes the shards of a build: a `Pool` of this machine, or what stands for the nodes of a cluster."""

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Yields every task with its result, as they are done. See `Pool.run`."""


_THREADS = "OMP_NUM MKL_NUM OPENBLAS_NUM NUMEXPR_NUM VECLIB_MAXIMUM RAYON_NUM"
PINNED = {f"{name}_THREADS": "1" for name in _THREADS.split()} | {"TOKENIZERS_PARALLELISM": "false"}
"""Environment of a worker: one thread each, so that workers do not fight for the cores."""
_ALONE = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment of the process that workers are forked from: pyarrow starts no thread when it is imported."""


class _Forks:
    """The process that the workers of a pool are forks of; `forebay/preprocess/worker.py` says what it does."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Starts it. modules: what it imports for all of them."""
        self._orders, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            numbers = map(str, (theirs.fileno(), os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forebay.preprocess.worker", "forks", *numbers, *modules],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ALONE, **PINNED, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
            )
        self._count = 0

    def start(self, connection_fd: int, marks_fd: int) -> _Fork:
        """Orders a worker, without waiting for it. Raises OSError where this process has ended."""
        self._count += 1
        socket.send_fds(self._orders, [ORDER.pack(START, self._count)], [connection_fd, marks_fd])
        return _Fork(self, self._count)

    def status_of(self, number: int) -> int:
        """Returns how a worker has ended, when it has; if this process has ended, and its workers with it, how that."""
        with contextlib.suppress(OSError):
            self._orders.sendall(ORDER.pack(WAIT, number))
            if answer := self._orders.recv(STATUS.size, socket.MSG_WAITALL):
                return int(STATUS.unpack(answer)[0])
        return self._process.wait()

    def end(self) -> None:
        """Kills the workers and ends this process."""
        self._orders.close()
        self._process.terminate()  # ends it while it imports, when it has no workers yet
        self._process.wait()


@dataclass(frozen=True)
class _Fork:
    """A worker, with that of the face of `subprocess.Popen` which a pool uses."""

    forks: _Forks
    number: int

    def kill(self) -> None:
        """Ends it with all of them."""
        self.forks.end()

    def wait(self) -> int:
        """Returns how it has ended, when it has."""
        return self.forks.status_of(self.number)


@dataclass
class _Worker:
    process: _Fork
    connection: Connection
    marks: mmap.mmap
    task: Any = None
    attempts: int = 0


@dataclass(frozen=True)
class _Numbered:
    """Calls a function on a numbered item and keeps the number with the result."""

    function: Callable[[Any], Any]

    def __call__(self, item: tuple[int, Any]) -> tuple[int, Any]:
        return item[0], self.function(item[1])


class Pool:
    """Processes that run `function(task)`; they stay between calls.

    They end with the `with` block, and are killed if that ends by an error.
    """

    def __init__(self, num_workers: int, *, shows: bool = True, modules: Sequence[str] = ()) -> None:
        """shows: whether `map` says how far it is. modules: what tasks import, so that it is imported once for all."""
        self._num_workers, self._shows, self._modules = num_workers, shows, modules
        self._workers: list[_Worker] = []
        self._servers: list[_Worker] = []
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._serve: Any = None
        self._forks: _Forks | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._workers, *self._servers):
            worker.connection.close()
            with contextlib.suppress(OSError):
                worker.process.kill()
            worker.process.wait()
            worker.marks.close()
        self._workers.clear()
        self._servers.clear()
        if self._sockets is not None:
            self._sockets.cleanup()

    def serve(self, function: Callable[[tuple[str, str]], object], names: Sequence[str]) -> None:
        """Starts a process for each name, which runs `function((name, path of a socket))` until the pool ends.

        Each serves its share of the workers, who are told its socket with every task. One that dies is started again.
        """
        self._serve, self._sockets = function, tempfile.TemporaryDirectory(prefix="forebay-")
        self._servers += [self._serving((name, f"{self._sockets.name}/{n}")) for n, name in enumerate(names)]

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that have a process."""
        return tuple(server.task[0] for server in self._servers)

    def _serving(self, place: tuple[str, str]) -> _Worker:
        server = self._start()
        server.task = place
        server.connection.send((self._serve, place, False, None))
        return server

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Returns `function(item)` of every item, in their order. Raises WorkerDied, see `run`.

        Shows how many are done: what it is used for is the look at all sources.
        """
        items = list(items)
        is_hashing = function is hash_files  # tasks of several files
        count = sum(len(cast(Sized, item)) for item in items) if is_hashing else len(items)
        results: dict[int, R] = {}
        name = "hash" if is_hashing else "sources"
        try:
            with Progress(count, desc=name, unit="file", is_shown=self._shows) as bar:
                for (_, item), (number, result) in self.run(_Numbered(function), enumerate(items)):
                    results[number] = result
                    bar.update(len(cast(Sized, item)) if is_hashing else 1)
        except WorkerDied as err:
            err.task = err.task[1]
            raise
        return [results[index] for index in range(len(results))]

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Yields every task with its result, as they are done.

        A task is taken from `tasks` when a worker is free for it: those of a large build are never in memory together.
        An exception in a task is raised here. A worker that dies gets its task tried once more in a new process; then
        WorkerDied is raised.
        """
        waiting: Iterator[tuple[T, int]] = ((task, 0) for task in tasks)
        for place, first in zip(range(self._num_workers), waiting, strict=False):
            if place == len(self._workers):
                self._workers.append(self._start())
            self._give(self._workers[place], function, iter([first]))
        while busy := [worker for worker in self._workers if worker.task is not None]:
            ready = set(wait([worker.connection for worker in (*busy, *self._servers)]))
            self._servers = [self._served_on(each) if each.connection in ready else each for each in self._servers]
            for worker in [w for w in busy if w.connection in ready]:
                done: tuple[T, R] | None = self._receive(worker, function, waiting)
                if done is not None:
                    yield done

    def at_work(self) -> list[tuple[Any, int]]:
        """Returns the task of each busy worker, and how many of its rows are done. Another thread may ask."""
        found = []
        for worker in [worker for worker in self._workers if worker.task is not None]:
            with contextlib.suppress(ValueError):  # it died, and its marks are closed
                found.append((worker.task, position_of(worker.marks)))
        return found

    def _receive(
        self, worker: _Worker, function: Callable[[T], R], waiting: Iterator[tuple[T, int]]
    ) -> tuple[T, R] | None:
        task: T = worker.task
        try:
            failed, value = worker.connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self._replace(worker, function)
            return None
        if failed:
            raise value
        self._give(worker, function, waiting)
        return task, value

    def _served_on(self, server: _Worker) -> _Worker:
        """Returns the process that serves in the place of one that has died. Raises what ended it."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            raise server.connection.recv()[1]
        server.process.wait()
        server.connection.close()
        server.marks.close()
        return self._serving(server.task)

    def _replace(self, worker: _Worker, function: Callable[[T], R]) -> None:
        status = worker.process.wait()
        if worker.attempts >= 1:
            raise WorkerDied(worker.task, position_of(worker.marks), status)
        worker.connection.close()
        worker.marks.close()
        index = self._workers.index(worker)
        self._workers[index] = self._start()
        self._give(self._workers[index], function, iter([(worker.task, worker.attempts + 1)]))

    def _give(self, worker: _Worker, function: Callable[[T], R], waiting: Iterator[tuple[T, int]]) -> None:
        worker.task, worker.attempts = next(waiting, (None, 0))
        if worker.task is not None:
            worker.marks[:8] = bytes(8)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen again, and handled, at recv
                worker.connection.send((function, worker.task, worker.attempts > 0, self._device_of(worker)))

    def _device_of(self, worker: _Worker) -> str | None:
        """Returns the socket of the process that runs models for a worker."""
        servers = self._servers
        return servers[self._workers.index(worker) % len(servers)].task[1] if servers else None

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(bytes(8))
            file.flush()
            marks = mmap.mmap(file.fileno(), 8)
            process = self._fork(theirs.fileno(), file.fileno())
        return _Worker(process, Connection(ours.detach()), marks)

    def _fork(self, connection_fd: int, marks_fd: int) -> _Fork:
        if self._forks is not None:
            with contextlib.suppress(OSError):  # somebody has killed it, and all workers with it
                return self._forks.start(connection_fd, marks_fd)
            self._forks.end()
        self._forks = _Forks(self._modules)
        return self._forks.start(connection_fd, marks_fd)


def position_of(marks: mmap.mmap) -> int:
    """Returns the row that a worker was at."""
    return int.from_bytes(marks[:8], "little")
