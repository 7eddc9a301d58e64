"""Room in the node's folder: who downloads takes it first, and what is needed last goes for it.

All of this happens under the room lock, which nobody holds while a store is asked. The sum of what is there is kept in
the lock's file, so that a download counts no files; it errs on the high side where a process is killed, and whoever
removes files counts anew.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from forebay.errors import ConfigError
from forebay.store.remote.node.holdings import (
    MIRRORS,
    Item,
    Known,
    Ledger,
    counted,
    distances,
    opened,
    order,
    part_name,
    remove_unused_mirrors,
    scan,
)
from forebay.store.remote.node.shared import EXCLUSIVE, Shared, locked, shared, try_lock

logger = logging.getLogger(__name__)
LOCK = "room.lock"
_SUM = struct.Struct("<QQ")
_SLACK = 200
"""This part of the bound goes on top where it holds whole files: ordering thousands of files takes a while."""
_SQUEEZE_S, _SQUEEZE_AHEAD_S = 0.1, 2.0
"""Mappings are closed no more often than this: each costs about 0.1 ms to be made again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoRoom:
    """Why there is none at the moment."""

    held_bytes: int
    pinned_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class RoomPlace:
    """Where a file lies: its mirror's folder, its name in there."""

    root: Path
    name: str

    @property
    def target(self) -> Path:
        """Its path."""
        return self.root / self.name

    def part(self, size_bytes: int) -> Path:
        """Where it is while it is downloaded."""
        return self.root / part_name(self.name, size_bytes)


