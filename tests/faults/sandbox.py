"""Actions forbidden to a process that reads foreign input: run programs or code, unpickle, write, read outside."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.faults.children import limit

_FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_INSTALLED = tuple(os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, Path(__file__).parents[2]))
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/usr/", "/etc/")
_MEMORY_BYTES = 1 << 30


def confine(folder: Path, outside: Path) -> list[str]:
    """Returns a list that grows by what this process does against the rules, from now on to its end.

    folder: where it may read and write. outside: a folder whose name must come up in no file that is opened. Its memory
    is bounded to 1 GiB more than it has.
    """
    seen: list[str] = []
    allowed = os.path.realpath(folder)
    opened, local = os.open, threading.local()

    def open_at(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Opens as `os.open`, and lets the hook know from where: it is told no `dir_fd`."""
        local.base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        try:
            return opened(path, flags, mode, dir_fd=dir_fd)
        finally:
            local.base = ""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FORBIDDEN:
            seen.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.path.join(getattr(local, "base", ""), os.fsdecode(arguments[0])))
            if not path.startswith(allowed) and not _is_harmless(path, outside, arguments[2]):
                seen.append(f"open {path}")

    os.open = open_at
    sys.addaudithook(hook)
    pa.array([0])  # its pool takes addresses for a gigabyte at the first use, of which it needs a page
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES)
    return seen


def _is_harmless(path: str, outside: Path, flags: Any) -> bool:
    if path.startswith(os.path.realpath(outside)):
        return False
    is_written = isinstance(flags, int) and flags & _WRITES
    return not is_written and path.startswith((*_INSTALLED, *_SYSTEM))
