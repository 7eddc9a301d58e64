"""A folder of a store as a folder of this node: small files are there when it is opened, large ones when asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import xxhash

from forebay.config.remote import RemoteConfig, Url, is_url, parse_url
from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheNotFoundError,
    CacheReplacedError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteReplacedError,
)
from forebay.store.cold.arrays import ROOT as COLD_ROOT
from forebay.store.cold.arrays import pull_hint
from forebay.store.files import hash_file, link_or_copy, sweep, write_bytes
from forebay.store.held import ORIGIN, HeldFile, HeldFolder, open_own
from forebay.store.metadata import FILE_NAME, foreign_values, read_metadata, read_regular
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.carry.tally import for_each
from forebay.store.remote.node.holdings import MIRRORS, NEVER, Known, is_inside
from forebay.store.remote.node.node import NodeCache, WantedFile, check_bound
from forebay.store.remote.node.shared import SHARED, Counters, Holder, pauses, try_lock

logger = logging.getLogger(__name__)
_SHOWN = 60
"""Letters of a URL's last part in the name of a mirror's folder."""
_TOUCH_S = 60.0
"""The time of a file says when it was last used, so exactly."""


class Mirror:
    """The part of a store's folder that a node has. It describes itself, so any process with the path can go on."""

    def __init__(self, folder: Path, url: Url, settings: RemoteConfig) -> None:
        """folder: `<node's folder>/mirrors/<name>`."""
        self.folder, self.url, self.settings = folder.absolute(), url, settings
        self.node = NodeCache(self.folder.parent.parent, settings)
        self.before_demand: list[Callable[[], None]] = []
        """Called before a file that is not here is asked for: what this process' readers tell is to be true then."""

    @cached_property
    def bucket(self) -> Bucket:
        """Where its files come from."""
        return Bucket(self.url, self.settings)

    @property
    def counters(self) -> Counters:
        """Counts of this process's work with the node's folder, all mirrors together."""
        return self.node.shared.counters

    @classmethod
    def at(cls, url: Url, settings: RemoteConfig, *, state: str = "") -> Mirror:
        """Returns the mirror of a URL, whose folder is there then. state: of what the URL holds, where that changes."""
        identity = f"{settings.endpoint or ''} {url} {state}"
        name = f"{url.name[:_SHOWN]}-{xxhash.xxh3_64_hexdigest(identity.encode())}"
        mirror = cls(settings.folder / MIRRORS / name, url, settings)
        mirror.describe()
        return mirror

    @classmethod
    def of(cls, folder: Path) -> Mirror | None:
        """Returns the mirror whose folder this is, None where it is no mirror."""
        try:
            document = json.loads(read_regular(folder / ORIGIN))
            mirror = cls(folder, parse_url(document["url"]), RemoteConfig(**document["remote"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as err:  # a ConfigError is a ValueError
            raise CacheCorruptError(
                f"{folder / ORIGIN} is not what forebay writes ({err}); open its URL again"
            ) from err
        # A folder that came from elsewhere must not make this machine ask a store, or write beside it.
        is_own = mirror.folder.parent.name == MIRRORS and _is_same(mirror.node.folder, mirror.settings.folder)
        return mirror if is_own else None

    def describe(self) -> None:
        """Makes sure that the folder is there and says what it is, and that it was opened now."""
        settings = dataclasses.replace(self.settings, shard_dir=str(self.node.folder))
        document = {"url": str(self.url), "remote": dataclasses.asdict(settings)}
        data, path = json.dumps(document, indent=1).encode(), self.folder / ORIGIN
        with self.node.room.locked() as held:  # nobody takes it away as unused in between
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            if path.is_file() and path.read_bytes() == data:
                os.utime(path)
            else:
                self.node.room.take(held, len(data) * (not path.exists()))
                write_bytes(path, data)

    def file(self, held: HeldFolder, wanted: WantedFile, holder: Holder) -> MirroredFile:
        """Returns a file of the mirror. held: its folder, opened. holder: who keeps the file mapped."""
        return MirroredFile(held, wanted.name, self, wanted, holder)

    def check_bound(self, largest: int) -> None:
        """Raises ConfigError where the bound holds no shard of so many bytes, all groups together."""
        check_bound(self.settings.cache_size_bytes, largest, what=f"a shard of {self.url}")

    def require(self, wanted: WantedFile) -> Path:
        """Returns the path of a file, which is there then, whole. Raises what `NodeCache.fetch` does."""
        path = self.folder / wanted.name
        is_here = self._is_here(path, wanted)
        if not wanted.is_kept:
            self.counters.add(hits=int(is_here), misses=int(not is_here))
        if not is_here:
            for tell in list(self.before_demand):
                tell()
            self._fetch(path, wanted, distance=0)
        return path

    def fetch_ahead(self, wanted: WantedFile, *, distance: int) -> bool:
        """Downloads what is needed in so many steps, 1 or more; whether it is there. Raises as `NodeCache.fetch`."""
        path = self.folder / wanted.name
        return self._is_here(path, wanted) or self._fetch(path, wanted, distance=max(distance, 1)) is not None

    def adopt(self, wanted: WantedFile, path: Path) -> bool:
        """Links a file of the store's bytes, on this file system, into the mirror; whether there is room for it."""
        place = self.node.room.place(self.folder / wanted.name)
        known = Known(wanted.number, wanted.is_kept)
        claim = self.node.room.claim(place, size_bytes=wanted.size_bytes, known=known, distance=NEVER - 1)
        if not isinstance(claim, io.FileIO):
            return claim is None
        with claim:
            link_or_copy(path, place.target)
            place.part(wanted.size_bytes).unlink(missing_ok=True)
        return True

    def has(self, wanted: WantedFile) -> bool:
        """Whether a file is here, whole; it counts as used then."""
        return self._is_here(self.folder / wanted.name, wanted)

    def mend(self, files: Iterable[WantedFile]) -> None:
        """Fetches files again that are here and are not, by their hash, what the store gave.

        The bytes are written over the damaged ones, so that whoever has a file mapped reads the right ones, and two
        processes that do so at once write the same. Raises RemoteError, RemoteReplacedError where the store has others.
        """
        for wanted in files:
            path = self.folder / wanted.name
            if not self._is_here(path, wanted) or hash_file(path) == wanted.xxh3_128:
                continue
            logger.warning("%s was damaged on this node's disk; it is fetched again from %s", path, self.url)
            with open(path, "r+b", opener=open_own) as file:
                for piece in self.bucket.stream(wanted.name, stop=wanted.size_bytes):
                    file.write(piece)
                file.flush()
                os.fdatasync(file.fileno())
            self.counters.add(damaged=1, downloads=1, bytes=wanted.size_bytes)
            if (found := hash_file(path)) != wanted.xxh3_128:
                raise RemoteReplacedError(
                    f"{self.url / wanted.name}: its xxh3-128 is {found}, wanted {wanted.xxh3_128}; push the cache again"
                )

    def mend_small(self) -> None:
        """Does so with the files beside the shards of a cache."""
        self.mend(_small_files(self.folder))

    def _fetch(self, path: Path, wanted: WantedFile, *, distance: int) -> str | None:
        if not is_inside(wanted.name):
            raise RemoteError(f"{self.url}: {wanted.name!r} is no name below it")
        if not (self.folder / ORIGIN).is_file():
            raise CacheReplacedError(f"{self.folder}, the mirror of {self.url}, was removed; open {self.url} again")
        return self.node.fetch(path, wanted, self.bucket, distance=distance)

    @staticmethod
    def _is_here(path: Path, wanted: WantedFile) -> bool:
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if found.st_size != wanted.size_bytes or not stat.S_ISREG(found.st_mode):
            return False
        touch(found, path)
        return True


@dataclass(frozen=True, slots=True)
class MirroredFile(HeldFile):
    """A file of a mirror: it is there when it is asked for, and stays as long as it is open or mapped.

    The lock is of the open file. A mapping keeps the open file, so the lock ends with the last view of the mapping.
    """

    mirror: Mirror
    wanted: WantedFile
    holder: Holder

    def lstat(self) -> os.stat_result:
        """Returns its stat; the file is there then."""
        self.mirror.require(self.wanted)
        return HeldFile.lstat(self)

    def open(self, mode: Literal["rb"] = "rb", buffering: Literal[0] = 0) -> io.FileIO:
        """Opens it for reading, and keeps it from being removed until the last descriptor of it is closed."""
        shared, has_asked = self.mirror.node.shared, False
        shared.hold(self.holder)
        while True:
            try:
                file = HeldFile.open(self, mode, buffering)
            except OSError as err:
                if err.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
            else:
                _lock_shared(file, self.place)
                found = os.fstat(file.fileno())
                if found.st_nlink and found.st_size == self.wanted.size_bytes:
                    if not has_asked:
                        shared.counters.add(hits=1)
                        touch(found, file.fileno())
                    return file
                file.close()  # removed in between, or cut off
            self.mirror.require(self.wanted)
            has_asked = True


def touch(found: os.stat_result, file: int | Path) -> None:
    """Says that a file is used now, which whoever makes room goes by."""
    if abs(time.time() - found.st_mtime) > _TOUCH_S:
        with contextlib.suppress(OSError):  # it went, or is another user's
            os.utime(file)


def _lock_shared(file: io.FileIO, path: object) -> None:
    # Its exclusive locks are held for the blink of an eye: by who renames it, and by who removes it.
    for _ in itertools.chain((0.0,), pauses()):
        if try_lock(file.fileno(), SHARED, path):
            return


def cache_folder(place: str | Path, settings: RemoteConfig) -> Path:
    """Returns the folder of a cache on this node: that which is named, or the mirror of a URL.

    Of a URL all but the shards is there then. A store that does not answer leaves what this node has of the URL.
    Raises CacheNotFoundError where no sealed cache lies there, CacheCorruptError where something else has the name of
    its metadata, RemoteError where the store does not answer and this node has nothing of it.
    """
    if not is_url(str(place)):
        return Path(place)
    url = parse_url(str(place))
    bucket = Bucket(url, settings)
    try:
        data = bucket.read(FILE_NAME)
    except RemoteMissingError as err:
        hint = None
        with contextlib.suppress(RemoteError):  # what is missing was said by the store already
            hint = pull_hint(bucket.read(COLD_ROOT), url)
        raise CacheNotFoundError(
            hint
            or f"{url} holds no sealed cache: it has no {FILE_NAME}; name another URL, or run: "
            f"forebay preprocess CONFIG --cache-root {url.parent}"
        ) from err
    except RemoteDeniedError:
        raise
    except RemoteError as err:
        found = _latest(url, settings)
        if found is None:
            raise
        logger.warning("%s; going on with what this node has of it, %s", err, found.folder)
        return found.folder
    mirror = Mirror.at(url, settings, state=xxhash.xxh3_128_hexdigest(data))
    metadata = WantedFile(name=FILE_NAME, size_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data), is_kept=True)
    mirror.node.keep(mirror.folder / FILE_NAME, metadata, data)
    mirror.mend((metadata,))
    try:
        wanted = _small_files(mirror.folder)
    except CacheCorruptError as err:
        (mirror.folder / FILE_NAME).unlink(missing_ok=True)
        raise CacheCorruptError(
            f"{url / FILE_NAME} describes no cache: {err.args[0].partition('; run:')[0]}; push the cache again"
        ) from err
    for_each(mirror.require, wanted, num_threads=settings.max_concurrent)
    return mirror.folder


def key_there(url: Url, settings: RemoteConfig) -> str | None:
    """Returns the key of the cache that is sealed at a URL, None where there is none. Raises RemoteError."""
    try:
        return str(read_metadata(cache_folder(str(url), settings))["key"])
    except FileNotFoundError:
        return None


def _small_files(folder: Path) -> list[WantedFile]:
    metadata = read_metadata(folder)
    with foreign_values(folder):
        if odd := [name for name in metadata["files"] if not is_inside(name)]:
            raise ValueError(f"{odd[0]!r} is no name of a file")
        return [WantedFile.of(name, entry, is_kept=True) for name, entry in metadata["files"].items()]


def _latest(url: Url, settings: RemoteConfig) -> Mirror | None:
    """Returns the mirror of a URL that was opened last and has all its small files."""
    found = []
    for folder in (settings.folder / MIRRORS).glob("*"):
        with contextlib.suppress(CacheError, FileNotFoundError):
            mirror = Mirror.of(folder)
            if mirror is None or mirror.url != url or mirror.settings.endpoint != settings.endpoint:
                continue
            if all(mirror.has(wanted) for wanted in _small_files(folder)):
                found.append(mirror)
    return max(found, key=lambda mirror: (mirror.folder / ORIGIN).stat().st_mtime_ns, default=None)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one == other.absolute() or os.path.samefile(one, other)
    except OSError:
        return False
