"""Worker processes of `pool.Pool`, and the process that they are forks of.

`python -m forebay.preprocess.worker` imports what the workers will need, once, and forks one for every order that
comes. It runs no task, so it has one thread, and a fork inherits no lock; where a library started a thread when it was
imported, the worker begins as a new program instead. A worker receives `(function, task, is it tried again, device)`
and sends `(failed, result)`. It ends when the process that it is a fork of does, and that one ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from forebay.extras import arrow_without_pandas
from forebay.task_map import begin, mark_in
from forebay.visible import visible_output

ORDER = struct.Struct("<cq")
"""What is wanted, and the number that the parent gave a worker; of a start, two descriptors beside it."""
STATUS = struct.Struct("<q")
START, WAIT = b"s", b"w"
_PR_SET_PDEATHSIG = 1


def main(connection_fd: int, marks_fd: int, parent: int) -> None:
    """Works until the parent closes the connection or dies."""
    if not _ends_with(parent):
        return
    mark_in(mmap.mmap(marks_fd, 8))
    with visible_output():  # what it warns of goes to the same terminal as what the parent says
        _serve(Connection(connection_fd))


def serve_forks(orders_fd: int, parent: int, modules: Sequence[str]) -> None:
    """Imports modules, then starts workers and says how they ended, until nobody orders any more; then kills them all.

    modules: one that cannot be imported is left to the task that needs it, which says what is wrong.
    """
    if not _ends_with(parent):
        return
    gc.disable()  # nothing that is imported is garbage
    arrow_without_pandas()
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on the end of the orders ends it, and its workers first
    gc.freeze()  # so that a collection in a worker does not copy the pages of all that was imported
    gc.enable()
    workers: dict[int, int] = {}
    with socket.socket(fileno=orders_fd) as orders:
        while order := _order(orders):
            what, number, fds = order
            if what == START:
                workers[number] = _fork(orders, *fds)
            else:
                orders.sendall(STATUS.pack(_status_of(workers.pop(number))))
    for pid in workers.values():
        os.kill(pid, signal.SIGKILL)
    for pid in workers.values():
        os.waitpid(pid, 0)


def _ends_with(parent: int) -> bool:
    """Makes the kernel kill this process when its parent dies. False: the parent has died already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides what ends
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _order(orders: socket.socket) -> tuple[bytes, int, list[int]] | None:
    try:
        data, fds, _, _ = socket.recv_fds(orders, ORDER.size, 2, socket.MSG_WAITALL)
    except ConnectionResetError:
        return None
    return (*ORDER.unpack(data), fds) if data else None


def _status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(orders: socket.socket, connection_fd: int, marks_fd: int) -> int:
    parent, has_threads = os.getpid(), len(os.listdir("/proc/self/task")) > 1
    if pid := os.fork():
        os.close(connection_fd)
        os.close(marks_fd)
        return pid
    status = 1
    try:
        orders.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if has_threads:
            _begin_anew(connection_fd, marks_fd, parent)
        if "numpy.random" in sys.modules:  # random seeds itself in a fork
            sys.modules["numpy"].random.seed()
        main(connection_fd, marks_fd, parent)
        status = 0
    except BaseException:  # noqa: BLE001  its traceback is all that can be said
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # never back to what the fork was in


def _begin_anew(connection_fd: int, marks_fd: int, parent: int) -> NoReturn:
    for fd in (connection_fd, marks_fd):
        os.set_inheritable(fd, True)  # noqa: FBT003
    numbers = map(str, (connection_fd, marks_fd, parent))
    os.execv(sys.executable, [sys.executable, "-m", "forebay.preprocess.worker", "work", *numbers])


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, task, is_tried_again, device = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        begin(is_tried_again=is_tried_again, on=device)
        try:
            reply = (False, function(task))
        except Exception as err:  # noqa: BLE001  it is raised in the parent
            reply = (True, err)
        try:
            connection.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    # Under its real name, not `__main__`: tasks know it by that.
    from forebay.preprocess import worker

    if sys.argv[1] == "forks":
        worker.serve_forks(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        worker.main(*map(int, sys.argv[2:]))
