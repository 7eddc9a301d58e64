"""The steps that come, told to the node's cache by a thread of the loader: the order is a function.

The thread looks ahead along the order, tells all processes of the node when this reader needs each shard next, and has
one process of the node download what is needed soonest. Nothing here changes what is read: without it a shard is
downloaded when it is asked for.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from forebay.errors import ForebayError, RemoteError
from forebay.store.layout import Ints
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.holdings import FOLDER, NEVER, ReaderUses, distances
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.shared_disk import must_lock, unlock
from forebay.store.source import SampleSource

logger = logging.getLogger(__name__)
_LOOK_AGAIN_S = 1.0
"""After this time it is looked again whether shards that were here still are."""
_TRY_AGAIN_S = 5.0
"""After a failure, or where there was no room."""
_NO_ROOM_S = 0.1


class DownloadsAhead:
    """Brings the shards that the readers of a node need soonest, as far as this process is their downloader.

    The downloader of a mirror is who holds the lock of its file under `readers/`. When that process is gone, another
    one takes the lock. What a reader needs at once it asks for itself: both are one download.
    """

    def __init__(self, shards: RemoteShards, *, depth: int, wake: Callable[[], object]) -> None:
        """depth: shards here before a step needs them; at least `remote.prefetch_shards`. wake: at a download's end."""
        self._shards, self._wake = shards, wake
        settings = shards.mirrors[0].settings
        self._max_concurrent, self._depth = settings.max_concurrent, max(depth, settings.prefetch_shards)
        # A request that fails is not tried again at once: whoever needs the shard asks for it with all patience.
        self._mirrors = [_mirror(mirror) for mirror in shards.mirrors]
        self._posts = [_Post(m.node.folder / FOLDER / f"{m.folder.name}.downloader") for m in shards.mirrors]
        self._flying: set[int] = set()
        self._due: dict[int, int] = {}  # step that needs what was downloaded ahead
        self._is_here = np.zeros(len(shards), bool)
        self._again: dict[int, float] = {}  # when a shard that failed is tried again
        self._look_again = self._room_again = 0.0
        self._fits = shards.fit

    def close(self) -> None:
        """Lets another process take over. Downloads that have begun go on to their end."""
        for post in self._posts:
            post.close()

    def go_on(self, *, now: int) -> bool:
        """Begins the downloads that are due. Returns whether anything is under way. now: the step of this reader."""
        clock = time.monotonic()
        if clock > self._look_again:
            self._is_here[:] = False
            self._look_again = clock + _LOOK_AGAIN_S
        self._due = {shard: step for shard, step in list(self._due.items()) if step >= now}
        if clock < self._room_again:
            return True
        steps = self._distances()
        for shard in self._missing(steps):
            # Before the first batch the link is that batch's alone: what comes later would only share it.
            is_for_first = now == 0 and any(steps[other] == 0 for other in self._flying)
            if len(self._flying) >= self._most() or (is_for_first and steps[shard] > 0):
                break
            self._begin(shard, distance=max(1, int(steps[shard])), now=now)
        return bool(self._flying)

    def _most(self) -> int:
        if self._fits or min(mirror.node.room.free_bytes for mirror in self._shards.mirrors) > self._shards.sizes.max():
            return self._max_concurrent
        waiting = len(self._due.keys() - self._flying)
        return min(self._max_concurrent, self._depth - waiting)

    def _distances(self) -> Ints:
        """Returns in how many steps each shard is needed, int64 [num_shards]; NEVER where others download."""
        found = np.full(len(self._shards), NEVER, np.int64)
        for post, mirror, first in zip(self._posts, self._shards.mirrors, self._shards.firsts, strict=False):
            if post.is_held():
                steps = distances(mirror.node.folder, mirror.folder.name)
                if steps is not None:
                    found[first : first + len(steps)] = steps
        return found

    def _missing(self, steps: Ints) -> Iterator[int]:
        """Yields the shards that are not here, those that are needed first first."""
        needed = np.flatnonzero((steps < NEVER) & ~self._is_here)
        clock = time.monotonic()
        for shard in needed[np.argsort(steps[needed], kind="stable")].tolist():
            if shard in self._flying or self._again.get(shard, 0.0) > clock:
                continue
            if self._shards.is_here(shard):
                self._is_here[shard] = True
            else:
                yield shard

    def _begin(self, shard: int, *, distance: int, now: int) -> None:
        self._flying.add(shard)
        self._due[shard] = now + distance
        thread = threading.Thread(
            target=self._download, args=(shard, distance), name=f"forebay-download-{shard}", daemon=True
        )
        _under_way.add(thread)
        thread.start()

    def _download(self, shard: int, distance: int) -> None:
        mirror = self._mirrors[self._shards.place(shard)[0]]
        try:
            for wanted in self._shards.files(shard):
                if not mirror.fetch_ahead(wanted, distance=distance):
                    self._due.pop(shard, None)
                    self._room_again = time.monotonic() + _NO_ROOM_S
                    return
        except (ForebayError, OSError) as err:  # whoever needs the shard meets it again
            logger.info("not downloaded ahead: %s", err)
            self._again[shard] = time.monotonic() + _TRY_AGAIN_S
        finally:
            self._flying.discard(shard)
            _under_way.discard(threading.current_thread())
            self._wake()


