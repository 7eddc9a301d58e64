"""Raw data of a store on its way to this node: downloaded ahead of the tasks that read it, each object once.

Files that another node has listed lie in mirrors below its own `remote.shard_dir`. The path of a mirror stands for its
URL, and from the URL follows the folder on any node.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from forebay.config.data import SourceConfig
from forebay.config.remote import GB, RemoteConfig, Url
from forebay.errors import ForebayError
from forebay.store.memo import SIZE
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.room import gb
from forebay.store.remote.raw.origin import Place, forget
from forebay.store.remote.raw.raw_sources import place_of
from forebay.store.source_files import SourceFile
from forebay.task_map import Map
from forebay.terminal import Progress

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_AHEAD_SHARE = 4
"""What is downloaded ahead takes no more than the bound of the node's cache divided by this."""
Needs = Callable[[T], Iterable[str | Path]]
"""(task) -> the paths whose content it reads."""


def run_on_sources(
    map_: Map, function: Callable[[T], R], tasks: Sequence[T], needs: Needs[T], *, is_remote: bool, total: int
) -> list[R]:
    """Returns `function(task)` of every task, in their order; what they read of a store is downloaded ahead of them.

    is_remote: whether any of it may be of a store. total: files that all tasks read together, for the progress.
    """
    if not is_remote:
        return list(map_(function, tasks))
    return list(map_(Fresh(function), cast(Sequence[T], Arriving(tasks, needs, total=total))))


@dataclass(frozen=True)
class Fresh(Generic[T, R]):
    """Calls a function in a worker that has forgotten what stores said before this was made."""

    function: Callable[[T], R]
    made_by: int = field(default_factory=os.getpid)
    made_at: int = field(default_factory=time.monotonic_ns)

    def __call__(self, task: T) -> R:
        """Returns `function(task)`."""
        if os.getpid() != self.made_by:
            _forget_once(self.made_at)
        return self.function(task)


@functools.lru_cache(maxsize=1)
def _forget_once(made_at: int) -> None:  # noqa: ARG001  once for each
    forget()


