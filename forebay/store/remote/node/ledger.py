"""What was ever fetched into the folder of a mirror, by name. Nothing else in that folder is ever removed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay.store.held import ORIGIN, open_own

LEDGER = "fetched.jsonl"
OWN_NAMES = (LEDGER, ORIGIN)
"""Files of a mirror that came from no store."""


@dataclass(frozen=True, slots=True)
class Known:
    """A file that was fetched.

    number: its place in what readers tell; -1: nobody tells of it. is_kept: it goes only with its whole mirror.
    """

    number: int = -1
    is_kept: bool = False


class Ledger:
    """The names that were fetched into one folder: a line each, written before the file is. Used under the room lock.

    A line that a dying machine left torn, or that leads out of the folder, counts for nothing.
    """

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet."""
        self.path = folder / LEDGER
        self._known: dict[str, Known] = {}
        self._inode, self._num_read = 0, 0

    @property
    def size_bytes(self) -> int:
        """How large the file was when it was read last."""
        return self._num_read

    def known(self) -> Mapping[str, Known]:
        """Returns what was fetched, by name; reads only what came since the last call."""
        try:
            descriptor = open_own(str(self.path), os.O_RDONLY)
        except FileNotFoundError:
            self._known, self._inode, self._num_read = {}, 0, 0
            return self._known
        with open(descriptor, "rb", buffering=0) as file:
            stat = os.fstat(descriptor)
            if stat.st_ino != self._inode or stat.st_size < self._num_read:
                self._known, self._inode, self._num_read = {}, stat.st_ino, 0
            file.seek(self._num_read)
            whole, newline, _ = file.readall().rpartition(b"\n")
        self._num_read += len(whole) + len(newline)
        self._known.update(entry for line in whole.splitlines() if (entry := _entry(line)) is not None)
        return self._known

    def growth(self, name: str, known: Known) -> int:
        """Returns by how many bytes `add` would make the ledger larger, at most."""
        return 0 if self.known().get(name) == known else len(_line(name, known)) + 1

    def add(self, name: str, known: Known) -> None:
        """Makes sure that a file is known, durably: it is there after a crash if the file itself is."""
        if not self.growth(name, known):
            return
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with open(open_own(str(self.path), flags), "rb+", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(b"\n" * torn + _line(name, known))
            os.fdatasync(file.fileno())


def is_inside(name: str) -> bool:
    """Whether a name leads to a place below the folder that it is meant for."""
    return bool(name) and all(part not in ("", ".", "..") and "\0" not in part for part in name.split("/"))


def _line(name: str, known: Known) -> bytes:
    return json.dumps([name, known.number, known.is_kept]).encode() + b"\n"


def _entry(line: bytes) -> tuple[str, Known] | None:
    try:
        name, number, is_kept = json.loads(line)
    except (ValueError, TypeError):
        return None
    if not (isinstance(name, str) and isinstance(number, int) and isinstance(is_kept, bool)):
        return None
    return (name, Known(number, is_kept)) if is_inside(name) and name not in OWN_NAMES else None
