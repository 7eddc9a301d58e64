"""Bytes of a file taken out of the page cache, as far as the kernel does that."""

from __future__ import annotations

import errno
import os

_PAGE = 4096


def dropped(path: str, offset: int, size: int) -> str | None:
    """Returns None if these bytes of a file are on the disk alone now, else why they are not, or may not be.

    size: 0 is all from the offset on. Nothing is written, and no other process sees more of it than a slower read.
    """
    start = offset // _PAGE * _PAGE
    length = 0 if not size else -(-(offset + size - start) // _PAGE) * _PAGE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        return f"{err.strerror}: {path}"
    try:
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
        return _still_there(descriptor, offset)
    except OSError as err:
        return f"this file system does not let go of what it has read ({err.strerror})"
    finally:
        os.close(descriptor)


def _still_there(descriptor: int, offset: int) -> str | None:
    """Returns why a byte is not known to be on the disk alone."""
    if not hasattr(os, "RWF_NOWAIT"):
        return "this system does not tell what is in memory"
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return None
    except OSError as err:
        if err.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return "this file system does not tell what is in memory"
        raise
    return "this file system keeps what it has read (tmpfs does, and files that another process has mapped)"
