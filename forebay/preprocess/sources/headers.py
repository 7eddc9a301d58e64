"""Durations from headers, for the rows whose manifest gives none."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.errors import DecodeError
from forebay.preprocess.headers import MAX_WHOLE_BYTES, header_info
from forebay.preprocess.streams import one_stream

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
    """Returns the duration that the header of an encoded clip gives; raises as `duration_of` does.

    The clip is `size` bytes at `offset` of the file.
    """
    return duration_of(
        lambda start, count: os.pread(descriptor, max(0, min(count, size - start)), offset + start), size
    )


def duration_of(read: Callable[[int, int], bytes], size: int) -> float:
    """Returns the duration that the header of an encoded clip gives.

    read: (offset in the clip, number of bytes) -> bytes, fewer only at its end. size: of the clip in bytes.
    Raises DecodeError where it gives none: `empty_file`, `truncated_audio` or `chained_audio` where that is why, else
    `unknown_duration`.
    """
    if not size:  # the reason that decoding gives where the manifest says a duration
        raise DecodeError("empty_file", "the file is empty (0 bytes); write or list it again")
    info = header_info(read, size)
    if info is not None and info.num_samples > 0 and info.sample_rate_hz > 0:
        return float(info.duration_s)
    _, problem = one_stream(read(0, size)) if size <= MAX_WHOLE_BYTES else (b"", None)
    raise DecodeError(
        *(problem or ("unknown_duration", "neither manifest nor header gives a duration; mend or remove it"))
    )


def no_duration(name: str, sample_id: str, err: DecodeError) -> tuple[str, str]:
    """Returns reason and message for a clip that nothing gives a duration for. name: of its file."""
    return err.reason, f"{name}: sample {sample_id}: {err}"
