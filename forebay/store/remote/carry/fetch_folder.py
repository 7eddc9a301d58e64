"""The folder that a fetch fills, by descriptors: no link on the way is followed, and every name appears whole.

What is being downloaded lies directly in the folder, under a temporary name that begins with a digest of what it is to
be. Its owner holds a lock on it. So the next fetch goes on with what a dead one left of the same object, and two
fetches at once have a file each.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from forebay.errors import ConfigError
from forebay.store.files import TEMPORARY_MARK, abandoned, is_temporary, temporary_name, this_place
from forebay.store.remote.carry.fetch_list import folders_of
from forebay.store.remote.carry.proof import Expected
from forebay.store.shared_disk import try_alone

_BLOCK = 4 * 1024 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class InTheWayError(Exception):
    """Something stands in the folder that is neither the file nor anything that a fetch replaces."""


class TargetFolder:
    """The folder that a user named, held open. Threads may share it."""

    def __init__(self, path: Path) -> None:
        """Makes the folder: its own name may lead through links, those below not. ConfigError where it is none."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as err:
            raise ConfigError(f"{path} is no folder, or {err.filename} is none; name another --output") from err
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self.descriptor).st_dev
        self._made: set[str] = set()

    def __enter__(self) -> TargetFolder:
        return self

    def __exit__(self, *error: object) -> None:
        """Makes the names durable that were given."""
        try:
            for folder in self._made:
                with contextlib.suppress(OSError, InTheWayError), self._parent(f"{folder}/.", make=False) as (place, _):
                    os.fsync(place)
            with contextlib.suppress(OSError):
                os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)

    def stat(self, name: str) -> os.stat_result | None:
        """Returns the stat of a file, None without one; InTheWayError for anything else there or on the way."""
        try:
            with self._parent(name, make=False) as (place, last):
                found = os.stat(last, dir_fd=place, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise InTheWayError(f"{self.path / name} is {_kind(found)}, no file")
        return found

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[int]:
        """Yields the descriptor of a file that is there."""
        with self._parent(name, make=False) as (place, last):
            descriptor = os.open(last, os.O_RDONLY | _FILE, dir_fd=place)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def tells_apart(self) -> bool:
        """Returns whether the folder holds two names that differ by case, or by their Unicode form, alone."""
        path = temporary_name(self.path / ".f\u00e9")
        other = (path.name.swapcase(), path.name.replace("\u00e9", "e\u0301"))
        descriptor = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, dir_fd=self.descriptor)
        try:
            return not any(os.access(name, os.F_OK, dir_fd=self.descriptor, follow_symlinks=False) for name in other)
        finally:
            os.close(descriptor)
            os.unlink(path.name, dir_fd=self.descriptor)

    def part(self, expected: Expected, source: str) -> FilePart:
        """Returns the beginning of a file: what a dead fetch left of the same object, or nothing yet.

        A machine that died may have lost bytes in the middle: where nothing would show it, the file begins anew.
        """
        digest = xxhash.xxh3_64_hexdigest(f"{source}\0{expected.identity}".encode("utf-8", "surrogatepass"))
        prefix = f".{digest}"
        for left in self._left(prefix + TEMPORARY_MARK):
            descriptor = self._adopted(left, temporary_name(self.path / prefix).name)
            if descriptor is not None:
                part = FilePart(self, *descriptor, expected)
                if not (expected.may_be_proven or f"{TEMPORARY_MARK}{this_place()}-" in left):
                    part.begin_anew()
                return part
        while True:
            name = temporary_name(self.path / prefix).name
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
            created = os.open(name, flags, 0o666, dir_fd=self.descriptor)
            if try_alone(created) != "taken" and self._is_still(name, created):
                return FilePart(self, created, name, expected)
            os.close(created)  # taken for that of a dead fetch before it was locked, and perhaps finished by now

    def _is_still(self, name: str, descriptor: int) -> bool:
        try:
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(descriptor))

    def free_bytes(self) -> int:
        """Returns what a fetch may fill: what is free, and what interrupted fetches left, which is gone on with."""
        found, held = os.fstatvfs(self.descriptor), 0
        with self._entries() as entries:
            for entry in entries:
                if is_temporary(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # another fetch has just given it its name
                        held += entry.stat(follow_symlinks=False).st_blocks * 512
        return found.f_bavail * found.f_frsize + held

    def publish(self, part: str, name: str) -> None:
        """Gives a whole file its name. Raises InTheWayError where a folder or link stands on the way."""
        with self._parent(name, make=True) as (place, last):
            os.rename(part, last, src_dir_fd=self.descriptor, dst_dir_fd=place)
        if name.rpartition("/")[0] not in self._made:
            self._made |= folders_of([name])

    @contextlib.contextmanager
    def _entries(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Yields the folder's entries by a descriptor of its own: copies of one share the place that was read to."""
        descriptor = os.open(".", _FOLDER, dir_fd=self.descriptor)
        try:
            with os.scandir(descriptor) as entries:
                yield entries
        finally:
            os.close(descriptor)

    def _left(self, prefix: str) -> list[str]:
        found: list[tuple[int, str]] = []
        with self._entries() as entries:
            for entry in entries:
                if entry.name.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((-entry.stat(follow_symlinks=False).st_size, entry.name))
        return [name for _, name in sorted(found)]

    def _adopted(self, left: str, name: str) -> tuple[int, str] | None:
        """Takes over what a dead fetch left, under a name of this process; None where somebody is at it."""
        try:
            descriptor = os.open(left, os.O_RDWR | _FILE, dir_fd=self.descriptor)
        except OSError:
            return None
        with contextlib.suppress(FileNotFoundError):  # somebody was faster
            lock = try_alone(descriptor)
            # Without locks, whether the process lives is all that tells.
            is_free = lock == "had" or (lock == "none" and left in {path.name for path in abandoned(self.path)})
            found = os.fstat(descriptor)
            if is_free and stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                os.rename(left, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
                if self._is_still(name, descriptor):
                    return descriptor, name
        os.close(descriptor)
        return None

    @contextlib.contextmanager
    def _parent(self, name: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Yields a descriptor of the folder of a name, and the last part of it."""
        place, done = os.dup(self.descriptor), self.path
        try:
            *parts, last = name.split("/")
            for part in parts:
                done /= part
                below = self._entered(place, part, done, make=make)
                os.close(place)
                place = below
            yield place, last
        finally:
            os.close(place)

    def _entered(self, place: int, part: str, path: Path, *, make: bool) -> int:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=place)
        try:
            below = os.open(part, _FOLDER, dir_fd=place)
        except OSError as err:
            if err.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            found = os.stat(part, dir_fd=place, follow_symlinks=False)
            raise InTheWayError(f"{path} is {_kind(found)}, no folder") from err
        if os.fstat(below).st_dev != self._device:
            os.close(below)
            raise InTheWayError(f"{path} is on another file system than {self.path}: fetch into it by itself")
        return below


class FilePart:
    """A file while it is downloaded: its bytes from the first one on, as far as they came. A context.

    size_bytes: what is there, of it resumed_bytes of a dead fetch. Whether all is right shows when it is whole.
    """

    def __init__(self, folder: TargetFolder, descriptor: int, name: str, expected: Expected) -> None:
        self.folder, self.name, self.expected = folder, name, expected
        self._descriptor = descriptor
        self.size_bytes = self.resumed_bytes = os.fstat(descriptor).st_size
        if self.size_bytes > expected.size_bytes:
            self.begin_anew()

    def __enter__(self) -> FilePart:
        return self

    def __exit__(self, *error: object) -> None:
        """Lets go of it: whoever comes next goes on."""
        os.close(self._descriptor)

    @property
    def path(self) -> Path:
        """Where it is until it has its name."""
        return self.folder.path / self.name

    def append(self, data: bytes) -> None:
        """Writes bytes at its end."""
        view = memoryview(data).cast("B")
        with self._naming():
            while view:
                count = os.pwrite(self._descriptor, view, self.size_bytes)
                view, self.size_bytes = view[count:], self.size_bytes + count

    def begin_anew(self) -> None:
        """Takes away what is there."""
        with self._naming():
            os.ftruncate(self._descriptor, 0)
        self.size_bytes = self.resumed_bytes = 0

    def pieces(self) -> Iterator[bytes]:
        """Yields what is there."""
        return read_pieces(self._descriptor, self.size_bytes)

    def publish(self) -> None:
        """Gives the file its name: durable and whole. Whether it is right was seen before."""
        with self._naming():
            os.fsync(self._descriptor)
        self.folder.publish(self.name, self.expected.name)

    def remove(self) -> None:
        """Takes away what nobody will go on with."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.folder.descriptor)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Adds the path to an error: those of write and fsync name none."""
        try:
            yield
        except OSError as err:
            err.filename = err.filename or str(self.folder.path / self.expected.name)
            raise


def read_pieces(descriptor: int, size_bytes: int) -> Iterator[bytes]:
    """Yields the first bytes of an open file, as far as it goes."""
    start = 0
    while start < size_bytes and (piece := os.pread(descriptor, min(_BLOCK, size_bytes - start), start)):
        yield piece
        start += len(piece)


def _kind(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "a link"
    return "a folder" if stat.S_ISDIR(found.st_mode) else f"{stat.filemode(found.st_mode)}, a device or a pipe"
