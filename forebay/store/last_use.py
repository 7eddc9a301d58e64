"""When a cache was used last, and on which hosts: small files outside of the sealed folder, for whoever cleans up.

A note of a host is `<root>/.used/<name of the cache's folder>/<host>`, of a plan `<root>/.used/plans/<name>/<host>`,
of kept texts `<root>/.used/texts/<name>/<host>`.
Its time says when the use began, to the hour. Notes decide nothing about values: what cannot be noted is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from stat import S_ISREG
import time
from dataclasses import dataclass
from pathlib import Path

from forebay.store.temporary import is_temporary, sweep, temporary_name

PLANS = "plans"
_MIRRORS = "mirrors"
NOTES = ".used"
"""Folder of a cache root that holds the notes."""
EVERY_S = 3600.0
"""A note that is younger stays as it is."""
KEPT_S = 30 * 24 * 3600.0
"""For so long a note counts for the use of its host, if a later host has noted one too."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """The last use of a folder on one host, in nanoseconds since 1970 by the clock of the disk."""

    host: str
    used_ns: int


def note(folder: Path, *, below: str = "") -> None:
    """Notes that a cache, plan or the like is used now on this host; at most once an hour anything is written.

    below: the folder of the root that it lies in, where that is not the root itself; plans are known by theirs. It
    never fails and never writes into the folder. A link to a folder is noted where the folder really lies.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, held)
        path = Path(os.readlink(f"/proc/self/fd/{held}"))
        holder, name = path.parent.name, path.name
        if not name or holder == _MIRRORS:  # what this node keeps of stores goes by its own order
            return
        below = below or (PLANS if holder == PLANS else "")
        if below and below != holder:
            return
        notes = os.open("../.." if below else "..", _FOLDER, dir_fd=held)
        stack.callback(os.close, notes)
        # One after the other: no part of the way may be a link.
        for part in (NOTES, *([below] if below else []), name):
            notes = _opened(part, notes)
            stack.callback(os.close, notes)
        host = this_host()
        try:
            age_s = time.time() - os.stat(host, dir_fd=notes, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            _forget_old(notes)
        else:
            if abs(age_s) < EVERY_S:
                return
        _write(notes, host)


def uses_of(root: int, name: str) -> list[Use]:
    """Returns the noted uses of a cache or plan, the latest first.

    root: the descriptor of the cache root; name: the path of the folder in there.
    """
    found: list[Use] = []
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        notes = root
        for part in (NOTES, *name.split("/")):
            notes = os.open(part, _FOLDER, dir_fd=notes)
            stack.callback(os.close, notes)
        with os.scandir(notes) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if S_ISREG(status.st_mode) and not is_temporary(entry.name):
                    found.append(Use(host=entry.name, used_ns=status.st_mtime_ns))
    return sorted(found, key=lambda use: -use.used_ns)


def this_host() -> str:
    """Returns the name of this machine as a file may be called."""
    return re.sub(r"[^\w.-]", "_", os.uname().nodename, flags=re.ASCII).lstrip(".")[:64] or "localhost"


def _opened(name: str, parent: int) -> int:
    """Returns the descriptor of a folder in another one, made where it is missing; a link is not followed."""
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
        return os.open(name, _FOLDER, dir_fd=parent)


def _write(notes: int, host: str) -> None:
    """Writes a note, whole or not at all; after a crash of the machine it may be gone."""
    data = json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "time": time.time()}).encode("ascii")
    aside = temporary_name(Path(host)).name
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(aside, flags, 0o666, dir_fd=notes)
    try:
        os.write(file, data)
    finally:
        os.close(file)
    os.rename(aside, host, src_dir_fd=notes, dst_dir_fd=notes)


def _forget_old(notes: int) -> None:
    """Removes notes of hosts that were not heard of for a month, and what a killed process left half written.

    A container may have another name each time.
    """
    sweep(Path(f"/proc/self/fd/{notes}"))
    with os.scandir(notes) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > KEPT_S:
                    os.unlink(entry.name, dir_fd=notes)