class Arriving(Generic[T]):
    """Tasks that are handed out, in their order, when what they read is here; some of it is downloaded ahead.

    What cannot be downloaded is left to the task, which says so of its samples.
    """

    def __init__(self, tasks: Iterable[T], needs: Needs[T], *, total: int) -> None:
        self._tasks, self._needs, self._total = tasks, needs, total
        self._count, self._bytes = 0, 0
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def __len__(self) -> int:
        """The number of tasks, if these are a sequence."""
        return len(cast(Sequence[T], self._tasks))

    def __iter__(self) -> Iterator[T]:
        started_s = time.monotonic()
        waiting: deque[tuple[T, list[_Download]]] = deque()
        jobs: queue.SimpleQueue[_Download | None] = queue.SimpleQueue()
        threads: list[threading.Thread] = []
        try:
            for task in self._tasks:
                downloads = [_Download(place) for path in self._needs(task) if (place := _missing(path)) is not None]
                if downloads and not threads:
                    threads = self._started(jobs, downloads[0].place.origin.mirror.settings.max_concurrent)
                for download in downloads:
                    jobs.put(download)
                waiting.append((task, downloads))
                while waiting and not self._may_wait(waiting):
                    yield self._arrived(waiting)
            while waiting:
                yield self._arrived(waiting)
        finally:
            for _ in threads:
                jobs.put(None)
            if self._bar is not None:
                self._bar.close()
            if self._count:
                seconds = time.monotonic() - started_s
                logger.info("sources: %d objects, %.3g GB downloaded in %.1f s", self._count, self._bytes / GB, seconds)

    def _started(self, jobs: queue.SimpleQueue[_Download | None], count: int) -> list[threading.Thread]:
        """Daemons: an interrupted run does not wait for what is on its way; what has come is taken up later."""
        threads = [threading.Thread(target=self._work, args=(jobs,), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def _work(self, jobs: queue.SimpleQueue[_Download | None]) -> None:
        while (download := jobs.get()) is not None:
            try:
                version, _ = download.place.fetch()
                self._tell(version[SIZE])
            except (OSError, ForebayError) as err:
                logger.debug("%s is left to its task: %s", download.place.url, err)
            finally:
                download.is_done.set()

    def _tell(self, size_bytes: int) -> None:
        with self._lock:
            self._count, self._bytes = self._count + 1, self._bytes + size_bytes
            if self._bar is None:
                self._bar = Progress(self._total, desc="sources", unit="file")
            self._bar.say(f"{self._bytes / GB:.1f} GB")
            self._bar.update()

    def _may_wait(self, waiting: Sequence[tuple[T, list[_Download]]]) -> bool:
        """Whether more may be ahead: as many tasks as there are threads, or the bytes that fit."""
        places = [download.place for _, downloads in waiting for download in downloads]
        if not places or not waiting[0][1]:
            return False
        settings = places[0].origin.mirror.settings
        size_bytes = sum(version[SIZE] for place in places if (version := place.version()) is not None)
        return len(places) < 2 * settings.max_concurrent and size_bytes * _AHEAD_SHARE < settings.cache_size_bytes

    def _arrived(self, waiting: deque[tuple[T, list[_Download]]]) -> T:
        task, downloads = waiting.popleft()
        for download in downloads:
            download.is_done.wait()
        return task


@dataclass(slots=True)
class _Download:
    place: Place
    is_done: threading.Event = field(default_factory=threading.Event)


def _missing(path: str | Path) -> Place | None:
    """Returns the object of a path if this node has no copy of it."""
    place = place_of(path)
    if place is None:
        return None
    try:
        version = place.version()
    except ForebayError:
        return None
    return None if version is None or place.origin.is_here(version) else place


def is_remote(source: SourceConfig) -> bool:
    """Whether any manifest of a source is of a store; only then may what it names be."""
    return any(place_of(entry) is not None for entry in source.manifests)


def tell_if_too_large(files: Sequence[SourceFile]) -> None:
    """Logs a warning where the raw data of a store is more than the node keeps, so that it is downloaded again."""
    sizes: dict[Any, int] = {}
    for file in files:
        if file.stat is not None and (place := place_of(file.path)) is not None:
            settings = place.origin.mirror.settings
            sizes[settings] = sizes.get(settings, 0) + file.stat[SIZE]
    for settings, size_bytes in sizes.items():
        if size_bytes > settings.cache_size_bytes:
            logger.warning(
                "the sources have %s, and this node keeps %s of them (remote.cache_size_gb): what does not fit is "
                "downloaded a second time when it is read; to avoid that, raise remote.cache_size_gb",
                gb(size_bytes),
                gb(settings.cache_size_bytes),
            )


Mirrors = tuple[tuple[str, Url], ...]
"""Folders of one node, each with the URL that it stands for."""


def mirrors_in(paths: Iterable[str]) -> Mirrors:
    """Returns the mirrors of this node that files lie in, as another node must know them."""
    places = map(place_of, paths)
    return tuple(sorted({(str(p.origin.folder), p.origin.url) for p in places if p is not None}, key=str))


def rebased(files: Sequence[SourceFile], mirrors: Mirrors, settings: RemoteConfig) -> Sequence[SourceFile]:
    """Returns files, whose paths another node has listed, with the paths that they have here.

    mirrors: folders of that node, with the URL that each stands for. A path outside of them is the same on all nodes.
    """
    return tuple(_rebased(file, mirrors, settings) for file in files) if mirrors else files


def _rebased(file: SourceFile, mirrors: Mirrors, settings: RemoteConfig) -> SourceFile:
    for folder, url in mirrors:
        if file.path.is_relative_to(folder):
            return replace(file, path=_mirror(url, settings, os.getpid()) / file.path.relative_to(folder))
    return file


@functools.lru_cache(maxsize=256)
def _mirror(url: Url, settings: RemoteConfig, pid: int) -> Path:  # noqa: ARG001  a fork opens it anew
    return Mirror.at(url, settings).folder
