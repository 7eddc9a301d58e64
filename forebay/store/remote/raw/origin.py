"""The objects that raw data is made of: what a process knows of them, and the copies of them that the node has.

A copy is named after URL, etag and size of the object, so an object that is replaced is another file, and no copy is
ever stale. What a process was told about objects holds until `forget`: a listing sees one state of the store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from forebay.config.remote import RemoteConfig, Url
from forebay.errors import CacheCorruptError, RemoteDeniedError, RemoteError, RemoteMissingError, RemoteReplacedError
from forebay.store.files import hash_file
from forebay.store.held import ORIGIN
from forebay.store.remote.bucket.bucket import Bucket, ObjectInfo, find
from forebay.store.remote.carry.tally import for_each
from forebay.store.remote.mirror import Mirror, touch
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.node.room import is_whole
from forebay.store.shared_disk import wait_alone

T = TypeVar("T")
OBJECTS = "objects"
"""Folder of a mirror in which the copies of raw files lie."""
HASHES = "hashes.log"
"""File of a mirror with the content hash of every version that the node has ever downloaded."""
Version = tuple[int, int, int, int, int]
"""Of an object what a stat is of a file: -1, 63 bits of a digest of URL and etag, size in bytes, 0, 0."""
_RECORD = np.dtype([("digest", "<i8"), ("size", "<i8"), ("xxh3_128", "V16"), ("check", "<u8")])
_SINGLE = 4
"""Objects that are asked for one by one; of more in one folder the folder is listed."""
_SKIPPED, _SKIPPED_SHARE = 2_000, 20
"""Names that a listing may pass over beside those that are wanted, in all and for each of these."""
_ATTEMPTS = 3


def version_of(where: str, info: ObjectInfo) -> Version:
    """Returns the version of an object. where: its URL, or the name that stands for it."""
    digest = xxhash.xxh3_64_intdigest(f"{where}\0{_tag(info)}".encode("utf-8", "surrogatepass"))
    return -1, digest >> 1, info.size_bytes, 0, 0


def _tag(info: ObjectInfo) -> str:
    """The etag as all answers of a store agree on it: a listing of Azure has no quotes. Without one, the time."""
    return info.etag.removeprefix("W/").strip('"') or f"modified {info.modified_ns}"


def _may_be_key(key: str) -> bool:
    """Whether an object may be called so: a name of bytes that are not UTF-8, or with a control character, is none."""
    return key.isprintable() or not any(unicodedata.category(letter) in ("Cc", "Cs") for letter in key)


@dataclass(slots=True)
class Objects:
    """The objects of one bucket by their keys, each asked for once."""

    bucket: Bucket
    _infos: dict[str, ObjectInfo | None] = field(default_factory=dict)
    _levels: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)

    def info(self, key: str) -> ObjectInfo | None:
        """Returns what the store says of an object, None where there is none. Raises RemoteError."""
        if key not in self._infos:
            is_known = not key or posixpath.dirname(key) in self._levels or not _may_be_key(key)
            self._infos[key] = None if is_known else find(self.bucket, key)
        return self._infos[key]

    def forget(self, key: str) -> None:
        """The object is asked for again: it is not what it was."""
        self._infos.pop(key, None)
        self._levels.pop(posixpath.dirname(key), None)

    def level(self, key: str) -> tuple[list[str], list[str]]:
        """Returns the keys of the objects and folders directly below a folder, sorted. Raises RemoteError."""
        if key not in self._levels:
            infos, folders = self.bucket.level(key)
            found = {info.name: info for info in infos if info.name != key}  # `folder/` is an object of some tools
            self._infos.update(found)
            self._levels[key] = sorted(found), sorted(folders)
        return self._levels[key]

    def is_folder(self, key: str) -> bool:
        """Whether anything lies below a key."""
        return any(self.level(key))

    def below(self, key: str, is_wanted: Callable[[str], bool]) -> Iterator[str]:
        """Yields the keys of the wanted objects below a folder, in the order of the store; no other is remembered."""
        for info in self.bucket.objects(key):
            if info.name != key and is_wanted(info.name):
                self._infos[info.name] = info
                yield info.name

    def look_up(self, keys: Sequence[str]) -> None:
        """Makes objects known: by one listing of a folder of which many are wanted, else by a request each."""
        folders: dict[str, set[str]] = {}
        for key in keys:
            if key not in self._infos:
                folders.setdefault(posixpath.dirname(key), set()).add(key)
        single: list[str] = []
        for folder, wanted in folders.items():
            if len(wanted) > _SINGLE and not self.bucket.url.is_web:
                wanted = self._listed(folder, wanted)
            single += sorted(wanted)
        for_each(self._look_up_one, single, num_threads=self.bucket.settings.max_concurrent)

    def _look_up_one(self, key: str) -> None:
        with contextlib.suppress(RemoteDeniedError):  # said of the samples that need it
            self.info(key)

    def _listed(self, folder: str, wanted: set[str]) -> set[str]:
        """Takes in what a listing says of wanted objects; returns those that it did not come to."""
        allowed = _SKIPPED + _SKIPPED_SHARE * len(wanted)
        left = set(wanted)
        # What comes after a name without its last letter begins with that name, or a little before it.
        for number, info in enumerate(self.bucket.objects(folder, after=min(wanted)[:-1])):
            if info.name in left:
                self._infos[info.name] = info
                left.remove(info.name)
            if number > allowed or not left:
                return left
        self._infos.update(dict.fromkeys(left))
        return set()


class Origin:
    """The store behind a mirror, and what the node has of it."""

    def __init__(self, mirror: Mirror, objects: Objects) -> None:
        self.folder, self.url, self.mirror, self.objects = mirror.folder, mirror.url, mirror, objects
        self._hashes = _Hashes(mirror.folder / HASHES)

    def path(self, version: Version) -> Path:
        """Where the node's copy of a version is, if it has one."""
        name = f"{version[1]:016x}"
        return self.folder / OBJECTS / name[:2] / f"{name}-{version[2]}"

    def is_here(self, version: Version) -> bool:
        """Whether the node has a version."""
        return is_whole(self.path(version), version[2])

    def hash(self, version: Version) -> str | None:
        """Returns the xxh3-128 of a version that the node has downloaded at any time, None of others."""
        return self._hashes.get(version)

    def fetch(self, key: str, version: Version, info: ObjectInfo) -> Path:
        """Returns the node's copy of a version, which is there then. Raises RemoteError."""
        path = self.path(version)
        if self.is_here(version):
            with contextlib.suppress(OSError):  # evicted in between
                touch(path.stat(), path)
        else:
            if not (self.folder / ORIGIN).is_file():  # nobody had opened the mirror for a day, so it went
                self.mirror.describe()
            wanted = WantedFile(name=key, size_bytes=info.size_bytes, etag=info.quoted_etag)
            found = self.mirror.node.fetch(path, wanted, self.objects.bucket)
            if found is not None and self.hash(version) is None:
                self._hashes.add(version, found)
        return path

    def read_hash(self, version: Version) -> str:
        """Returns the xxh3-128 of a version whose copy is here. Raises OSError where it is gone again."""
        if (known := self.hash(version)) is not None:
            return known
        found = hash_file(self.path(version))
        self._hashes.add(version, found)
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """An object by its key, in the store behind a mirror. name: relative to the folder of the mirror's URL."""

    origin: Origin
    key: str
    name: str

    @property
    def url(self) -> str:
        """Its URL."""
        return f"{self.origin.objects.bucket.url}/{self.key}"

    def info(self) -> ObjectInfo | None:
        """Returns what the store says of it, None where there is no such object. Raises RemoteError."""
        return self.origin.objects.info(self.key)

    def version(self) -> Version | None:
        """Returns its version, None where there is no such object. Raises RemoteError."""
        info = self.info()
        return None if info is None else version_of(self.url, info)

    def etag_version(self) -> Version | None:
        """Returns what it has in common with a copy of the same relative name and etag in another place."""
        info = self.info()
        return None if info is None or not info.etag else version_of(f"etag {self.name}", info)

    def fetch(self) -> tuple[Version, Path]:
        """Returns the version of the object and the node's copy of it. Raises FileNotFoundError, RemoteError."""
        return self._of_one_version(lambda version, info: self.origin.fetch(self.key, version, info))

    def hash(self) -> tuple[Version, str]:
        """Returns the version of the object and the hash of its content: from the download of it, if it needs one."""
        return self._of_one_version(self._hash)

    def read_range(self, start: int, stop: int) -> bytes:
        """Returns some bytes of the object by a request of their own. Raises RemoteError."""
        info = self.info()
        etag = "" if info is None else info.etag
        return self.origin.objects.bucket.read_range(self.key, start, stop, etag=etag)

    def _hash(self, version: Version, info: ObjectInfo) -> str:
        if (known := self.origin.hash(version)) is not None:
            return known
        self.origin.fetch(self.key, version, info)
        return self.origin.read_hash(version)

    def _of_one_version(self, use: Callable[[Version, ObjectInfo], T]) -> tuple[Version, T]:
        """Returns what `use` gives for the version that the object has; asks again where it was replaced meanwhile."""
        problem: Exception | None = None
        for _ in range(_ATTEMPTS):
            info = self.info()
            if info is None:
                raise FileNotFoundError(2, os.strerror(2), self.url)
            version = version_of(self.url, info)
            try:
                return version, use(version, info)
            # Replaced, removed, or taken by eviction before it was read.
            except (RemoteReplacedError, RemoteMissingError, FileNotFoundError) as err:
                problem = err
                self.origin.objects.forget(self.key)
        raise RemoteError(
            f"{self.url} was replaced each of {_ATTEMPTS} times that it was read; wait until nothing writes to it"
        ) from problem


