"""Content hashes remembered by stat, so that finding a cache costs a stat a file and not a read.

As git's index does: an entry holds for exactly the same (dev, inode, size, mtime_ns, ctime_ns), and is distrusted where
the file was changed about when it was hashed, because a second change inside one clock tick would not show. An object
of a store has its version instead, of URL, etag and size; and an entry by relative name and etag beside it, for those
who trust these in a copy of the bucket.

When a cache was used last, and on which hosts: small files outside of the sealed folder, for whoever cleans up.

A note of a host is `<root>/.used/<name of the cache's folder>/<host>`, of a plan `<root>/.used/plans/<name>/<host>`,
of kept texts `<root>/.used/texts/<name>/<host>`.
Its time says when the use began, to the hour. Notes decide nothing about values: what cannot be noted is not.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

import numpy as np
import xxhash

from forebay.config.tree import Config
from forebay.errors import RemoteDeniedError
from forebay.store.files import hash_opened, is_temporary, write_all, write_aside
from forebay.store.layout import NOTES, PLANS, Array
from forebay.store.remote.raw.raw_sources import place_of, source_stat, stat_of_status
from forebay.terminal import Progress

logger = logging.getLogger(__name__)
FILE_NAME = "hashes.memo"
_RACY_NS = 2_000_000_000
"""The coarsest time stamps in use (FAT) tick every two seconds."""
_READINGS = 3
_PIECE_FILES, _PIECE_BYTES = 16_384, 64 << 30
"""What is hashed between two savings."""
_TASK_FILES, _TASK_BYTES = 256, 64 << 20
"""What is hashed by one task: of small files the way to a worker costs more than the hash."""
_THREADS = 8
_BLOCK = 4096
"""Paths that are strings at once."""
_LOOKED_UP = 16_384
"""Entries that are copied at once."""
_RECORD = np.dtype([("stat", "<i8", (5,)), ("hashed_at_ns", "<i8"), ("xxh3_128", "V16")])
Stat = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, time of the last change of the content and of anything, in ns."""
SIZE = 2
"""Where the size stands in it."""
_NO_STAT: Stat = (0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Hashed:
    """The content hash of a file, with the stat that it had when it was read."""

    stat: Stat
    hashed_at_ns: int
    xxh3_128: str


AnyPath = str | os.PathLike[str]
Hashing = Callable[[Callable[[Sequence[AnyPath]], bytes], Sequence[Sequence[AnyPath]]], Iterable[bytes]]
"""Applies a function to every task, as `map` does."""


class Memo:
    """Hashes by stat, loaded from `<cache_root>/hashes.memo` and from sealed caches.

    A root may remember millions of loose files, so entries are records of an array. `_order` sorts them by 64 bits of
    their stats, which are `_places`.
    """

    def __init__(self, root: Path, *, trusts_etags: bool = False) -> None:
        """trusts_etags: an object is known by its relative name, etag and size, wherever it lies."""
        self.path = root / FILE_NAME
        self._trusts_etags = trusts_etags
        self._records, self._places = np.zeros(0, _RECORD), np.zeros(0, np.uint64)
        self._order = np.zeros(0, np.int64)
        self._saved: Stat | None = None
        self.add_file(self.path)

    @classmethod
    def of(cls, config: Config) -> Memo:
        """Returns the memo of a config's cache root, as far as `source.remote_identity` trusts it."""
        return cls(config.cache_root, trusts_etags=config.source.remote_identity == "etag")

    def add_file(self, path: Path) -> None:
        """Adds the entries of a memo file; one that is missing or damaged adds none, which costs time only."""
        self._add(records_in(path, _RECORD))

    def known(self, path: Path) -> str | None:
        """Returns the hash of a file as it is now; None where it has to be read, OSError where it is absent."""
        digests, is_known = self.known_of([path], np.array([source_stat(path)], np.int64))
        return digests.tobytes().hex() if is_known[0] else None

    def known_of(self, paths: Sequence[AnyPath], stats: Array) -> tuple[Array, Array]:
        """Returns the hashes of files as V16 [files], and bool [files], whether they are known.

        stats: as they are now, see `stats_of`.
        """
        digests, is_known = np.zeros(len(stats), "V16"), np.zeros(len(stats), bool)
        for start in range(0, len(stats) if len(self._records) else 0, _LOOKED_UP):
            block = slice(start, start + _LOOKED_UP)
            at, is_there = self._find(stats[block])
            records = self._records[at]
            is_known[block] = is_there & ~is_young(records["stat"], records["hashed_at_ns"])
            digests[block] = records["xxh3_128"]
        unknown = np.flatnonzero(~is_known & (stats[:, 0] < 0)).tolist() if self._trusts_etags else ()
        for number in unknown:
            if (twin := _etag_stat(paths[number])) is not None:
                (at,), (is_there,) = self._find(np.array([twin], np.int64))
                if is_there:
                    digests[number], is_known[number] = self._records["xxh3_128"][at], True
        return digests, is_known

    def hashes(self, paths: Sequence[AnyPath], *, map_: Hashing = map) -> list[str]:
        """Returns the hash of every file, reading only those that are not known, by `map_(hash_files, tasks)`.

        What was learned is kept under the root where that is writable. Raises OSError for a file that is absent.
        """
        return hexes(self.hashed(paths, map_=map_)[1])

    def hashed(
        self, paths: Sequence[AnyPath], *, map_: Hashing = map, stats: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns the stat that each file had when it was hashed, int64 [files, 5], and its hash, V16 [files].

        What is hashed is kept piece by piece. stats: as they are now, where somebody has just looked.
        """
        if stats is None:
            stats, is_there = stats_of(paths)
            for number in np.flatnonzero(~is_there).tolist():
                stats[number] = source_stat(paths[number])  # says why there is none
        stats = stats.copy()
        digests, is_known = self.known_of(paths, stats)
        left = np.flatnonzero(~is_known)
        while len(left):
            most = max(_PIECE_FILES, len(self._records) // 8)  # each saving writes all entries
            piece = next(_pieces(left, stats, files=most, size=_PIECE_BYTES))
            left = left[len(piece) :]
            tasks = [
                [paths[number] for number in task.tolist()]
                for task in _pieces(piece, stats, files=_TASK_FILES, size=_TASK_BYTES)
            ]
            found = np.frombuffer(b"".join((_in_threads if map_ is map else map_)(hash_files, tasks)), _RECORD)
            twins = found[:0]
            for number in np.flatnonzero(found["stat"][:, 0] < 0).tolist():
                path = paths[int(piece[number])]
                if (twin := _etag_stat(path)) is not None and tuple(found["stat"][number].tolist()) == stat_now(path):
                    twins = np.append(twins, found[number : number + 1])
                    twins["stat"][-1] = twin
            self._add(np.concatenate([found, twins]) if len(twins) else found)
            stats[piece], digests[piece] = found["stat"], found["xxh3_128"]
            self._save()
        return stats, digests

    def dump(self, paths: Sequence[AnyPath] | None = None) -> bytes:
        """Returns the memo file that `write` writes."""
        buffer = io.BytesIO()
        self.write(buffer, paths)
        return buffer.getvalue()

    def write(self, file: BinaryIO, paths: Sequence[AnyPath] | None = None, *, stats: Array | None = None) -> None:
        """Writes the memo file of all entries, or of those that describe these paths as they are now.

        stats: as they are now, where somebody has just looked; zeros of what is not there.
        """
        is_wanted = np.full(len(self._records), paths is None)
        if paths is not None:
            stats = stats_of(paths)[0] if stats is None else stats  # what is not there is not known either
            objects = np.flatnonzero(stats[:, 0] < 0).tolist()
            twins = [twin for number in objects if (twin := _etag_stat(paths[number])) is not None]
            for part in (stats, np.array(twins, np.int64).reshape(-1, 5)):
                at, is_known = self._find(part)
                is_wanted[at[is_known]] = True
        self._write(file, self._order[is_wanted[self._order]])

    def _write(self, file: BinaryIO, order: Array) -> None:
        """Writes entries, a block at a time, and their digest before them."""
        state = xxhash.xxh3_128()
        write_all(file, bytes(state.digest_size))
        for start in range(0, len(order), _LOOKED_UP):
            block = self._records[order[start : start + _LOOKED_UP]].tobytes()
            state.update(block)
            write_all(file, block)
        file.seek(0)
        write_all(file, state.digest())

    def forget(self) -> None:
        """Gives its memory back: it knows nothing any more, and takes its file in again before it is written."""
        self._records, self._saved = np.zeros(0, _RECORD), None
        self._places, self._order = np.zeros(0, np.uint64), np.zeros(0, np.int64)

    def _find(self, stats: Array) -> tuple[Array, Array]:
        """Returns where the entries of stats are, int64 [stats], and bool [stats], whether there are any."""
        if not len(self._records):
            return np.zeros(len(stats), np.int64), np.zeros(len(stats), bool)
        at, is_known = np.zeros(len(stats), np.int64), np.zeros(len(stats), bool)
        for start in range(0, len(stats), _LOOKED_UP):
            block = slice(start, start + _LOOKED_UP)
            wanted = anywhere(stats[block])
            places = _mixed(wanted)
            sorted_at = np.minimum(np.searchsorted(self._places, places), len(self._places) - 1)
            at[block] = self._order[sorted_at]
            is_same_file = (anywhere(self._records["stat"][at[block]]) == wanted).all(axis=1)
            is_known[block] = (self._places[sorted_at] == places) & is_same_file
        return at, is_known

    def _add(self, records: Array) -> None:
        """Takes entries in; of two of one file the later counts, and of two as late the one that was there before."""
        if not len(records):
            return
        before = len(self._records)
        places = np.empty(before + len(records), np.uint64)
        places[self._order], places[before:] = self._places, _mixed(anywhere(records["stat"]))
        self._records.resize(len(places), refcheck=False)  # nobody else has it: it grows where it lies
        self._records[before:] = records
        order = np.argsort(places)
        if not np.diff(places[order]).all():
            order = np.lexsort((-np.arange(len(places)), self._records["hashed_at_ns"], places))
            kept = np.sort(order[np.append(np.diff(places[order]) != 0, [True])])
            self._records, places = self._records[kept], places[kept]
            order = np.argsort(places)
        self._order, self._places = order, places[order]

    def _save(self) -> None:
        # Another builder may have saved since: take its entries in. What two writers lose to each other is hashed
        # again.
        if stat_now(self.path) != self._saved:
            self.add_file(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with write_aside(self.path) as file:
                self._write(file, self._order)
            self._saved = stat_now(self.path)
        except OSError as err:
            logger.info("hashes are not kept: %s: %s", self.path, err.strerror)


def records_in(path: Path, kind: np.dtype[Any]) -> Array:
    """Returns the records of a file that begins with their xxh3-128; none of one that is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return np.zeros(0, kind)
    body = memoryview(data)[16:]
    if len(data) < 16 or len(body) % kind.itemsize or xxhash.xxh3_128_digest(body) != data[:16]:
        logger.warning("ignoring damaged memo %s; what it held is found again", path)
        return np.zeros(0, kind)
    return np.frombuffer(body, kind)


def hexes(digests: Array) -> list[str]:
    """Returns hashes, V16 [files], as 32 hex digits each."""
    text = digests.tobytes().hex()
    return [text[start : start + 32] for start in range(0, len(text), 32)]


def digests_of(found: Sequence[str]) -> Array:
    """Returns hashes of 32 hex digits as V16 [files]."""
    return np.frombuffer(bytes.fromhex("".join(found)), "V16").copy()


def _pieces(places: Array, stats: Array, *, files: int, size: int) -> Iterator[Array]:
    """Yields runs of places: of at most so many files, and each but its last file is below so many bytes."""
    ends = np.cumsum(np.maximum(stats[places, SIZE], 0))
    start = 0
    while start < len(places):
        before = ends[start - 1] if start else 0
        stop = min(start + files, 1 + int(np.searchsorted(ends, before + size)), len(places))
        yield places[start:stop]
        start = stop


def _in_threads(function: Callable[[Sequence[AnyPath]], bytes], tasks: Sequence[Sequence[AnyPath]]) -> list[bytes]:
    """Returns `function(task)` of every task, several at once, with progress."""
    found = []
    with (
        Progress(sum(map(len, tasks)), desc="hash", unit="file") as bar,
        ThreadPoolExecutor(max(1, min(_THREADS, len(tasks)))) as threads,
    ):
        for task, records in zip(tasks, threads.map(function, tasks), strict=True):
            found.append(records)
            bar.update(len(task))
    return found


def hash_files(paths: Sequence[AnyPath]) -> bytes:
    """Returns the hashes of files as records of a memo, by reading them; as bytes, which any process may be sent."""
    found = np.zeros(len(paths), _RECORD)
    for number, path in enumerate(paths):
        hashed = hash_now(path)
        found[number] = hashed.stat, hashed.hashed_at_ns, bytes.fromhex(hashed.xxh3_128)
    return found.tobytes()


def hash_now(path: AnyPath) -> Hashed:
    """Returns the hash of a file by reading it, and the stat of the file that was read: `path` may become another one.

    One that changes meanwhile is read again; if it goes on, its entry never matches. Objects are hashed as they come.
    """
    if (place := place_of(path)) is not None:
        started_ns = time.time_ns()
        version, digest = place.hash()
        return Hashed(version, started_ns, digest)
    for _ in range(_READINGS):
        started_ns = time.time_ns()
        with open(path, "rb", buffering=0) as file:
            before = stat_of_status(os.fstat(file.fileno()))
            digest = hash_opened(file)
            if stat_of_status(os.fstat(file.fileno())) == before:
                break
    return Hashed(before, started_ns, digest)


def stats_of(paths: Sequence[AnyPath], look: Callable[[AnyPath], Stat | None] | None = None) -> tuple[Array, Array]:
    """Returns the stat of every file as it is now, int64 [files, 5], and bool [files], whether there is one.

    One stat a file; the zeros of a file that cannot be had say nothing. look: gives it, by default `stat_now`.
    """
    stats, is_there = np.zeros((len(paths), 5), np.int64), np.ones(len(paths), bool)
    for start in range(0, len(paths), _BLOCK):
        found = list(map(look or stat_now, paths[start : start + _BLOCK]))
        is_there[start : start + len(found)] = [stat is not None for stat in found]
        stats[start : start + len(found)] = [stat or _NO_STAT for stat in found]
    return stats, is_there


def stat_now(path: AnyPath) -> Stat | None:
    """Returns the stat of a file as it is now, None where there is none to be had."""
    try:
        return source_stat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the path, or a surrogate that no file name holds
        return None


def is_young(stat: Any, seen_ns: Any) -> Any:
    """Whether a file was changed about when it was looked at: it may have changed again and kept its times.

    Of many files: stat int64 [files, 5], seen_ns int64 [files], the result bool [files].
    """
    return np.asarray(stat)[..., -2:].max(axis=-1) > seen_ns - _RACY_NS


def is_same(now: Stat | None, known: Stat | None) -> bool:
    """Whether two stats are of one state of one file, which another machine may have looked at."""
    if now is None or known is None:
        return now is known
    return now[1:] == known[1:] and min(now[0], 0) == min(known[0], 0)


def anywhere(stats: Array) -> Array:
    """Returns stats, int64 [files, 5], as all machines that mount the files see them: each numbers the devices itself.

    Git leaves the device out for the same reason. That of an object stands for its URL, and stays.
    """
    found = stats.copy()
    found[:, 0] = np.minimum(found[:, 0], 0)
    return found


def _mixed(stats: Array) -> Array:
    """Returns 64 bits of each stat, uint64 [stats], after the finaliser of splitmix64 (Steele and others, 2014)."""
    mixed: Array = np.zeros(len(stats), np.uint64)
    for column in stats.T:
        mixed = (mixed ^ column.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _etag_stat(path: AnyPath) -> Stat | None:
    """Returns what the entry of an object is found by where etags are trusted; None for a file of this machine."""
    place = place_of(path)
    try:
        return None if place is None else place.etag_version()
    except RemoteDeniedError:
        return None


_MIRRORS = "mirrors"
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
    """Returns the noted uses of the folder of this path below a cache root, a descriptor; the latest first."""
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
    """Writes a note in its place: name and time say all, the content is for people. A pipe is not waited for."""
    data = json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "time": time.time()}).encode("ascii")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(host, flags, 0o666, dir_fd=notes)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def _forget_old(notes: int) -> None:
    """Removes notes of hosts that were not heard of for a month: a container may have another name each time."""
    with os.scandir(notes) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > KEPT_S:
                    os.unlink(entry.name, dir_fd=notes)
