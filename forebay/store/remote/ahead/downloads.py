"""Downloads ahead of need, by one process of a node for all readers of a mirror."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from forebay.errors import ForebayError, RemoteError
from forebay.store.layout import Ints
from forebay.store.remote.ahead.shards import RemoteShards
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.holdings import FOLDER, NEVER, distances
from forebay.store.shared_disk import must_lock, unlock

logger = logging.getLogger(__name__)

THREAD_NAME = "forebay-download"

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
        """depth: shards that may be here before a step needs them, where not all fit; `remote.prefetch_shards` is less.

        wake: called by a download's thread at its end.
        """
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
        """Returns how many downloads may be under way."""
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
            target=self._download, args=(shard, distance), name=f"{THREAD_NAME}-{shard}", daemon=True
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
        """Returns whether this process has it, by now."""
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