class _Hashes:
    """Content hashes by version, one record each behind the other; all processes of the node append to the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._found: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()

    def get(self, version: Version) -> str | None:
        with self._lock:
            if version[1:3] not in self._found:
                self._load()
            data = self._found.get(version[1:3])
        record = np.frombuffer(data, _RECORD)[0] if data else None
        if data is None or record is None or xxhash.xxh3_64_intdigest(data[:-8]) != int(record["check"]):
            return None
        return bytes(record["xxh3_128"]).hex()

    def add(self, version: Version, xxh3_128: str) -> None:
        body = np.zeros(1, _RECORD)
        body["digest"], body["size"], body["xxh3_128"] = *version[1:3], np.void(bytes.fromhex(xxh3_128))
        body["check"] = xxhash.xxh3_64_intdigest(body.tobytes()[:-8])
        with contextlib.suppress(OSError):  # a full disk: it is hashed again
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                if not wait_alone(descriptor):
                    return
                size = os.fstat(descriptor).st_size
                if size % _RECORD.itemsize:  # of a writer that was killed
                    os.ftruncate(descriptor, size - size % _RECORD.itemsize)
                os.write(descriptor, body.tobytes())
            finally:
                os.close(descriptor)

    def _load(self) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return
        data = data[: len(data) // _RECORD.itemsize * _RECORD.itemsize]
        records = np.frombuffer(data, _RECORD)
        keys = zip(records["digest"].tolist(), records["size"].tolist(), strict=True)
        for number, key in enumerate(keys):
            self._found[key] = data[number * _RECORD.itemsize : (number + 1) * _RECORD.itemsize]
        self._read += len(data)


@functools.lru_cache(maxsize=64)
def objects_of(root: Url, settings: RemoteConfig, pid: int) -> Objects:  # noqa: ARG001  a fork connects anew
    """Returns what this process knows of a bucket."""
    return Objects(Bucket(root, settings))


@functools.lru_cache(maxsize=256)
def origin_of(folder: str, pid: int) -> Origin:
    """Returns the store behind the folder of a mirror. Raises LookupError where it is none of its node's folder."""
    try:
        mirror = Mirror.of(Path(folder))
    except (CacheCorruptError, OSError) as err:  # a file of that name that says something else
        raise LookupError(folder) from err
    if mirror is None or mirror.settings.folder.absolute() != Path(folder).absolute().parent.parent:
        raise LookupError(folder)
    return Origin(mirror, objects_of(Url(mirror.url.scheme, mirror.url.bucket), mirror.settings, pid))


def forget() -> None:
    """The answers of stores are asked for again by this process."""
    origin_of.cache_clear()
    objects_of.cache_clear()