class Room:
    """The room of a node's folder. Threads may share it."""

    def __init__(self, folder: Path, *, bound_bytes: int, timeout_s: float) -> None:
        """Touches nothing yet."""
        self.folder, self.bound_bytes, self.timeout_s = folder.absolute(), bound_bytes, timeout_s

    @property
    def shared(self) -> Shared:
        """The state that this process shares of the folder."""
        return shared(self.folder)

    @property
    def limit_bytes(self) -> int:
        """The bound, or what this process makes of it on a disk that was full before."""
        limit = self.shared.limit_bytes
        return self.bound_bytes if limit is None else min(limit, self.bound_bytes)

    @property
    def free_bytes(self) -> int:
        """The limit less what is there, as it was last counted; 0 where nobody has counted yet. Costs microseconds."""
        try:
            descriptor = os.open(self.folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            held = Sum(descriptor).value
        finally:
            os.close(descriptor)
        return 0 if held is None else max(self.limit_bytes - held, 0)

    def place(self, target: Path) -> RoomPlace:
        """Returns the place of a file of a mirror. Raises ValueError for any other path."""
        mirror, *names = target.absolute().relative_to(self.folder / MIRRORS).parts
        return RoomPlace(self.folder / MIRRORS / mirror, "/".join(names))

    @contextlib.contextmanager
    def locked(self) -> Iterator[Sum]:
        """Yields the sum of what is there; nobody else takes or makes room while the block runs."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = stack.enter_context(locked(self.folder / LOCK, timeout_s=self.timeout_s))
            except (PermissionError, FileExistsError, NotADirectoryError) as err:
                raise ConfigError(
                    f"{self.folder} cannot be used for what this node keeps of stores ({err.strerror}); set "
                    "remote.shard_dir to a folder of a local disk that you may write to",
                    code="FB610",
                ) from err
            yield Sum(descriptor)

    def claim(self, place: RoomPlace, *, size_bytes: int, known: Known, distance: int) -> io.FileIO | NoRoom | None:
        """Returns the partial file of a place, locked: nobody else downloads it, and there is room for all of it.

        None: somebody else has it, or is done with it. What an owner that died has written is in the file.
        """
        part = place.part(size_bytes)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self.locked() as held:
            if is_whole(place.target, size_bytes):
                return None
            try:
                descriptor = os.open(part, flags)
            except FileNotFoundError:
                ledger = self.shared.ledgers.setdefault(place.root.name, Ledger(place.root))
                growth = ledger.growth(place.name, known)
                needed = counted(size_bytes) + counted(ledger.size_bytes + growth) - counted(ledger.size_bytes)
                if (no_room := self._make_room(held, needed, distance)) is not None:
                    return no_room
                # Known, then counted, then made: a process that is killed in between leaves nothing that is not known.
                part.parent.mkdir(parents=True, exist_ok=True)
                ledger.add(place.name, known)
                held.add(needed)
                descriptor = os.open(part, flags | os.O_CREAT | os.O_EXCL, 0o666)
            file = io.FileIO(descriptor, "r+")
            if try_lock(descriptor, EXCLUSIVE, part) and _is_at(part, descriptor):
                return file
            file.close()
            return None

    def finish(self, place: RoomPlace, *, size_bytes: int, known: Known) -> None:
        """Gives a partial file, which the caller has locked and found right, its name."""
        with self.locked():  # whoever counts at the moment could see neither the one name nor the other
            os.rename(place.part(size_bytes), place.target)
        item = Item(
            mirror=place.root.name,
            name=place.name,
            size_bytes=counted(size_bytes),
            used_ns=time.time_ns(),
            number=known.number,
            kind="kept" if known.is_kept else "file",
        )
        self.shared.listing.items.append(item)  # it may be the one that is needed last

    def give_back(self, part: Path, size_bytes: int) -> None:
        """Removes a partial file, which the caller has locked, and gives its room back."""
        with self.locked() as held:
            part.unlink(missing_ok=True)
            held.add(-counted(size_bytes))

    def take(self, held: Sum, size_bytes: int) -> None:
        """Counts a small file that is written anyway; something goes for it where that is possible."""
        self._make_room(held, counted(size_bytes), 0)
        held.add(counted(size_bytes))

    def shrink(self, place: RoomPlace, size_bytes: int) -> bool:
        """Frees half of what is there, for a file that found the disk full below the bound; whether anything went."""
        part = place.part(size_bytes).relative_to(self.folder / MIRRORS).parts
        with self.locked() as held:
            items = [item for item in self._scan(held) if (item.mirror, *item.name.split("/")) != part]
            before = held.value or 0
            half = max(before // 2, counted(size_bytes))
            chosen, _ = self._victims(items, max(before - half, 1), distance=0)
            self._remove(chosen, held)
        if not chosen:
            return False
        if self.shared.limit_bytes is None or half < self.shared.limit_bytes:
            logger.warning(
                "%s: the disk is full at %s, below the bound of %s (remote.cache_size_gb); this process keeps to %s",
                *(self.folder, gb(before), gb(self.bound_bytes), gb(half)),
            )
            self.shared.limit_bytes = half
        return True

    def _make_room(self, held: Sum, needed_bytes: int, distance: int) -> NoRoom | None:
        """Makes room for so many bytes; returns why there is none. Nothing goes where that would not be enough."""
        is_counted = held.value is not None and self.shared.listing.made_s > 0
        if is_counted and (held.value or 0) + needed_bytes <= self.limit_bytes:
            return None
        pinned_bytes = 0
        for is_scanned in self._attempts(distance, is_counted=is_counted):
            if is_scanned:
                self._remove_unused(held, self._scan(held))
            over = (held.value or 0) + needed_bytes - self.limit_bytes
            chosen, pinned_bytes = self._victims(self.shared.listing.items, over, distance=distance)
            freed = sum(item.size_bytes for item in chosen)
            # On a disk that was full, what is left may be more than this process keeps to; the disk says whether it is.
            limit = self.limit_bytes if freed >= over or pinned_bytes else self.bound_bytes
            if (held.value or 0) - freed + needed_bytes <= limit:
                self._remove(chosen, held)
                if (held.value or 0) + needed_bytes <= limit:  # a reader may have been faster
                    return None
        if pinned_bytes:
            self.shared.squeeze(at_most_every_s=_SQUEEZE_AHEAD_S if distance else _SQUEEZE_S)
        return NoRoom(held_bytes=held.value or 0, pinned_bytes=pinned_bytes, limit_bytes=self.limit_bytes)

    def _attempts(self, distance: int, *, is_counted: bool) -> tuple[bool, ...]:
        """Returns for each attempt whether it counts all files anew: that may take 100 ms, and all wait for it."""
        listing = self.shared.listing
        if not (is_counted and listing.is_fresh(20)):
            return (True,)
        return (False,) if distance or listing.is_fresh(2) else (False, True)

    def _scan(self, held: Sum) -> list[Item]:
        began = time.monotonic()
        listing = self.shared.listing
        listing.items = scan(self.folder, self.shared.ledgers)
        listing.made_s = time.monotonic()
        listing.took_s = listing.made_s - began
        held.value = sum(item.size_bytes for item in listing.items)
        return listing.items

    def _remove_unused(self, held: Sum, items: Sequence[Item]) -> None:
        removed = remove_unused_mirrors(self.folder, items, self.shared.ledgers)
        if removed:
            held.add(-sum(item.size_bytes for item in removed))
            self.shared.listing.items = [item for item in items if item not in removed]

    def _victims(self, items: Sequence[Item], over: int, *, distance: int) -> tuple[list[Item], int]:
        """Returns what goes so that there are `over` bytes less, and how many bytes of what would go are pinned."""
        told = {mirror: distances(self.folder, mirror) for mirror in {item.mirror for item in items}}
        chosen: list[Item] = []
        freed = pinned = 0
        for item in order(items, told, distance=distance):
            if freed >= over and freed + item.size_bytes > over + self.bound_bytes // _SLACK:
                break
            is_free = self._is_free(item)
            if is_free:
                chosen.append(item)
                freed += item.size_bytes
            elif is_free is False:
                pinned += item.size_bytes
        return chosen, pinned

    def _is_free(self, item: Item) -> bool | None:
        """Whether nobody reads or downloads a file, once this process lets go of it; None: another one removed it."""
        with contextlib.suppress(FileNotFoundError), opened(self.folder, item) as (_, file, _):
            if try_lock(file, EXCLUSIVE, item.name):
                return True
            is_ours = self.shared.let_go(self.folder / MIRRORS / item.mirror, item.name)
            return is_ours and try_lock(file, EXCLUSIVE, item.name)
        return None

    def _remove(self, items: Sequence[Item], held: Sum) -> None:
        for item in items:
            if self._remove_one(item):
                held.add(-item.size_bytes)
                if item.kind == "file":
                    self.shared.counters.add(evictions=1, evicted_bytes=item.size_bytes)
        gone = {id(item) for item in items}
        self.shared.listing.items = [item for item in self.shared.listing.items if id(item) not in gone]

    def _remove_one(self, item: Item) -> bool:
        with contextlib.suppress(FileNotFoundError), opened(self.folder, item) as (place, file, name):
            if try_lock(file, EXCLUSIVE, item.name) and os.path.samestat(
                os.fstat(file), os.stat(name, dir_fd=place, follow_symlinks=False)
            ):
                os.unlink(name, dir_fd=place)
                return True
        return False


class Sum:
    """The bytes of all that is in the folder, as kept in the lock's file; used under the lock alone."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the lock's file."""
        self._descriptor = descriptor

    @property
    def value(self) -> int | None:
        """The sum; None where the file does not say one."""
        data = os.pread(self._descriptor, _SUM.size + 1, 0)
        if len(data) != _SUM.size:
            return None
        value, check = _SUM.unpack(data)
        return int(value) if check == _check(value) else None

    @value.setter
    def value(self, value: int | None) -> None:
        value = max(value or 0, 0)
        os.pwrite(self._descriptor, _SUM.pack(value, _check(value)), 0)
        os.ftruncate(self._descriptor, _SUM.size)

    def add(self, more: int) -> None:
        """Counts more, or less. Where no sum is known, none is: the next scan says it."""
        value = self.value
        if value is not None:
            self.value = value + more


def is_whole(path: Path, size_bytes: int) -> bool:
    """Whether a regular file of that size is there: files get their name when they are whole."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes


def gb(num_bytes: int) -> str:
    """Returns bytes as they are shown: in GB of 10^9, small ones in MB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.3f} MB"


def _check(value: int) -> int:
    return xxhash.xxh3_64_intdigest(value.to_bytes(8, "little"))


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
