"""Names of what is being written, and the removal of what a killed process left behind under such a name."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

from forebay.store.held import readers_of

TEMPORARY_MARK = ".tmp-"
"""Part of the name of every file and folder that is being written; none of them is ever read."""

_OURS = re.compile(re.escape(TEMPORARY_MARK) + r"(?P<place>[0-9a-f]{8})-(?P<pid>[0-9a-f]+)-[0-9a-f]{8}\Z")
_OLD_S = 24 * 3600.0
"""A file that nobody wrote to for this long is not being written. Only for those of other machines, whose processes are
not seen from here."""


def temporary_name(path: Path) -> Path:
    """Returns a name beside `path` that no other writer uses and that tells which process writes it."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{this_place()}-{os.getpid():x}-{uuid.uuid4().hex[:8]}")


def is_temporary(name: str) -> bool:
    """Whether a name is one that `temporary_name` gives."""
    return _OURS.search(name) is not None


def abandoned(folder: Path) -> Iterator[Path]:
    """Yields what writers that were killed left unfinished directly in a folder. See `sweep`."""
    for entry in os.scandir(folder):
        match = _OURS.search(entry.name)
        if match is not None and _is_abandoned(entry, match["place"], int(match["pid"], 16)):
            yield Path(entry.path)


def sweep(folder: Path) -> list[Path]:
    """Removes what writers that were killed left unfinished directly in a folder; returns what it removed.

    What a process of this machine writes is left alone as long as a process of that number runs; what another machine,
    or another container, writes, until it has not changed for a day by the clock of the file system. A cache that was
    replaced and that somebody still reads is left to a later run; where no lock tells who reads, a folder stays for a
    day. Foreign names, and a folder that cannot be written, are left as they are.
    """
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in abandoned(folder):
            if path.is_symlink() or not path.is_dir() or not _may_be_read(path):
                _remove(path)
                removed.append(path)
    return removed


def remove_aside(folder: Path) -> bool:
    """Removes a folder that was put aside if nobody reads it; says whether it did. If not, a later `sweep` does."""
    if readers_of(folder) != "none":
        with contextlib.suppress(OSError):
            os.utime(folder)  # its day begins
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _may_be_read(folder: Path) -> bool:
    readers = readers_of(folder)
    return readers == "some" or (readers == "unknown" and not _is_old(folder))


def _is_abandoned(entry: os.DirEntry[str], place: str, pid: int) -> bool:
    return not is_running(pid) if place == this_place() else _is_old(Path(entry.path))


def _is_old(path: Path) -> bool:
    # Not our clock: it may be a day off from that of the machine that keeps the files.
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - path.lstat().st_mtime > _OLD_S


def is_running(pid: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; a number that no process has is left to age
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@functools.cache
def this_place() -> str:
    """Names what process numbers are unique in: this boot of this machine, and the container's own numbering."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        numbering = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, numbering = os.uname().nodename, 0
    return xxhash.xxh3_64_hexdigest(f"{boot.strip()}-{numbering}".encode())[:8]
