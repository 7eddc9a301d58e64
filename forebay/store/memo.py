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
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

import numpy as np
import xxhash

from forebay.config.tree import Config
from forebay.errors import RemoteDeniedError
from forebay.progress import Progress
from forebay.store.files import hash_opened, is_temporary, write_bytes
from forebay.store.layout import NOTES, PLANS
from forebay.store.remote.raw.raw_sources import place_of, source_stat, stat_of_status

logger = logging.getLogger(__name__)
FILE_NAME = "hashes.memo"
_RACY_NS = 2_000_000_000
"""The coarsest time stamps in use (FAT) tick every two seconds."""
_READINGS = 3
_PIECE_FILES, _PIECE_BYTES = 50_000, 64 << 30
"""What is hashed between two savings."""
_RECORD = np.dtype([("stat", "<i8", (5,)), ("hashed_at_ns", "<i8"), ("xxh3_128", "V16")])
Stat = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, time of the last change of the content and of anything, in ns."""
SIZE = 2
"""Where the size stands in it."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """The content hash of a file, with the stat that it had when it was read."""

    stat: Stat
    hashed_at_ns: int
    xxh3_128: str


Hashing = Callable[[Callable[[Path], Hashed], Sequence[Path]], Iterable[Hashed]]
"""Applies a function to every path, as `map` does."""


class Memo:
    """Hashes by stat, loaded from `<cache_root>/hashes.memo` and from sealed caches."""

    def __init__(self, root: Path, *, trusts_etags: bool = False) -> None:
        """trusts_etags: an object is known by its relative name, etag and size, wherever it lies."""
        self.path = root / FILE_NAME
        self._trusts_etags = trusts_etags
        self._entries: dict[Stat, Hashed] = {}
        self.add_file(self.path)

    @classmethod
    def of(cls, config: Config) -> Memo:
        """Returns the memo of a config's cache root, as far as `source.remote_identity` trusts it."""
        return cls(config.cache_root, trusts_etags=config.source.remote_identity == "etag")

    def add_file(self, path: Path) -> None:
        """Adds the entries of a memo file; one that is missing or damaged adds none, which costs time only."""
        try:
            data = path.read_bytes()
        except OSError:
            return
        if len(data) < 16 or len(data[16:]) % _RECORD.itemsize or xxhash.xxh3_128_digest(data[16:]) != data[:16]:
            logger.warning("ignoring damaged memo %s; files will be hashed again", path)
            return
        records = np.frombuffer(data[16:], _RECORD)
        digests = records["xxh3_128"].tobytes().hex()  # as whole columns: a root may remember millions of loose files
        columns = zip(map(tuple, records["stat"].tolist()), records["hashed_at_ns"].tolist(), strict=True)
        for number, (stat, hashed_at_ns) in enumerate(columns):
            known = self._entries.get(_anywhere(stat))
            if known is None or known.hashed_at_ns < hashed_at_ns:
                self._entries[_anywhere(stat)] = Hashed(stat, hashed_at_ns, digests[32 * number : 32 * number + 32])

    def known(self, path: Path) -> str | None:
        """Returns the hash of a file as it is now; None where it has to be read, OSError where it is absent."""
        found = self._known(path)
        return None if found is None else found.xxh3_128

    def hashes(self, paths: Sequence[Path], *, map_: Hashing = map) -> list[str]:
        """Returns the hash of every file, reading only those that are not known, by `map_(hash_now, paths)`.

        What was learned is kept under the root where that is writable. Raises OSError for a file that is absent.
        """
        return [hashed.xxh3_128 for hashed in self.hashed(paths, map_=map_)]

    def hashed(self, paths: Sequence[Path], *, map_: Hashing = map) -> list[Hashed]:
        """Returns the hash of every file with the stat that it is of; what is hashed is kept piece by piece."""
        results = [self._known(path) for path in paths]
        for piece in _pieces([i for i, result in enumerate(results) if result is None], paths):
            found = map_(hash_now, [paths[i] for i in piece])
            if map_ is map:  # others show it themselves
                found = Progress(len(piece), desc="hash", unit="file").over(found)
            for i, hashed in zip(piece, found, strict=True):
                self._entries[_anywhere(hashed.stat)] = results[i] = hashed
                if (twin := _etag_stat(paths[i])) is not None and hashed.stat == stat_now(paths[i]):
                    self._entries[twin] = replace(hashed, stat=twin)
            self._save()
        return [result for result in results if result is not None]

    def dump(self, paths: Sequence[Path] | None = None) -> bytes:
        """Returns the memo file of all entries, or of those that describe these paths as they are now."""
        entries = self._entries
        if paths is not None:
            stats = [stat for stat in map(stat_now, paths) if stat is not None]
            wanted = {*map(_anywhere, stats), *map(_etag_stat, paths)}
            entries = {stat: entry for stat, entry in entries.items() if stat in wanted}
        records = np.zeros(len(entries), _RECORD)
        for record, entry in zip(records, sorted(entries.values(), key=lambda entry: entry.stat), strict=True):
            record["stat"], record["hashed_at_ns"] = entry.stat, entry.hashed_at_ns
            record["xxh3_128"] = np.void(bytes.fromhex(entry.xxh3_128))
        body = records.tobytes()
        return xxhash.xxh3_128_digest(body) + body

    def _known(self, path: Path) -> Hashed | None:
        stat = source_stat(path)
        entry = self._entries.get(_anywhere(stat))
        if entry is None and self._trusts_etags and (twin := _etag_stat(path)) in self._entries and twin is not None:
            return replace(self._entries[twin], stat=stat)
        return None if entry is None or is_young(entry.stat, entry.hashed_at_ns) else entry

    def _save(self) -> None:
        # Another builder may have saved since: take its entries in. What two writers lose to each other is hashed
        # again.
        self.add_file(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, self.dump())
        except OSError as err:
            logger.info("hashes are not kept: %s: %s", self.path, err.strerror)


