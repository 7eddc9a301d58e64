"""Durations from headers, for the rows whose manifest gives none."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.errors import SampleError
from forebay.preprocess.headers import header_info

_GONE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
}


def is_gone(err: OSError) -> bool:
    """Whether an error says that a file cannot be had; any other (EIO, ENOMEM, ...) is of the machine and stops the build."""
    return err.errno in _GONE


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Yields a descriptor of a regular file. Raises OSError for anything else, without waiting for a pipe's writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, "not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def header_duration_s(descriptor: int, *, offset: int, size: int) -> float:
    """Returns the duration that the header of an encoded clip gives, NaN where it gives none.

    The clip is `size` bytes at `offset` of the file.
    """
    return duration_of(
        lambda start, count: os.pread(descriptor, max(0, min(count, size - start)), offset + start), size
    )


def duration_of(read: Callable[[int, int], bytes], size: int) -> float:
    """Returns the duration that the header of an encoded clip gives, NaN where it gives none.

    read: (offset in the clip, number of bytes) -> bytes, fewer only at its end. size: of the clip in bytes.
    """
    try:
        info = header_info(read, size)
    except SampleError:
        return math.nan
    if info is None or info.num_samples <= 0 or info.sample_rate_hz <= 0:
        return math.nan
    return float(info.num_samples / info.sample_rate_hz)


def unknown_duration(name: str, sample_id: str, *, size: int) -> tuple[str, str]:
    """Returns reason and message for a clip of `size` bytes that nothing gives a duration for."""
    if size == 0:  # the reason that decoding gives where the manifest says a duration
        return "empty_file", f"{name}: sample {sample_id}: the file is empty (0 bytes); write or list it again"
    return (
        "unknown_duration",
        f"{name}: sample {sample_id}: neither manifest nor header gives a duration; mend or remove it",
    )
