"""Promises that a file system of several machines does not make, and how forebay is right without them.

On NFS a machine believes for up to a minute what it knows: names, their absence, attributes (`actimeo`). A file that
another machine deleted answers ESTALE. A file that is deleted while it is open stays as `.nfsXXXX`, so its folder
cannot go. Locks may be missing, or be seen by one machine alone. An answer may be lost, and the repetition of what was
done fails. On a disk of one machine none of this happens, and nothing here waits.

Locks (flock) end with their process. A lock tells who reads, builds or writes while that goes on, and nothing of what
lies on disk: all that is kept is right without it. A shared lock says "somebody is here"; who gets the exclusive one is
alone. Without locks, or where other machines do not see them, each caller decides whether it goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)
LATE_S = 65.0
"""After this, a machine sees what another one did: acdirmax of NFS is 60 s, unless the mount says otherwise."""
SILLY_MARK = ".nfs"
"""How a file is called that was deleted while a process of this machine has it open."""
_LATE = frozenset(
    "afs beegfs beegfs_nodev ceph cifs glusterfs gpfs lustre mmfs nfs nfs4 orangefs panfs pvfs2 smb3 wekafs".split()  # noqa: SIM905
)
_LOCAL_LOCKS = frozenset(("nolock", "local_lock=flock", "local_lock=all", "localflock"))
_MOUNTS = Path("/proc/self/mountinfo")
_LONGEST_PAUSE_S = 2.0


def is_late(path: Path) -> bool:
    """Whether other machines' changes below a folder may show late: it, or what is there of it, is no local disk."""
    kind, _ = _mount_of(path)
    return kind in _LATE or kind.partition(".")[0] == "fuse"


def has_locks(path: Path) -> bool:
    """Whether a lock there is seen by every machine that can see the file, as far as its mount tells."""
    kind, options = _mount_of(path)
    if kind == "lustre":
        return "flock" in options
    return not is_late(path) or (kind in ("nfs", "nfs4", "ceph") and not options & _LOCAL_LOCKS)


def is_gone(err: OSError) -> bool:
    """Whether an error says that a file is not there, or not any more."""
    return err.errno in (errno.ENOENT, errno.ESTALE)


def seen(look: Callable[[], T], folder: Path, *, what: str) -> T:
    """Returns what `look` finds, once that is true; where `folder` shows changes late, it looks again for a minute.

    what: what is waited for, for the log.
    """
    found = look()
    if found or not is_late(folder):
        return found
    logger.info("%s shows changes of other machines late: waiting up to %.0f s for %s", folder, LATE_S, what)
    began, pause_s = time.monotonic(), 0.05
    while not found and time.monotonic() - began < LATE_S:
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        found = look()
    return found


def look_anew(folder: Path) -> None:
    """Makes this machine ask what stands at a path, after what it knew of it has turned out to be stale.

    The kernel asks by itself where a whole path leads to something stale, and not where a descriptor does.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(folder / "metadata.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    if is_late(folder):
        time.sleep(0.05)


def move(source: Path, target: Path) -> None:
    """Renames as `os.rename` does; a rename that was done and whose answer was lost counts as done.

    Its repetition finds no `source`, which has a name that only its writer uses, and there is a `target`.
    """
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if not seen(lambda: os.path.lexists(target), target.parent, what=f"the new name {target.name}"):
            raise


def _mount_of(path: Path) -> tuple[str, frozenset[str]]:
    """Returns type and options of the mount that a path, or the nearest folder above that is there, lies on."""
    with contextlib.suppress(OSError):
        while not os.path.lexists(path) and path != path.parent:
            path = path.parent
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                left, _, right = line.partition(" - ")
                fields = left.split(" ")
                if fields[2] == wanted:
                    kind, _, options = right.strip().split(" ", 2)
                    return kind, frozenset(f"{fields[5]},{options}".split(","))
    return "", frozenset()


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
