"""A process beside a forked one that asks stores in its stead: obstore's threads do not live on in a fork.

obstore starts its threads at its first request. A process that is forked afterwards (the workers of a DataLoader are)
has the request's locks and none of the threads, so that its own requests would wait for ever. Such a process starts
`python -m forebay.store.remote.bucket.beside` instead, one at a time for each of its threads, and asks through a
socket. Both ends are forebay of one user, so what passes there is pickled. The helper ends when the socket is closed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from forebay.errors import RemoteError


class _Here:
    """The state of obstore's threads and helpers in this process. In a fork its values are those of the parent."""

    def __init__(self) -> None:
        self.started_in = 0
        self.owner = 0
        self.idle: list[_Helper] = []

    def take(self) -> _Helper:
        """Returns a helper that nobody else asks. A list needs no lock, which a fork might inherit locked."""
        if self.owner != os.getpid():
            self.owner, self.idle = os.getpid(), []
        try:
            return self.idle.pop()
        except IndexError:
            return _Helper()


class _Helper:
    """One process, and the socket to it."""

    def __init__(self) -> None:
        mine, others = socket.socketpair()
        with others:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forebay.store.remote.bucket.beside", str(others.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[others.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C is for who asks; the helper ends with the socket
            )
        self.connection = Connection(mine.detach())

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


_here = _Here()


def threads_start() -> None:
    """Notes that obstore's threads start in this process."""
    _here.started_in = os.getpid()


def is_cut_off() -> bool:
    """Returns whether obstore's threads were started in a process that this one was forked from."""
    return _here.started_in not in (0, os.getpid())


def ask(asked: Any, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Any]:
    """Yields what a method of `asked`, which pickles, yields or returns; raises its errors, RemoteError if all died."""
    helper = _here.take()
    is_over = False
    try:
        helper.connection.send((asked, method, args, options))
        while True:
            kind, value = helper.connection.recv()
            if kind == "item":
                yield value
                continue
            is_over = True
            if kind == "error":
                raise value
            return
    except (EOFError, OSError) as err:
        if is_over:
            raise
        raise RemoteError(f"the process that asks stores for process {os.getpid()} died ({err}); try again") from err
    finally:
        if is_over:
            _here.idle.append(helper)
        else:
            helper.end()


def main(descriptor: int) -> None:
    """Answers until the other end is closed."""
    connection = Connection(descriptor)
    known: dict[Any, Any] = {}
    while True:
        try:
            asked, method, args, options = connection.recv()
            asked = known.setdefault((asked.url, asked.settings), asked)
            _answer(connection, asked, method, args, options)
        except (EOFError, OSError):
            return


def _answer(connection: Connection, asked: Any, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        found = getattr(asked, method)(*args, **options)
        for one in found if isinstance(found, Iterator) else (found,):
            connection.send(("item", one))
    except ConnectionError:  # who asked has gone
        raise
    except Exception as err:  # noqa: BLE001 - who asked gets it
        connection.send(("error", err))
    else:
        connection.send(("end", None))


if __name__ == "__main__":
    main(int(sys.argv[1]))
