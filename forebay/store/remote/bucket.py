"""One place of a store: objects are listed, read and put by names below it. Its errors are forebay's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url
from forebay.errors import MissingExtraError, RemoteError, RemoteExistsError, RemoteMissingError

CHUNK = 4 * 1024 * 1024
"""Bytes of a stream that are handed on at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """What a store says of an object: its name below the bucket's URL, its size, its etag, its last change in ns."""

    name: str
    size_bytes: int
    etag: str
    modified_ns: int


class Bucket:
    """The objects below a URL. Threads may share it; a pickle connects anew."""

    def __init__(self, url: Url, settings: RemoteConfig) -> None:
        """Asks nothing yet."""
        self.url, self.settings = url, settings

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.url, self.settings)

    @cached_property
    def _store(self) -> Any:
        try:
            import obstore.store as stores
        except ImportError as err:
            raise MissingExtraError(
                f"{self.url} needs obstore, which is not installed; run: pip install 'forebay[remote]'"
            ) from err
        settings, options = self.settings, self._client_options()
        retries = {"max_retries": settings.retries, "retry_timeout": timedelta(seconds=settings.timeout_s)}
        common: dict[str, Any] = {"client_options": options, "retry_config": retries}
        if self.url.scheme in ("http", "https"):
            return stores.HTTPStore.from_url(f"{self.url.scheme}://{self.url.bucket}", **common)
        found: dict[str, Any] = {"skip_signature": True} if settings.anonymous else {}
        if settings.endpoint is not None:
            found["endpoint"] = settings.endpoint
        if self.url.scheme == "s3":
            if settings.region is not None:
                found["region"] = settings.region
            return stores.S3Store(self.url.bucket, **found, **common)
        if self.url.scheme == "gs":
            return stores.GCSStore(self.url.bucket, **found, **common)
        return stores.AzureStore(self.url.bucket, **found, **common)

    def _client_options(self) -> dict[str, Any]:
        return {"allow_http": True, "timeout": timedelta(seconds=self.settings.timeout_s)}

    def info(self, name: str) -> ObjectInfo:
        """Returns what the store says of an object. Raises RemoteMissingError, RemoteError."""
        import obstore

        with self._named(name):
            return self._info(obstore.head(self._store, self._key(name)))

    def read(self, name: str) -> bytes:
        """Returns a whole object, a small one. Raises RemoteMissingError, RemoteError."""
        import obstore

        with self._named(name):
            return bytes(obstore.get(self._store, self._key(name)).bytes())

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` to `stop` of an object. Raises RemoteMissingError, RemoteError."""
        import obstore

        with self._named(name):
            return bytes(obstore.get_range(self._store, self._key(name), start=start, end=stop))

    def stream(self, name: str, *, start: int = 0, etag: str = "") -> Iterator[bytes]:
        """Yields the bytes of an object from `start` on, in pieces. Raises RemoteMissingError, RemoteError.

        etag: the object is refused where it has another one by now.
        """
        import obstore

        with self._named(name):
            options: dict[str, Any] = {"range": {"offset": start}} if start else {}
            if etag:
                options["if_match"] = etag
            yield from obstore.get(self._store, self._key(name), options=options).stream(CHUNK)

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yields every object below a folder, in the order of their names. Raises RemoteError."""
        import obstore

        with self._named(prefix):
            for batch in obstore.list(self._store, prefix=self._key(prefix) or None, chunk_size=1000):
                yield from map(self._info, batch)

    def folders(self, prefix: str = "") -> list[str]:
        """Returns the names of the folders directly below one. Raises RemoteError."""
        import obstore

        with self._named(prefix):
            found = obstore.list_with_delimiter(self._store, prefix=self._key(prefix) or None)
            return sorted(self._name(path) for path in found["common_prefixes"])

    def level(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Returns the objects and the names of the folders directly below a folder. Raises RemoteError."""
        import obstore

        with self._named(prefix):
            found = obstore.list_with_delimiter(self._store, prefix=self._key(prefix) or None)
            return list(map(self._info, found["objects"])), sorted(map(self._name, found["common_prefixes"]))

    def put(self, name: str, data: bytes | Path, *, create: bool = False) -> str:
        """Puts an object, of bytes or of a file, and returns its etag.

        create: an object that is there already is a RemoteExistsError.
        """
        import obstore

        with self._named(name):
            put = obstore.put(self._store, self._key(name), data, mode="create" if create else "overwrite")
            return str(put["e_tag"] or "")

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self.url.key, name) if part)

    def _name(self, key: str) -> str:
        return key.removeprefix(self.url.key).lstrip("/")

    def _info(self, found: Any) -> ObjectInfo:
        modified_ns = int(found["last_modified"].timestamp() * 1e9)
        name = self._name(found["path"])
        return ObjectInfo(name=name, size_bytes=found["size"], etag=found["e_tag"] or "", modified_ns=modified_ns)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Makes the store's errors forebay's, with bucket and key."""
        import obstore.exceptions as found

        where = self.url / name if name else self.url
        try:
            yield
        except FileNotFoundError as err:
            raise RemoteMissingError(f"{where} is not there; name another URL") from err
        except found.AlreadyExistsError as err:
            raise RemoteExistsError(f"{where} is there already") from err
        except found.BaseError as err:
            raise RemoteError(f"{where}: {err}") from err
