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

from forebay.task_map import begin, mark_in
from forebay.visible import visible_output

_PR_SET_PDEATHSIG = 1


def main(connection_fd: int, marks_fd: int, parent: int) -> None:
    """Works until the parent closes the connection or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides what ends
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    mark_in(mmap.mmap(marks_fd, 8))
    with visible_output():  # what it warns of goes to the same terminal as what the parent says
        _serve(Connection(connection_fd))


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, task, is_tried_again = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        begin(is_tried_again=is_tried_again)
        try:
            reply = (False, function(task))
        except Exception as err:  # noqa: BLE001  it is raised in the parent
            reply = (True, err)
        try:
            connection.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