class _Post:
    """The lock that makes a process the downloader of a mirror."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._is_held = False

    def is_held(self) -> bool:
        self._is_held = self._is_held or must_lock(self._descriptor)
        return self._is_held

    def close(self) -> None:
        """Gives it up, whatever children have inherited."""
        if self._is_held:
            unlock(self._descriptor)
        os.close(self._descriptor)


class _Ending(Bucket):
    """A bucket whose streams end with the process."""

    def stream(self, name: str, *, start: int = 0, stop: int | None = None, etag: str = "") -> Iterator[bytes]:
        """See `Bucket.stream`. Raises RemoteError once the interpreter goes away."""
        for piece in super().stream(name, start=start, stop=stop, etag=etag):
            if _is_over.is_set():
                raise RemoteError(f"{self.url / name}: this process ends; what is there already is gone on with")
            yield piece


def _mirror(mirror: Mirror) -> Mirror:
    once = dataclasses.replace(mirror.settings, retries=0)
    found = Mirror(mirror.folder, mirror.url, once)
    found.bucket = _Ending(mirror.url, once)
    return found


_is_over = threading.Event()
_under_way: set[threading.Thread] = set()


@atexit.register
def _finish() -> None:
    # A thread that is inside of obstore while the interpreter goes away would abort the process.
    _is_over.set()
    for thread in list(_under_way):
        thread.join()


class NextUses:
    """The next use of every shard, kept true while steps go by. Costs about 0.2 us a use, and 16 bytes.

    next_use: int64 [num_shards], the first step from `now` on that needs each shard; NEVER: none that was looked at.
    now: the steps that are done. looked_at: the steps that were looked at, from step 0 on.

    Every use knows the next use of its shard, so a step that is done hands on to them: nothing is searched again.
    """

    def __init__(self, num_shards: int) -> None:
        self.next_use: Ints = np.full(num_shards, NEVER, np.int64)
        self.now = self.looked_at = 0
        # Uses are numbered through, and stand in rings at number % size.
        self._shards, self._following = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
        self._start = self._stop = 0
        self._last: Ints = np.full(num_shards, -1, np.int64)  # the last use of each shard
        self._ends: deque[tuple[int, int]] = deque()  # of every step that is not done: itself, the end of its uses

    def __len__(self) -> int:
        """Uses that are looked at and not done."""
        return self._stop - self._start

    @property
    def num_known(self) -> int:
        """Shards whose next use is known."""
        return int(np.count_nonzero(self.next_use < NEVER))

    def extend(self, needed: Sequence[Ints]) -> None:
        """Looks at the steps that follow. needed: the shards of each, each shard once."""
        first = self.looked_at
        self.looked_at += len(needed)
        sizes = [len(shards) if first + i >= self.now else 0 for i, shards in enumerate(needed)]
        ends = (np.cumsum(sizes) + self._stop).tolist()
        for step, end in enumerate(ends, first):
            if step >= self.now:
                self._ends.append((step, end))
        shards = np.concatenate([np.zeros(0, np.int64), *(s for s, size in zip(needed, sizes, strict=True) if size)])
        if len(shards):
            self._append(shards, np.repeat(np.arange(first, self.looked_at), sizes))

    def _append(self, shards: Ints, steps: Ints) -> None:
        numbers = np.arange(self._stop, self._stop + len(shards))
        self._make_room(len(shards))
        places = numbers % len(self._shards)
        self._shards[places], self._following[places] = shards, NEVER
        order = np.argsort(shards, kind="stable")
        is_first = np.ones(len(shards), bool)
        is_first[1:] = shards[order][1:] != shards[order][:-1]
        self._following[places[order[:-1]][~is_first[1:]]] = steps[order[1:]][~is_first[1:]]
        heads, tails = order[is_first], order[np.append(is_first[1:], True)]
        before = self._last[shards[heads]]
        is_open = before >= self._start
        self._following[before[is_open] % len(self._shards)] = steps[heads[is_open]]
        self.next_use[shards[heads[~is_open]]] = steps[heads[~is_open]]
        self._last[shards[tails]] = numbers[tails]
        self._stop += len(shards)

    def advance(self, now: int) -> None:
        """Makes all steps before `now` done."""
        self.now, end = max(now, self.now), self._start
        while self._ends and self._ends[0][0] < self.now:
            end = self._ends.popleft()[1]
        places = np.arange(self._start, end) % len(self._shards)
        # Of a shard that comes several times numpy keeps what is assigned last: the later use.
        self.next_use[self._shards[places]] = self._following[places]
        self._start = end

    def _make_room(self, count: int) -> None:
        size = len(self._shards)
        if len(self) + count <= size:
            return
        while size < len(self) + count:
            size *= 2
        numbers = np.arange(self._start, self._stop)
        for name in ("_shards", "_following"):
            old, new = getattr(self, name), np.zeros(size, np.int64)
            new[numbers % size] = old[numbers % len(old)]
            setattr(self, name, new)


THREAD_NAME = "forebay-foresight"
MAX_USES = 2_000_000
"""Uses that are looked at ahead, at most: 32 MB. A use is a step and a shard that it needs."""
_STEPS_AT_ONCE = 64
_LOOKING_S = 0.01
_BUSY_S, _IDLE_S = 0.02, 0.1
"""Pauses of the thread: with something under way, and without."""
_JOIN_S = 5.0
Steps = Callable[[], Iterator[Ints]]


class Foresight:
    """Tells the node's cache of a reader's steps from now on, until it is closed or collected.

    A forked child has none of its parent's threads: it starts its own when its first step is done.
    """

    def __init__(self, shards: RemoteShards, steps: Steps, *, depth: int = 0) -> None:
        """Starts the thread. steps: gives the samples of every step, from step 0 on. depth: see `DownloadsAhead`."""
        self._shards, self._steps, self._depth = shards, steps, depth
        self._start(now=0)

    @classmethod
    def of(cls, source: SampleSource, steps: Steps, *, depth: int = 0) -> Foresight | None:
        """Returns the foresight of a source's steps; None where no part of it is remote."""
        shards = RemoteShards(source)
        return cls(shards, steps, depth=depth) if len(shards) else None

    def done(self, step: int) -> None:
        """Says that step 0, 1, ... is through with its samples. Steps may end out of their order; costs 0.2 us."""
        if self._pid != os.getpid():
            self._finalizer.detach()
            self._start(now=step)
        self._watch.done.append(step)

    def close(self) -> None:
        """Ends the thread, and waits for it. This reader needs nothing any more. Calling it again does nothing."""
        self._finalizer()

    def _start(self, *, now: int) -> None:
        self._pid = os.getpid()
        self._watch = _Watch(self._shards, self._steps(), depth=self._depth, now=now)
        self._finalizer = weakref.finalize(self, self._watch.stop)


