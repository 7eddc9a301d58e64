"""What a loader tells the node's cache of the steps that come, in a thread of its own: the order is a function.

The thread looks ahead along the order, tells all processes of the node when this reader needs each shard next
(`uses`), and lets `downloads` bring what is needed soonest. Nothing here changes what is read: without it a shard is
downloaded when it is asked for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from forebay.errors import ForebayError
from forebay.store.layout import Ints
from forebay.store.remote.ahead.downloads import DownloadsAhead
from forebay.store.remote.ahead.next_uses import NextUses
from forebay.store.remote.ahead.shards import RemoteShards
from forebay.store.remote.node.uses import ReaderUses
from forebay.store.source import SampleSource

logger = logging.getLogger(__name__)

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
        """Returns whether looking further ahead would tell more."""
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
