"""The objects of stores in the node's folder: what was fetched, what is needed next, and the order in which they go.

No link is followed. Nothing that was not fetched into the folder of a mirror is ever removed.

Each reader has a small file under `<shard_dir>/readers/`, mapped by it and read by whoever makes room: when it needs
each shard next. Its owner holds a lock on it, so a file without a lock is of a dead reader, and counts for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import mmap
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from forebay.store.held import ORIGIN, open_own, readers_of
from forebay.store.layout import Ints

LEDGER = "fetched.jsonl"
OWN_NAMES = (LEDGER, ORIGIN)
"""Files of a mirror that came from no store."""


@dataclass(frozen=True, slots=True)
class Known:
    """A fetched file. number: its place in what readers tell, or -1. is_kept: it goes with its whole mirror only."""

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


MIRRORS = "mirrors"
_PART = re.compile(r"(?P<name>.+)\.(?P<size>\d+)\.part")
_BLOCK_BYTES = 4096
_OLD_S = 24 * 3600.0
"""A mirror without large files goes if nobody opened it for this long."""
_KEPT = Known(is_kept=True)
Kind = Literal["file", "partial", "kept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A file of a mirror.

    name: its path inside the mirror. size_bytes: what it takes, of a partial file what it will take. used_ns: when it
    was last mapped or written. number: its place in what readers tell, -1 where nobody tells. kind: `kept` files go
    only with their mirror.
    """

    mirror: str
    name: str
    size_bytes: int
    used_ns: int
    number: int = -1
    kind: Kind = "file"


def counted(size_bytes: int) -> int:
    """Returns what a file of so many bytes takes of a disk."""
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def part_name(name: str, size_bytes: int) -> str:
    """Returns the name of a file while it is downloaded. Whoever counts sees by it how large the file will be."""
    return f"{name}.{size_bytes}.part"


def scan(folder: Path, ledgers: dict[str, Ledger]) -> list[Item]:
    """Returns every file below the node's folder that came from a store, and what mirrors say of themselves.

    ledgers: those that are read already, by the name of their mirror; the others are added.
    """
    found: list[Item] = []
    for mirror, descriptor in _mirrors(folder / MIRRORS):
        ledger = ledgers.setdefault(mirror, Ledger(folder / MIRRORS / mirror))
        known = ledger.known()
        for parent in {"", *(name.rpartition("/")[0] for name in known)}:
            found += _files(mirror, descriptor, parent, known)
    return found


def order(items: Iterable[Item], told: Mapping[str, Ints | None], *, distance: int = 0) -> list[Item]:
    """Returns what may be removed, in the order in which it goes.

    First partial files, then files of which nobody tells, both by their last use, then those that are needed last:
    Belady's order, which no other order beats. told: steps until each number is needed, by mirror; None: nobody tells.
    distance: in how many steps what is to come is needed. If above 0, what is needed as soon stays.
    """
    steps_of = {mirror: [] if steps is None else steps.tolist() for mirror, steps in told.items()}
    nothing: list[int] = []
    ranked: list[tuple[int, int, int, int, Item]] = []
    for place, item in enumerate(items):  # the place, so that equal ranks never compare items
        steps = steps_of.get(item.mirror, nothing)
        if item.kind == "kept":
            continue
        if item.kind == "partial":
            ranked.append((0, 0, item.used_ns, place, item))
        elif not 0 <= item.number < len(steps):
            ranked.append((1, 0, item.used_ns, place, item))
        elif not distance or steps[item.number] > distance:
            ranked.append((2, -steps[item.number], item.used_ns, place, item))
    return [item for *_, item in sorted(ranked)]


@contextlib.contextmanager
def opened(folder: Path, item: Item) -> Iterator[tuple[int, int, str]]:
    """Yields the descriptors of the folder of an item and of itself, and its name there. Raises OSError."""
    parent, _, name = item.name.rpartition("/")
    with contextlib.ExitStack() as stack:
        root = os.open(folder / MIRRORS / item.mirror, _FOLDER)
        stack.callback(os.close, root)
        place = stack.enter_context(_below(root, parent))
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        stack.callback(os.close, file)
        yield place, file, name


def remove_unused_mirrors(folder: Path, items: Sequence[Item], ledgers: dict[str, Ledger]) -> list[Item]:
    """Removes mirrors that nobody has open or opened for a day, and that hold no large file; returns what went.

    Used under the room lock, under which a mirror is opened too.
    """
    large = {item.mirror for item in items if item.kind != "kept"}
    unused = {
        item.mirror
        for item in items
        if item.name == ORIGIN and item.mirror not in large and time.time() - item.used_ns / 1e9 > _OLD_S
    }
    removed = []
    for mirror in unused:
        root = folder / MIRRORS / mirror
        if readers_of(root) != "some":
            removed += [item for item in items if item.mirror == mirror]
            _remove_mirror(folder, root, [item for item in items if item.mirror == mirror])
            del ledgers[mirror]
    return removed


