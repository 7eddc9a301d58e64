"""The node's shard cache: what all processes of a machine keep of stores, in one folder with a bound.

Processes share the folder by what lies on disk alone. While a file is downloaded it is called `<name>.<size>.part`, and
whoever holds the lock on it is its owner. Everybody else waits for the finished file; where the owner died, the lock
is free, and the next one goes on from the bytes that are there. So an object crosses the network once a node, and
nothing that a killed process leaves is in the way.

Waiting for room cannot last forever. What is in the way is mapped by somebody. Mappings that are kept only in case they
are read again are closed when somebody asks (`Shared.squeeze`), whether their process reads or not. The others are of
batches that are being filled. A bound that holds all of these at once, which `plan.remote_cost` asks for before a run
begins, has room for the next file of each.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from forebay.config.remote import RemoteConfig
from forebay.errors import CacheError, ConfigError, RemoteError, RemoteReplacedError
from forebay.store.files import hash_file, start_writeback, write_all
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.node.holdings import Known
from forebay.store.remote.node.room import NoRoom, Room, RoomPlace, gb, is_whole
from forebay.store.remote.node.shared import EXCLUSIVE, Shared, pauses, shared, try_lock

logger = logging.getLogger(__name__)
_BLOCK_BYTES = 4 * 1024 * 1024
_WRITEBACK_BYTES = 32 * 1024 * 1024
_SAY_AFTER_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
Pieces = Callable[[int], Iterator[bytes]]
"""The bytes of an object from an offset on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedFile:
    """The object that a file is to be: its name below the bucket's URL, its size, its hash or etag where one is known.

    number: place of the file in what readers tell (`ReaderUses`), for shards their index; -1: nobody tells of it.
    is_kept: a small file that goes only with its whole mirror.
    """

    name: str
    size_bytes: int
    xxh3_128: str = ""
    etag: str = ""
    number: int = -1
    is_kept: bool = False

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any], *, is_kept: bool = False) -> WantedFile:
        """Returns a file of a cache as a document tells of it: with its size and its hash."""
        size_bytes, digest = int(entry["size_bytes"]), str(entry["xxh3_128"])
        return cls(name=name, size_bytes=size_bytes, xxh3_128=digest, is_kept=is_kept)

    @property
    def known(self) -> Known:
        """The objects that the mirror's ledger knows."""
        return Known(self.number, self.is_kept)