class _Watch:
    """The thread and what it knows."""

    def __init__(self, shards: RemoteShards, steps: Iterator[Ints], *, depth: int, now: int) -> None:
        self.done: deque[int] = deque()
        """Steps that ended; the loader appends."""
        self._pid = os.getpid()
        self._shards = shards
        self._needed = shards.ahead(steps)
        self._is_through = False
        self._uses = NextUses(len(shards))
        self._uses.advance(now)
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self._wake, self._is_stopped = threading.Event(), False
        self._readers = [
            ReaderUses(mirror.node.folder, mirror.folder.name, num_shards=cache.num_units)
            for cache, mirror in zip(shards.caches, shards.mirrors, strict=True)
        ]
        self._downloads = DownloadsAhead(shards, depth=depth, wake=self._wake.set)
        for mirror in shards.mirrors:
            mirror.before_demand.append(self.tell)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it, unless it is the caller or of another process."""
        if self._pid != os.getpid():
            return
        self._is_stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def tell(self) -> None:
        """Makes what the node knows of this reader what is true now."""
        if self._pid != os.getpid():
            return  # the thread that holds the lock is perhaps not here
        with self._lock:
            if not self._is_stopped:
                self._advance()
                self._publish()

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._look()
                self.tell()
                is_busy = self._downloads.go_on(now=self._uses.now) or self._looks_on()
                self._wake.wait(_BUSY_S if is_busy else _IDLE_S)
                self._wake.clear()
        except (ForebayError, OSError) as err:  # the loader goes on, and meets it itself where it matters
            logger.warning("nothing is downloaded ahead any more: %s", err)
        finally:
            self._end()

    def _end(self) -> None:
        for mirror in self._shards.mirrors:
            mirror.before_demand.remove(self.tell)
        self._downloads.close()
        with self._lock:
            self._is_stopped = True
            for reader in self._readers:
                reader.close()

    def _looks_on(self) -> bool:
        uses = self._uses
        return not self._is_through and len(uses) < MAX_USES and uses.num_known < self._shards.num_used

    def _look(self) -> None:
        """Looks at steps ahead for a while, not longer: the loader's threads want the interpreter too."""
        until = time.monotonic() + _LOOKING_S
        while self._looks_on() and time.monotonic() < until and not self._is_stopped:
            needed = list(islice(self._needed, _STEPS_AT_ONCE))
            with self._lock:
                self._uses.extend(needed)
            self._is_through = len(needed) < _STEPS_AT_ONCE

    def _advance(self) -> None:
        now = self._uses.now
        while self.done:
            self._ended.add(self.done.popleft())
        while now in self._ended:
            self._ended.remove(now)
            now += 1
        self._uses.advance(now)

    def _publish(self) -> None:
        for reader, first, end in zip(self._readers, self._shards.firsts, self._shards.firsts[1:], strict=False):
            reader.next_use[:] = self._uses.next_use[first:end]
            reader.now = self._uses.now
