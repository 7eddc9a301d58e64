"""A worker process of `pool.Pool`: it receives `(function, task, is it tried again)` and sends `(failed, result)`.

It ends when its parent does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from multiprocessing.connection import Connection

from forebay.visible import visible_output

_PR_SET_PDEATHSIG = 1
_marks: mmap.mmap | None = None
_is_second_try = False


def mark(position: int) -> None:
    """Notes the row that is being worked on, where the parent finds it if this process dies. Costs a memory write."""
    if _marks is not None:
        _marks[:8] = position.to_bytes(8, "little")


def is_second_try() -> bool:
    """Whether a process has died over the task that is worked on: if this one dies too, the row should be known."""
    return _is_second_try


def main(connection_fd: int, marks_fd: int, parent: int) -> None:
    """Works until the parent closes the connection or dies."""
    global _marks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides what ends
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    _marks = mmap.mmap(marks_fd, 8)
    with visible_output():  # what it warns of goes to the same terminal as what the parent says
        _serve(Connection(connection_fd))


def _serve(connection: Connection) -> None:
    global _is_second_try
    while True:
        try:
            function, task, _is_second_try = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            reply = (False, function(task))
        except Exception as err:  # noqa: BLE001  it is raised in the parent
            reply = (True, err)
        try:
            connection.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    # The module under its real name, not `__main__`: `mark` must see the `_marks` that is set here.
    from forebay.preprocess import worker

    worker.main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
