"""flock on files of the node's folder: a lock is of an open file, so it ends with the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import CacheError, ConfigError

EXCLUSIVE, SHARED = fcntl.LOCK_EX, fcntl.LOCK_SH
_LONGEST_PAUSE_S = 0.02


def try_lock(descriptor: int, how: int, path: object) -> bool:
    """Locks an open file, or returns False where somebody has it. Raises ConfigError on a file system without locks."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        raise ConfigError(
            f"{path} cannot be locked ({err.strerror}); what a node keeps of stores needs a local disk: set "
            "remote.shard_dir",
            code="FB610",
        ) from err
    return True


@functools.cache
def _require_locks(path: Path) -> None:
    """Raises ConfigError where a file that is locked can be locked again: locks that do nothing keep nobody out."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if try_lock(descriptor, EXCLUSIVE, path):
            raise ConfigError(
                f"{path}: this file system grants a lock that another process holds; what a node keeps of stores needs "
                "a local disk: set remote.shard_dir",
                code="FB610",
            )
    finally:
        os.close(descriptor)


def pauses() -> Iterator[float]:
    """Yields after pauses that grow, with the seconds since the first one began."""
    began, pause_s = time.monotonic(), 0.0005
    while True:
        time.sleep(pause_s)
        yield time.monotonic() - began
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


@contextlib.contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[int]:
    """Yields the descriptor of a file that nobody else has locked for as long as the block runs.

    The file is made where it is missing, and is never removed. Raises CacheError after `timeout_s`: whoever holds it
    does so for milliseconds, and only a stopped process holds it longer.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if not try_lock(descriptor, EXCLUSIVE, path):
            for waited_s in pauses():
                if try_lock(descriptor, EXCLUSIVE, path):
                    break
                if waited_s > timeout_s:
                    raise CacheError(
                        f"{path} is locked for {waited_s:.0f} s, longer than remote.timeout_s = {timeout_s:g}; a "
                        f"process that was stopped holds it; find it by: fuser {path}",
                        code="FB610",
                    )
        _require_locks(path)
        yield descriptor
    finally:
        os.close(descriptor)