class NodeCache:
    """The files under `remote.shard_dir`. Threads may share it, and processes share its folder."""

    def __init__(self, folder: Path, settings: RemoteConfig) -> None:
        """Touches nothing yet."""
        self.folder, self.settings, self.bound_bytes = folder, settings, settings.cache_size_bytes
        self._shared: tuple[int, Shared] | None = None
        self.room = Room(folder, bound_bytes=self.bound_bytes, timeout_s=settings.timeout_s)

    @property
    def shared(self) -> Shared:
        """The state that this process shares of the folder."""
        if self._shared is None or self._shared[0] != os.getpid():
            self._shared = os.getpid(), shared(self.folder)
        return self._shared[1]

    def fetch(self, target: Path, wanted: WantedFile, bucket: Bucket, *, distance: int = 0) -> str | None:
        """Makes `target` the object, whole, by one download of this node, and returns the xxh3-128 of its bytes.

        distance: steps until it is needed; 0: now. None, only where it is not needed now: there is no room without
        taking what is needed as soon.
        Raises RemoteError where the store does not give it, RemoteReplacedError where the object is another one than is
        wanted, CacheError where the disk is full or no room is to be had.
        """
        source = _Source(
            str(bucket.url / wanted.name), lambda start: bucket.stream(wanted.name, start=start, etag=wanted.etag)
        )
        return self._fetch(target, wanted, source, distance=distance)

    def keep(self, target: Path, wanted: WantedFile, data: bytes) -> None:
        """Makes `target` these bytes, which came from a store, and counts them."""
        self._fetch(target, wanted, _Source(str(target), lambda start: (data[start:] for _ in range(1))), distance=0)

    def _fetch(self, target: Path, wanted: WantedFile, source: _Source, *, distance: int) -> str | None:
        if is_whole(target, wanted.size_bytes):
            return wanted.xxh3_128 or hash_file(target)
        check_bound(self.bound_bytes, wanted.size_bytes, what=wanted.name)
        place = self.room.place(target)
        waiting = _Waiting(self, place, wanted)
        began = None if distance or wanted.is_kept else time.monotonic()
        while not is_whole(target, wanted.size_bytes):
            no_room = None
            if not _is_owned(place.part(wanted.size_bytes)):
                with self.shared.turns.turn(distance, most=self.settings.max_concurrent):
                    try:
                        claim = self.room.claim(
                            place, size_bytes=wanted.size_bytes, known=wanted.known, distance=distance
                        )
                        if isinstance(claim, io.FileIO):
                            with claim:
                                found = self._download(claim, place, wanted, source)
                            self._count_wait(began)
                            return found
                    except OSError as err:
                        self._free_disk(err, place, wanted)
                        continue
                no_room = claim
            if no_room is not None and distance:
                return None
            waiting.pause(no_room)
        self._count_wait(began)
        return wanted.xxh3_128 or hash_file(target)

    def _count_wait(self, began: float | None) -> None:
        if began is not None:
            self.shared.counters.add(stalls=1, stall_s=time.monotonic() - began)

    def _download(self, file: io.FileIO, place: RoomPlace, wanted: WantedFile, source: _Source) -> str:
        """Makes the partial file whole, checks it, gives it its name, and returns its hash."""
        part = place.part(wanted.size_bytes)
        # What is there may be of another state of the object, and nothing would tell.
        if not (wanted.xxh3_128 or wanted.etag):
            file.truncate(0)
        size, found = 0, ""
        for is_again in (False, True):
            if is_again:
                file.truncate(0)
            size, found = self._fill(file, wanted, source)
            if size == wanted.size_bytes and found == (wanted.xxh3_128 or found):
                break
        else:
            self.room.give_back(part, wanted.size_bytes)
            raise _replaced(source.where, wanted, size, found)
        # Without it a machine that dies may leave the name to a file with holes.
        os.fdatasync(file.fileno())
        self.room.finish(place, size_bytes=wanted.size_bytes, known=wanted.known)
        self.shared.counters.add(downloads=1)
        return found

    def _fill(self, file: io.FileIO, wanted: WantedFile, source: _Source) -> tuple[int, str]:
        """Appends what the file lacks; returns its size and xxh3-128. It stops where there is more than is wanted."""
        state, size = _hashed(file)
        written = 0
        if size < wanted.size_bytes:
            with contextlib.closing(source.pieces(size)) as pieces:  # type: ignore[type-var]
                for piece in pieces:  # they end where the object does
                    state.update(piece)
                    write_all(file, piece)
                    size += len(piece)
                    written += len(piece)
                    self.shared.counters.add(bytes=len(piece))
                    if size > wanted.size_bytes:
                        break
                    if written >= _WRITEBACK_BYTES:
                        start_writeback(file)
                        written = 0
        return size, state.hexdigest()

    def _free_disk(self, err: OSError, place: RoomPlace, wanted: WantedFile) -> None:
        """Makes room on a disk that is full; raises CacheError where nothing can go, and for any other error."""
        if isinstance(err, RemoteError) or err.errno not in _FULL:
            if isinstance(err, (CacheError, ConfigError, RemoteError)):
                raise err
            raise CacheError(
                f"{self.folder}: {wanted.name} cannot be written: {err.strerror or err}; set remote.shard_dir"
            ) from err
        if not self.room.shrink(place, wanted.size_bytes):
            status = os.statvfs(self.folder)
            raise CacheError(
                f"{self.folder}: the disk is full: {gb(status.f_bavail * status.f_frsize)} are free, {wanted.name} "
                f"needs {gb(wanted.size_bytes)}, and nothing of the cache can go; free the disk, or set "
                "remote.shard_dir to another one",
                code="FB608",
            ) from err


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the bytes of a file come from, and how to call that."""

    where: str
    pieces: Pieces


class _Waiting:
    """Pauses of one that waits for another's download or for room; gives up where nothing moves for too long."""

    def __init__(self, node: NodeCache, place: RoomPlace, wanted: WantedFile) -> None:
        self._node, self._place, self._wanted = node, place, wanted
        self._part = place.part(wanted.size_bytes)
        self._pauses = pauses()
        self._moved_s, self._size = time.monotonic(), -1
        self._no_room_s: float | None = None
        self._has_said = False

    def pause(self, no_room: NoRoom | None) -> None:
        """Waits for milliseconds. Raises CacheError where there was no room, RemoteError where no byte came."""
        waited_s = next(self._pauses)
        try:
            size = os.lstat(self._part).st_size
        except FileNotFoundError:
            size = -1
        if size != self._size:
            self._size, self._moved_s = size, time.monotonic()
        if waited_s > _SAY_AFTER_S and not self._has_said:
            self._has_said = True
            what = f"room: {_standing(no_room, self._wanted)}" if no_room else "another process to download it"
            logger.warning("%s: waiting for %s", self._place.target, what)
        now, settings = time.monotonic(), self._node.settings
        self._no_room_s = None if no_room is None else self._no_room_s or now
        if no_room is not None and now - (self._no_room_s or now) > settings.timeout_s:
            raise CacheError(
                f"{self._place.target}: no room after {waited_s:.0f} s: {_standing(no_room, self._wanted)}; raise "
                "remote.cache_size_gb, or end what else reads through this folder",
                code="FB608",
            )
        if no_room is None and now - self._moved_s > settings.patience_s:
            raise RemoteError(
                f"{self._place.target}: the process that downloads it got no byte in {settings.patience_s:g} s "
                f"(remote.timeout_s and retries), and {max(self._size, 0)} of {self._wanted.size_bytes} bytes are "
                "there; see what that process says, and start again"
            )


