"""Who uses what is to go: locks, processes of this machine, notes of other hosts, disks that others mount."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.caches.files import File, Inode
from forebay.store.last_use import KEPT_S, Use, this_host
from forebay.store.shared_disk import has_locks, is_late

_PROC = Path("/proc")
_MAP = re.compile(r"\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process of this machine that has something open."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


class Processes:
    """What all processes of this machine have open, as it is now. Of other users' processes only root sees it."""

    def __init__(self, root: Path) -> None:
        """root: below which files are also known by their paths."""
        self._by_inode: dict[Inode, int] = {}
        self._below: list[tuple[str, int]] = []
        for entry in os.scandir(_PROC):
            for path, inode in _opened_by(int(entry.name)) if entry.name.isdigit() else ():
                self._by_inode.setdefault(inode, int(entry.name))
                if path.startswith(f"{root}{os.sep}"):
                    self._below.append((path, int(entry.name)))

    def with_any_of(self, folder: Path, files: Iterable[File]) -> Process | None:
        """Returns a process that has a folder, or a file of it, open, mapped or as the folder that it is in.

        Files are known by their numbers, whatever the process calls them; by their path where another folder has a link
        to the same file.
        """
        own = [file.inode for file in files if file.num_links == 1 or file.kind == "folder"]
        with contextlib.suppress(OSError):
            status = os.stat(folder, follow_symlinks=False)
            own.append((status.st_dev, status.st_ino))
        found = next((self._by_inode[inode] for inode in own if inode in self._by_inode), None)
        if found is None:
            inside = f"{folder}{os.sep}"
            found = next((pid for path, pid in self._below if path == str(folder) or path.startswith(inside)), None)
        return None if found is None else Process(pid=found, name=_name_of(found))


def _opened_by(pid: int) -> Iterator[tuple[str, Inode]]:
    """Yields path and number of what a process has open; this process' own descriptors are left out."""
    place = _PROC / str(pid)
    with contextlib.suppress(OSError):
        links = [place / "cwd", place / "root", *(Path(entry.path) for entry in os.scandir(place / "fd"))]
        for link in links if pid != os.getpid() else ():
            with contextlib.suppress(OSError):
                status = os.stat(link)
                yield os.readlink(link), (status.st_dev, status.st_ino)
    with contextlib.suppress(OSError):
        for line in (place / "maps").read_text(errors="surrogateescape").splitlines():
            found = _MAP.match(line)
            if found is not None and found[4].startswith("/"):
                yield found[4], (os.makedev(int(found[1], 16), int(found[2], 16)), int(found[3]))


def _name_of(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "gone"


def is_mount_within(folder: Path) -> bool:
    """Whether something is mounted at a folder or below it."""
    with contextlib.suppress(OSError), open(_PROC / "self" / "mountinfo", errors="surrogateescape") as lines:
        for line in lines:
            place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4])
            if place == str(folder) or place.startswith(f"{folder}{os.sep}"):
                return True
    return False


def try_lock(descriptor: int, folder: Path) -> str:
    """Takes the exclusive lock on an opened file that readers or builders share: `had`, `taken` or `unknown`.

    unknown: no lock tells who is there.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        return "taken" if err.errno == errno.EWOULDBLOCK else "unknown"
    return "had" if has_locks(folder) else "unknown"


def elsewhere(folder: Path, uses: Iterable[Use]) -> str | None:
    """Returns why a folder may be in use on another host, None where nothing says so."""
    if is_late(folder):
        return "it lies on a disk that other hosts may mount"
    hosts = [use for use in uses if use.host != this_host() and time.time() - use.used_ns / 1e9 < KEPT_S]
    return f"it was used on the host {hosts[0].host}" if hosts else None
