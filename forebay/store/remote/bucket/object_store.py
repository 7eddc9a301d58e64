"""Where objects lie: a place of a store or a folder of this machine, asked in the same words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from forebay.config.remote import RemoteConfig, Url, is_url, parse_url
from forebay.errors import ConfigError, RemoteExistsError, RemoteMissingError
from forebay.store.files import TEMPORARY_MARK, sweep, temporary_name, write_bytes
from forebay.store.remote.bucket.bucket import Bucket, ObjectInfo


class ObjectStore(Protocol):
    """Objects by name; `Bucket` says what each method does, and `settings` how many threads may ask at once."""

    @property
    def url(self) -> Url | Path:
        """The name of the place; `url / name` is the place of an object."""

    settings: RemoteConfig

    def info(self, name: str) -> ObjectInfo:
        """Returns what is known of an object. Raises RemoteMissingError."""

    def read(self, name: str) -> bytes:
        """Returns a whole object. Raises RemoteMissingError."""

    def put(self, name: str, data: bytes, *, create: bool = False) -> str:
        """Puts an object, and returns its etag. Raises RemoteExistsError where `create` meets one."""

    def objects(self) -> Iterator[ObjectInfo]:
        """Yields every object."""


def object_store(text: str | Path, settings: RemoteConfig) -> ObjectStore:
    """Returns the place that a URL or a path names."""
    return Bucket(parse_url(str(text)), settings) if is_url(str(text)) else FolderStore(Path(text).absolute(), settings)


def find(place: ObjectStore, name: str) -> ObjectInfo | None:
    """Returns what is known of an object, None where there is none."""
    try:
        return place.info(name)
    except RemoteMissingError:
        return None


def find_bytes(place: ObjectStore, name: str) -> bytes | None:
    """Returns a whole object, None where there is none."""
    try:
        return place.read(name)
    except RemoteMissingError:
        return None


class FolderStore:
    """A folder of this machine. An object is a file, which is durable when it has its name."""

    def __init__(self, folder: Path, settings: RemoteConfig) -> None:
        """Raises ConfigError where something else has the name."""
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file, wanted a folder; name another place")
        self.url, self.settings = folder, settings
        self._made: set[Path] = set()

    def info(self, name: str) -> ObjectInfo:
        """Returns what is known of a file; its etag is its size and the time of its last change."""
        with self._missing(name):
            found = (self.url / name).stat()
        etag = f"{found.st_size}-{found.st_mtime_ns}"
        return ObjectInfo(name=name, size_bytes=found.st_size, etag=etag, modified_ns=found.st_mtime_ns)

    def read(self, name: str) -> bytes:
        """Returns a whole file."""
        with self._missing(name):
            return (self.url / name).read_bytes()

    @contextlib.contextmanager
    def _missing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as err:
            raise RemoteMissingError(f"{self.url / name} is missing") from err

    def put(self, name: str, data: bytes, *, create: bool = False) -> str:
        """Makes a file, complete or absent, and returns its etag."""
        path = self.url / name
        if path.parent not in self._made:
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep(path.parent)
            self._made.add(path.parent)
        if not create:
            write_bytes(path, data)
            return self.info(name).etag
        aside = temporary_name(path)
        try:
            write_bytes(aside, data)
            os.link(aside, path)
        except FileExistsError as err:
            raise RemoteExistsError(f"{path} is there already") from err
        finally:
            aside.unlink(missing_ok=True)
        return self.info(name).etag

    def objects(self) -> Iterator[ObjectInfo]:
        """Yields every file but those that are being written."""
        for path in sorted(self.url.rglob("*")):
            if TEMPORARY_MARK not in path.name and not path.is_dir():
                with contextlib.suppress(RemoteMissingError):  # another push has put another in its place
                    yield self.info(path.relative_to(self.url).as_posix())