def _pieces(places: Sequence[int], paths: Sequence[Path]) -> Iterator[list[int]]:
    """Yields runs of places whose files are read in about a minute."""
    piece: list[int] = []
    size = 0
    for place in places:
        piece.append(place)
        size += max(0, source_stat(paths[place])[SIZE])
        if len(piece) == _PIECE_FILES or size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def hash_now(path: Path) -> Hashed:
    """Returns the hash of a file by reading it, and the stat of the file that was read: `path` may become another one.

    One that changes meanwhile is read again; if it goes on, its entry never matches. Objects are hashed as they come.
    """
    if (place := place_of(path)) is not None:
        started_ns = time.time_ns()
        version, digest = place.hash()
        return Hashed(version, started_ns, digest)
    for _ in range(_READINGS):
        started_ns = time.time_ns()
        with path.open("rb", buffering=0) as file:
            before = stat_of_status(os.fstat(file.fileno()))
            digest = hash_opened(file)
            if stat_of_status(os.fstat(file.fileno())) == before:
                break
    return Hashed(before, started_ns, digest)


def stat_now(path: Path) -> Stat | None:
    """Returns the stat of a file as it is now, None where there is none to be had."""
    try:
        return source_stat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the path, or a surrogate that no file name holds
        return None


def is_young(stat: Stat, seen_ns: int) -> bool:
    """Whether a file was changed about when it was looked at: it may have changed again and kept its times."""
    return max(stat[-2:]) > seen_ns - _RACY_NS


def is_same(now: Stat | None, known: Stat | None) -> bool:
    """Whether two stats are of one state of one file, which another machine may have looked at."""
    if now is None or known is None:
        return now is known
    return _anywhere(now) == _anywhere(known)


def _anywhere(stat: Stat) -> Stat:
    """Returns a stat as all machines that mount the file see it: each numbers the devices itself.

    Git leaves the device out for the same reason. That of an object stands for its URL, and stays.
    """
    return stat if stat[0] < 0 else (0, *stat[1:])


def _etag_stat(path: Path) -> Stat | None:
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
