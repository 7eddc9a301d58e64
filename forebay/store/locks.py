"""Locks that the kernel takes back when a process ends (flock), and what is known where a disk has none.

A lock tells who reads, builds or writes while that goes on, and nothing of what lies on disk: all that is kept is right
without it. A shared lock says "somebody is here"; who gets the exclusive one is alone. Where a file system has no
locks, or where other machines do not see them, nobody is told: each caller decides whether it then goes on.
"""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path
from typing import Literal

from forebay.store.shared_disk import has_locks

logger = logging.getLogger(__name__)

Lock = Literal["had", "taken", "none"]
"""`none`: there are no locks on this disk."""

_SAID_AFTER_S = 30.0


def try_alone(descriptor: int) -> Lock:
    """Takes the exclusive lock on an opened file without waiting; `taken`: another process has it, or shares it."""
    return _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def try_shared(descriptor: int) -> Lock:
    """Takes the shared lock on an opened file without waiting; `taken`: another process is alone there."""
    return _flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def wait_alone(descriptor: int) -> bool:
    """Takes the exclusive lock on an opened file, however long that takes; False where there are no locks."""
    return _flock(descriptor, fcntl.LOCK_EX) == "had"


def wait_shared(descriptor: int) -> bool:
    """Takes the shared lock on an opened file, however long that takes; False where there are no locks."""
    return _flock(descriptor, fcntl.LOCK_SH) == "had"


def must_lock(descriptor: int) -> bool:
    """Takes the exclusive lock without waiting, False where another process has it. Raises OSError without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Gives a lock up now, also where children have inherited the opened file."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _flock(descriptor: int, how: int) -> Lock:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return "taken"
    except OSError:
        return "none"
    return "had"


def alone_in(descriptor: int, folder: Path) -> Literal["had", "taken", "unknown"]:
    """Takes the exclusive lock on a file of a folder that readers or builders share.

    unknown: it was not had, or other machines do not see it, so no lock tells who is there.
    """
    state = try_alone(descriptor)
    return "taken" if state == "taken" else "had" if state == "had" and has_locks(folder) else "unknown"


def lock_for_work(descriptor: int, path: Path, *, patience_s: float | None = None) -> bool:
    """Takes an exclusive lock that only saves work; returns whether it was had.

    Without locks there is nothing to wait for. A machine that died may hold a lock of NFS for good: after `patience_s`
    the work is done without it; None: it is waited for, and the log says for which file.
    """
    began, pause_s, said_s = time.monotonic(), 0.001, _SAID_AFTER_S
    while (state := try_alone(descriptor)) == "taken":
        waited_s = time.monotonic() - began
        if patience_s is not None and waited_s > patience_s:
            logger.warning("%s is locked for %.0f s: going on without it", path, waited_s)
            return False
        if waited_s > said_s:
            logger.info("waiting for the process that has locked %s; if it is gone, remove that file", path)
            said_s *= 4
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)
    return state == "had"