def _standing(no_room: NoRoom, wanted: WantedFile) -> str:
    return (
        f"{wanted.name} needs {gb(wanted.size_bytes)}; of the bound of {gb(no_room.limit_bytes)} "
        f"{gb(no_room.held_bytes)} are taken, {gb(no_room.pinned_bytes)} of these by files that are being read or "
        "downloaded"
    )


def _is_owned(part: Path) -> bool:
    """Whether somebody downloads it at the moment."""
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, EXCLUSIVE, part)
    finally:
        os.close(descriptor)


def _hashed(file: io.FileIO) -> tuple[xxhash.xxh3_128, int]:
    """Returns the hash of what a file holds and its size; the file stands at its end then."""
    state, size = xxhash.xxh3_128(), 0
    buffer = bytearray(_BLOCK_BYTES)
    view = memoryview(buffer)
    file.seek(0)
    while count := file.readinto(buffer):
        state.update(view[:count])
        size += count
    return state, size


def _replaced(where: str, wanted: WantedFile, size: int, found: str) -> RemoteReplacedError:
    values = (
        f"its xxh3-128 is {found}, wanted {wanted.xxh3_128}"
        if size == wanted.size_bytes
        else f"it has {'more than ' * (size > wanted.size_bytes)}{min(size, wanted.size_bytes)} bytes, wanted "
        f"{wanted.size_bytes}"
    )
    return RemoteReplacedError(
        f"{where}: {values}, after two downloads; another object stands under this name by now: open it again, or "
        "push the cache again"
    )


def check_bound(bound_bytes: int, needed: int, *, what: str) -> None:
    """Raises ConfigError where a bound holds less than is needed at once."""
    if bound_bytes < needed:
        raise ConfigError(
            f"remote.cache_size_gb = {bound_bytes / 1e9:g} ({gb(bound_bytes)}) is less than {what} needs at once, "
            f"{gb(needed)}; set remote.cache_size_gb to {needed / 1e9 + 0.001:.3f} or more",
            code="FB608",
        )
