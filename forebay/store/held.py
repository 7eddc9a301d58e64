"""A cache's folder held open: a rebuild puts another folder at its path, and this one stays readable.

Files are found by the folder's descriptor, so that all of them are of one state. While somebody reads, a shared lock on
metadata.json postpones the removal of a folder that was replaced. Where locks do not tell who reads, the folder stays
for a day. The lock only keeps a reader going: files that are gone are a CacheReplacedError.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.errors import CacheError, CacheNotFoundError, CacheReplacedError
from forebay.store.shared_disk import alone_in, is_gone, is_late, try_shared

ORIGIN = "origin.json"
"""In a folder that stands for one of a store: which one, see `forebay.store.remote.mirror`. It holds no secret."""
_LEASE = "metadata.json"
"""The file that readers lock: unlike the folder it can be opened for writing, which NFS needs for exclusive locks."""
_PATIENCE_S, _PAUSE_S = 5.0, 0.001
"""Whoever locks a cache to remove it renames it at once; a stopped process must not stop readers for good."""


class HeldFolder:
    """An opened folder; `folder / name` is one of its files. Closed when the last reference to it is gone."""

    def __init__(self, path: Path) -> None:
        """Opens a folder, locked against removal. CacheNotFoundError: it is none; CacheError: it cannot be opened."""
        self.path = path
        self.descriptor = -1
        self._is_stale = False
        began = time.monotonic()
        while self.descriptor < 0:
            descriptors = _opened(path, is_patient=time.monotonic() - began < _PATIENCE_S)
            if descriptors is None:  # somebody who may remove it looks at it
                time.sleep(_PAUSE_S)
            elif _is_at(path, descriptors[0]):
                self.descriptor = descriptors[0]
                weakref.finalize(self, _close, descriptors).atexit = False
            else:  # it was replaced in between, and may have been removed before it was locked
                _close(descriptors)

    def __truediv__(self, name: str) -> HeldFile:
        return HeldFile(self, name)

    def __str__(self) -> str:
        return str(self.path)

    def is_replaced(self) -> bool:
        """Whether another folder, or none, stands at its path by now."""
        return self._is_stale or not _is_at(self.path, self.descriptor)

    def raise_gone(self, place: str, err: OSError) -> None:
        """Raises CacheReplacedError where one of its files is gone with the folder: nobody takes one out of it.

        A stale file was removed by another machine, though the path may show the old folder for a while.
        """
        self._is_stale |= err.errno == errno.ESTALE
        if self.is_replaced():
            raise CacheReplacedError(
                f"{self} was replaced or removed after it had been opened, and {place} of it is gone; open it again"
            ) from err


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file of a held folder, read and shown as a `Path` is. What is no regular file is never followed."""

    folder: HeldFolder
    place: str

    @property
    def path(self) -> Path:
        """The path by which it was opened; another folder may stand there by now."""
        return self.folder.path / self.place

    @property
    def parent(self) -> Path:
        """The folder of `path`."""
        return self.path.parent

    def __str__(self) -> str:
        return str(self.path)

    def lstat(self) -> os.stat_result:
        """Returns its stat. Raises CacheReplacedError where it is gone with its folder, else OSError."""
        with self._there():
            return os.stat(self.place, dir_fd=self.folder.descriptor, follow_symlinks=False)

    def open(self, mode: Literal["rb"] = "rb", buffering: Literal[0] = 0) -> io.FileIO:  # noqa: ARG002  as of a Path
        """Opens it for reading, unbuffered; CacheReplacedError where it is gone with its folder, else OSError."""
        with self._there():
            return io.FileIO(self.place, "rb", opener=self._open)

    def read_bytes(self) -> bytes:
        """Returns its bytes; raises as `open` does."""
        with self._there(), self.open() as file:
            return file.readall()

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            if is_gone(err):
                self.folder.raise_gone(self.place, err)
            raise

    def _open(self, name: str, flags: int) -> int:
        return open_own(name, flags, dir_fd=self.folder.descriptor)


Readers = Literal["none", "some", "unknown"]
AnyFolder = Path | HeldFolder
AnyFile = Path | HeldFile


def open_own(name: str, flags: int, *, dir_fd: int | None = None) -> int:
    """Opens a file of a cache, as an `opener`: a link would lead out of the cache, a named pipe would block."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)


def readers_of(folder: Path) -> Readers:
    """Returns whether somebody may read a folder that was put aside: `unknown` where no lock tells."""
    try:
        descriptor = os.open(folder / _LEASE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # not ours to lock, or no cache
        return "unknown" if is_late(folder) else "none"
    try:
        state = alone_in(descriptor, folder)
    finally:
        os.close(descriptor)
    return "none" if state == "had" else "some" if state == "taken" else "unknown"


def _opened(path: Path, *, is_patient: bool) -> tuple[int, ...] | None:
    """Returns descriptors of a folder and, locked, of its metadata.json where that can be had.

    None, if `is_patient`, while somebody has locked it to remove it: whoever opened it then would go without a lock.
    """
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheNotFoundError(f"{path} is not a folder; run: forebay preprocess CONFIG") from err
    except OSError as err:
        raise CacheError(f"cannot read {path}: {err.strerror}") from err
    try:
        lease = os.open(_LEASE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:  # what is wrong with it is said when it is read
        return (folder,)
    if try_shared(lease) == "taken" and is_patient:
        _close((folder, lease))
        return None
    return folder, lease


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
