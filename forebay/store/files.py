"""Writing that is complete or absent, and whole-file hashes."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from forebay.store.held import AnyFile
from forebay.store.temporary import temporary_name

_BLOCK = 4 * 1024 * 1024
_SYNC_FILE_RANGE_WRITE = 2


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path` when the block ends without an error: written aside, fsynced, renamed, folder fsynced.

    On an error nothing is left behind and an older `path` stays as it was; only where the last step, the folder's fsync,
    fails, is the new file there, whole. Buffering is off: each `write` is one call, so that a full disk is reported by it
    and not by a later signal.
    """
    temporary = temporary_name(path)
    try:
        with _naming(path), open(temporary, "xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_folder(path.parent)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that names none: those of write and fsync do not."""
    try:
        yield
    except OSError as err:
        if err.filename is None:
            err.filename = str(path)
        raise


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes every byte, also where one `write` call takes only part of them (it does above 2 GiB)."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def start_writeback(file: BinaryIO) -> None:
    """Makes the kernel begin to write to the disk what `file` has so far, without waiting: the fsync at the end then waits less.

    sync_file_range of Linux, which Python does not have. Only a hint: where it fails, fsync does all of it.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "sync_file_range"):
        all_of_it = ctypes.c_longlong(0)
        libc.sync_file_range(file.fileno(), all_of_it, all_of_it, _SYNC_FILE_RANGE_WRITE)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Makes `path` hold exactly `data`, or leaves it as it was."""
    with write_aside(path) as file:
        write_all(file, data)


def fsync_folder(path: Path) -> None:
    """Makes the names inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: AnyFile) -> str:
    """Returns the xxh3-128 of a whole file, as 32 hex digits."""
    with path.open("rb", buffering=0) as file:
        return hash_opened(file)


def hash_opened(file: io.FileIO) -> str:
    """Returns the xxh3-128 of an opened file from where it stands to its end, as 32 hex digits."""
    state = xxhash.xxh3_128()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    while count := file.readinto(buffer):
        state.update(view[:count])
    return state.hexdigest()


def link_or_copy(source: Path, target: Path) -> bool:
    """Makes `target` the same bytes as `source`, by hard link where the file system allows it; says whether it linked.

    A `target` that exists is replaced.
    """
    temporary = temporary_name(target)
    try:
        try:
            os.link(source, temporary)
            linked = True
        except OSError:
            _copy(source, temporary)
            linked = False
        os.replace(temporary, target)
    finally:
        # rename() of two links to one inode does nothing and leaves both names.
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return linked


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb", buffering=0) as reader, _naming(target), open(target, "xb", buffering=0) as writer:
        while block := reader.read(_BLOCK):
            write_all(writer, block)
        os.fsync(writer.fileno())
