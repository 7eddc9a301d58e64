"""The state of a node's folder that threads share: counts, turns, mapped files; and locks of its files (flock)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forebay.errors import CacheError, ConfigError
from forebay.store.remote.node.holdings import Item, Ledger

EXCLUSIVE, SHARED = fcntl.LOCK_EX, fcntl.LOCK_SH
_LONGEST_PAUSE_S = 0.02


def try_lock(descriptor: int, how: int, path: object) -> bool:
    """Locks an open file, or returns False where somebody has it. Raises ConfigError on a file system without locks."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        raise ConfigError(
            f"{path} cannot be locked ({err.strerror}); what a node keeps of stores needs a local disk: set "
            "remote.shard_dir",
            code="FB610",
        ) from err
    return True


@functools.cache
def _require_locks(path: Path) -> None:
    """Raises ConfigError where a file that is locked can be locked again: locks that do nothing keep nobody out."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if try_lock(descriptor, EXCLUSIVE, path):
            raise ConfigError(
                f"{path}: this file system grants a lock that another process holds; what a node keeps of stores needs "
                "a local disk: set remote.shard_dir",
                code="FB610",
            )
    finally:
        os.close(descriptor)


def pauses() -> Iterator[float]:
    """Yields after pauses that grow, with the seconds since the first one began."""
    began, pause_s = time.monotonic(), 0.0005
    while True:
        time.sleep(pause_s)
        yield time.monotonic() - began
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


@contextlib.contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[int]:
    """Yields the descriptor of a file that nobody else has locked for as long as the block runs.

    The file is made where it is missing, and is never removed. Raises CacheError after `timeout_s`: whoever holds it
    does so for milliseconds, and only a stopped process holds it longer.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if not try_lock(descriptor, EXCLUSIVE, path):
            for waited_s in pauses():
                if try_lock(descriptor, EXCLUSIVE, path):
                    break
                if waited_s > timeout_s:
                    raise CacheError(
                        f"{path} is locked for {waited_s:.0f} s, longer than remote.timeout_s = {timeout_s:g}; a "
                        f"process that was stopped holds it; find it by: fuser {path}",
                        code="FB610",
                    )
        _require_locks(path)
        yield descriptor
    finally:
        os.close(descriptor)


SQUEEZE = "squeeze"
"""A file under the node's folder whose time says when somebody last needed others to close what they do not need."""
_WATCH_S = 0.05
THREAD_NAME = "forebay-pins"


@dataclass(slots=True)
class Counters:
    """Counts of this process's work with a node's folder, since it began.

    hits, misses: files that were there, or not, when they were to be read; a file that stays mapped is asked for once.
    stall_s: seconds in which a reader waited, `stalls` times. damaged: files that were not what the store gave.
    """

    hits: int = 0
    misses: int = 0
    downloads: int = 0
    bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    damaged: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **more: float) -> None:
        """Counts more."""
        with self._lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> dict[str, int | float]:
        """Returns the counts by name."""
        names = [name for name in self.__slots__ if not name.startswith("_")]
        with self._lock:
            return {name: getattr(self, name) for name in names}


class Holder(Protocol):
    """Who keeps files of a mirror mapped."""

    folder: Path

    def let_go(self, name: str | None) -> None:
        """Closes a file that is kept only in case it is read again; None: the older half of all such files."""


class Turns:
    """Turns for at most so many threads at a time; who needs its turn sooner goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._num_busy = 0

    @contextlib.contextmanager
    def turn(self, distance: int, *, most: int) -> Iterator[None]:
        """Waits for a turn, which lasts as long as the block."""
        with self._changed:
            me = (distance, next(self._numbers))
            heapq.heappush(self._waiting, me)
            try:
                self._changed.wait_for(lambda: self._num_busy < most and self._waiting[0] == me)
                self._num_busy += 1
            finally:
                self._waiting.remove(me)
                heapq.heapify(self._waiting)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()


@dataclass(slots=True)
class NodeListing:
    """The result of this process's last scan, and its time."""

    items: list[Item] = field(default_factory=list)
    made_s: float = float("-inf")
    took_s: float = 0.0

    def is_fresh(self, times: float) -> bool:
        """Whether less time went by since the scan than so many times what it took."""
        return time.monotonic() - self.made_s < times * self.took_s


class Shared:
    """One a process and node's folder; see `shared`."""

    def __init__(self, folder: Path) -> None:
        """Starts nothing yet."""
        self.folder = folder
        self.counters, self.turns, self.listing = Counters(), Turns(), NodeListing()
        self.ledgers: dict[str, Ledger] = {}
        self.limit_bytes: int | None = None
        """Below the bound where the disk was full before the bound was reached."""
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()

    def hold(self, holder: Holder) -> None:
        """Makes sure that a holder is asked when this or another process needs room, for as long as it lives."""
        if holder in self._holders:  # then the watcher lives
            return
        with self._lock:
            self._holders.add(holder)
            if self._watcher is None:
                self._watcher = threading.Thread(target=_watch, args=(self,), name=THREAD_NAME, daemon=True)
                self._watcher.start()

    def let_go(self, folder: Path, name: str) -> bool:
        """Has this process close one file that it keeps mapped, and says whether it may have had it."""
        holders = [holder for holder in self._living() if holder.folder == folder]
        for holder in holders:
            holder.let_go(name)
        return bool(holders)

    def let_go_half(self) -> None:
        """Has every holder close its older half."""
        for holder in self._living():
            holder.let_go(None)

    def _living(self) -> list[Holder]:
        with self._lock:
            return list(self._holders)

    def end_watch(self) -> bool:
        """Takes the watcher away if nobody holds anything; the next holder starts another one."""
        with self._lock:
            if not self._holders:
                self._watcher = None
        return self._watcher is None

    @property
    def squeezed_ns(self) -> int:
        """When somebody last asked for files to be closed; 0: never."""
        try:
            return os.stat(self.folder / SQUEEZE).st_mtime_ns
        except OSError:
            return 0

    def squeeze(self, *, at_most_every_s: float) -> None:
        """Asks every process of the node to close the older half of what it keeps mapped without need."""
        now = time.time_ns()
        if abs(now - self.squeezed_ns) > at_most_every_s * 1e9:
            with contextlib.suppress(OSError):
                os.close(os.open(self.folder / SQUEEZE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
                os.utime(self.folder / SQUEEZE, ns=(now, now))


def shared(folder: Path) -> Shared:
    """Returns what this process shares of a node's folder. A forked child has its own."""
    return _shared(folder.absolute(), os.getpid())


@functools.cache
def _shared(folder: Path, _process: int) -> Shared:
    return Shared(folder)


def _watch(node: Shared) -> None:
    """Answers `squeeze` in a thread: a process that reads nothing at the moment must not stop the others."""
    seen = node.squeezed_ns
    while not node.end_watch():
        time.sleep(_WATCH_S)
        found = node.squeezed_ns
        if found != seen:
            seen = found
            node.let_go_half()