def _remove_mirror(folder: Path, root: Path, items: Sequence[Item]) -> None:
    # The origin goes last: until then a killed remover's rest is still a mirror.
    for item in sorted(items, key=lambda item: OWN_NAMES.index(item.name) if item.name in OWN_NAMES else -1):
        with contextlib.suppress(OSError), opened(folder, item) as (place, _, name):
            os.unlink(name, dir_fd=place)
    parents = {str(parent) for item in items for parent in Path(item.name).parents}
    for parent in sorted(parents, key=len, reverse=True):
        with contextlib.suppress(OSError):  # what a stranger put there stays
            os.rmdir(root / parent)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _mirrors(folder: Path) -> Iterator[tuple[str, int]]:
    """Yields every mirror and a descriptor of its folder: real folders with an origin."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    for name in names:
        try:
            descriptor = os.open(folder / name, _FOLDER)
        except OSError:
            continue
        try:
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.stat(ORIGIN, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    yield name, descriptor
        finally:
            os.close(descriptor)


def _files(mirror: str, root: int, parent: str, known: Mapping[str, Known]) -> Iterator[Item]:
    """Yields what lies directly in one folder of a mirror."""
    with contextlib.suppress(OSError), _below(root, parent) as place, os.scandir(place) as entries:
        for entry in entries:
            name = f"{parent}/{entry.name}" if parent else entry.name
            size, entry_known = 0, known.get(name, _KEPT if name in OWN_NAMES else None)
            is_part = entry_known is None and (part := _PART.fullmatch(name)) is not None
            if is_part:
                assert part is not None
                size, entry_known = int(part["size"]), known.get(part["name"])
            if entry_known is None or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield Item(
                    mirror=mirror,
                    name=name,
                    size_bytes=counted(max(size, found.st_size)),
                    used_ns=found.st_mtime_ns,
                    number=entry_known.number,
                    kind="partial" if is_part else "kept" if entry_known.is_kept else "file",
                )


@contextlib.contextmanager
def _below(root: int, parent: str) -> Iterator[int]:
    """Yields a descriptor of a folder below another one; no part of the way is a link."""
    place = os.dup(root)
    try:
        for part in parent.split("/") if parent else ():
            below = os.open(part, _FOLDER, dir_fd=place)
            os.close(place)
            place = below
        yield place
    finally:
        os.close(place)


FOLDER = "readers"
NEVER = 1 << 62
"""The step of a shard that no step which is known needs."""


class ReaderUses:
    """One reader's file. next_use: int64 [num_shards], the step that needs each shard next. now: the step it is at."""

    def __init__(self, node_folder: Path, mirror: str, *, num_shards: int) -> None:
        """mirror: name of the mirror's folder."""
        folder = node_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.path = folder / f"{mirror}.{uuid.uuid4().hex}.uses"
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # taken for that of a dead reader before it was locked
        os.ftruncate(self._descriptor, 8 * (num_shards + 1))
        self._values = np.frombuffer(mmap.mmap(self._descriptor, 0), np.int64)
        self.next_use: Ints = self._values[1:]
        self.next_use[:] = NEVER

    @property
    def now(self) -> int:
        """The step that the reader is at."""
        return int(self._values[0])

    @now.setter
    def now(self, step: int) -> None:
        self._values[0] = step

    def close(self) -> None:
        """Takes the file away: this reader needs nothing any more."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._descriptor)


def distances(node_folder: Path, mirror: str) -> Ints | None:
    """Returns in how many steps each shard of a mirror is needed by the reader that needs it first, int64 [num_shards].

    NEVER: no known step needs it. None: no reader of the mirror tells. Files of dead readers are removed.
    """
    found: Ints | None = None
    for values in _living(node_folder / FOLDER, mirror):
        if len(values) < 2 or (found is not None and len(values) != len(found) + 1):
            continue  # its reader is about to begin
        steps = np.where(values[1:] >= NEVER, NEVER, np.maximum(values[1:] - values[0], 0))
        found = steps if found is None else np.minimum(found, steps)
    return found


def _living(folder: Path, mirror: str) -> Iterator[Ints]:
    for path in folder.glob(f"{glob.escape(mirror)}.*.uses"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _is_locked(descriptor):
                    data = os.read(descriptor, os.fstat(descriptor).st_size)
                    yield np.frombuffer(data[: len(data) // 8 * 8], np.int64)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
