"""One place of a store: objects are listed, read and put by names below it. Its errors are forebay's.

A place of a store and a folder of this machine are asked in the same words.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from forebay.config.remote import LONGEST_PAUSE_S, RemoteConfig, Url, is_url, parse_url
from forebay.errors import (
    ConfigError,
    ForebayError,
    MissingExtraError,
    RemoteError,
    RemoteExistsError,
    RemoteMissingError,
)
from forebay.extras import install_line
from forebay.store.files import TEMPORARY_MARK, sweep, temporary_name, write_bytes
from forebay.store.remote.bucket import beside
from forebay.store.remote.bucket.access import check_resolved, client_options, decide, secrets, store_options
from forebay.store.remote.bucket.refusal import EndedEarlyError, Refusal, error_of, exists, read_refusal, replaced

CHUNK = 4 * 1024 * 1024
"""Bytes of a stream that are handed on at once."""
PART = 8 * 1024 * 1024
"""Bytes above which a file is put in parts, of at least so many bytes each."""
_MAX_PARTS, _PARTS_AT_ONCE = 9_000, 4
_SLOWEST_PUT = 1_000_000
"""Bytes per second that a link takes at least. While a part is sent no byte comes back, so a put waits longer."""
MAX_COPY = 5 * 1024**3
"""Bytes of the largest object that S3 copies by one request, the only one that obstore makes."""
_REMOVED_AT_ONCE = 1_000
_COPY_S = 300.0
"""Seconds that a store may take for a large copy: no byte comes back meanwhile."""
_PAUSE_S = 0.25
_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """The facts of a store about an object: its name below the bucket's URL, its size, etag, last change in ns."""

    name: str
    size_bytes: int
    etag: str
    modified_ns: int

    @property
    def quoted_etag(self) -> str:
        """The etag as the answer to GET has it: a listing of Azure has no quotes."""
        return self.etag if '"' in self.etag or not self.etag else f'"{self.etag}"'


def part_bytes(size_bytes: int) -> int:
    """Returns how large the parts are in which a file of this size is put; a file that is no larger is put at once."""
    return max(PART, size_bytes // _MAX_PARTS)


def _anywhere(method: Callable[P, T]) -> Callable[P, T]:
    """Makes a method work in a fork too, also one that yields."""
    is_many = inspect.isgeneratorfunction(method)

    @functools.wraps(method)
    def anywhere(*args: P.args, **options: P.kwargs) -> T:
        if not beside.is_cut_off():
            return method(*args, **options)
        found = beside.ask(args[0], method.__name__, args[1:], options)
        if is_many:
            return cast(T, found)
        (one,) = found
        return cast(T, one)

    return anywhere


class Bucket:
    """The objects below a URL. Threads may share it; a pickle connects anew; a fork asks through a helper process.

    A request that gets no answer, no further byte or one of the errors that pass (408, 429, 5xx, SlowDown) is made
    again, `retries` times, after pauses that grow from 0.25 to 15 s and are no longer than `timeout_s`. The count
    begins anew where 4 MiB of a body came since. So no method is silent for longer than `(retries + 1) *
    timeout_s`, and for each of these requests 10 s to connect and a pause. A put of more than 1 MB has 34 s more each.
    A listing whose pages stay empty ends with an error after `RemoteConfig.patience_s`.
    """

    def __init__(self, url: Url, settings: RemoteConfig) -> None:
        """Asks nothing yet. Raises ConfigError for an address that would get credentials only a config names."""
        self.url, self.settings = url, settings
        self._access = decide(url, settings)
        self._stores: dict[tuple[int, float], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.url, self.settings)

    @_anywhere
    def info(self, name: str) -> ObjectInfo:
        """Returns what the store says of an object. Raises RemoteMissingError, RemoteError."""
        return self._info(self._asked(name, lambda: _obstore().head(self._store(), self._key(name))))

    def read(self, name: str) -> bytes:
        """Returns a whole object, a small one. Raises RemoteMissingError, RemoteError."""
        return b"".join(self.stream(name))

    def read_range(self, name: str, start: int, stop: int, *, etag: str = "") -> bytes:
        """Returns all bytes from `start` to `stop` of an object, of the version of `etag`; raises as `stream` does."""
        return b"".join(self.stream(name, start=start, stop=stop, etag=etag)) if stop > start else b""

    @_anywhere
    def stream(self, name: str, *, start: int = 0, stop: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Yields the bytes of an object from `start` to `stop` or its end, in pieces, all of the version of `etag`.

        A body that breaks off goes on where it was. Raises RemoteMissingError, RemoteReplacedError, RemoteError.
        """
        at, tries, first, end = start, 0, None, 0
        while True:
            before = at
            try:
                found = self._get(name, at, stop, etag)
                first = self._same(name, found.meta, first, etag)
                etag = etag or str(first["e_tag"] or "")
                end = self._end(name, first["size"], stop)
                for piece in found.stream(CHUNK):
                    at += len(piece)
                    yield piece
                if at == end:
                    return
                raise EndedEarlyError(f"{at} bytes of {end}")
            except _errors() as err:
                caught = err
            tries = self._again(name, caught, 0 if at - before >= CHUNK else tries, start=at, stop=end, etag=etag)

    @_anywhere
    def objects(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yields every object below a folder, by name, from behind `after` on; keeps none. Raises RemoteError."""
        last, tries = "/".join(part for part in (self.url.key, after) if part) if after else None, 0
        while True:
            try:
                # 1000 is what stores give at once.
                pages = _obstore().list(self._store(), self._key(prefix) or None, offset=last, chunk_size=1000)
                while batch := self._listed(prefix, functools.partial(anext, pages, None)):
                    yield from map(self._info, batch)
                    last, tries = batch[-1]["path"], 0
                return
            except _errors() as err:
                caught = err
            tries = self._again(prefix, caught, tries)

    @_anywhere
    def level(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Returns the objects and the names of the folders directly below a folder. Raises RemoteError."""
        ask = functools.partial(_obstore().list_with_delimiter_async, self._store(), self._key(prefix) or None)
        found = self._asked(prefix, lambda: self._listed(prefix, ask))
        return list(map(self._info, found["objects"])), sorted(map(self._name, found["common_prefixes"]))

    @_anywhere
    def put(self, name: str, data: bytes | Path, *, create: bool = False) -> str:
        """Puts an object, of bytes or of a file, and returns its etag. The store holds all of these bytes then.

        create: an object that is there already is a RemoteExistsError; such an object is small, it is put at once.
        """
        if create:
            return self._create(name, data.read_bytes() if isinstance(data, Path) else data)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        etag = self._put(name, data, size)
        if size <= PART:
            content = data.read_bytes() if isinstance(data, Path) else data
            if etag.strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest():
                return etag
        # The etag tells nothing; requests are signed with a hash of their bytes, so only the size is left.
        if (found := self.info(name).size_bytes) != size:
            raise RemoteError(f"{self._where(name)} has {found} bytes, {size} were put; put it again")
        return etag

    @_anywhere
    def copy(self, source: Url, name: str, *, size_bytes: int) -> ObjectInfo:
        """Makes an object a copy of one of the same bucket, in the store; returns what that says of the copy.

        size_bytes: of the source, at most MAX_COPY. Raises RemoteMissingError where it is not there, RemoteError.
        """
        store = self._store(put_s=_COPY_S if size_bytes > PART else 0.0)
        try:
            self._asked(name, lambda: _obstore().copy(store, source.key, self._key(name)))
        except RemoteMissingError as err:
            raise RemoteMissingError(f"{source} is not there, and was to be copied to {self._where(name)}") from err
        return self.info(name)

    @_anywhere
    def remove(self, names: Sequence[str]) -> None:
        """Makes sure that objects are not there. Raises RemoteError."""
        for start in range(0, len(names), _REMOVED_AT_ONCE):
            keys = [self._key(name) for name in names[start : start + _REMOVED_AT_ONCE]]
            with contextlib.suppress(RemoteMissingError):  # some stores say so, others do not
                self._asked("", functools.partial(_obstore().delete, self._store(), keys))

    def _get(self, name: str, start: int, stop: int | None, etag: str) -> Any:
        options: dict[str, Any] = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        if etag and not etag.startswith("W/"):  # a weak one never matches
            options["if_match"] = etag
        return _obstore().get(self._store(), self._key(name), options=options)

    def _same(self, name: str, meta: Any, first: Any, etag: str) -> Any:
        """Returns what the first answer said. Raises RemoteReplacedError where another version answers now."""
        wanted, found = etag or (first and first["e_tag"]) or "", meta["e_tag"] or ""
        is_another = first is not None and (meta["size"], meta["last_modified"]) != (
            first["size"],
            first["last_modified"],
        )
        if (wanted and found != wanted) or (is_another and not wanted):
            raise replaced(self._where(name), wanted=wanted or f"that of {first}", found=found)
        return first or meta

    def _end(self, name: str, size: int, stop: int | None) -> int:
        if stop is not None and stop > size:
            raise RemoteError(
                f"{self._where(name)} has {size} bytes, and byte {stop} was asked for; check what names it"
            )
        return size if stop is None else stop

    def _put(self, name: str, data: bytes | Path, size: int) -> str:
        part = part_bytes(size)
        under_way = 0 if size < _SLOWEST_PUT else part * _PARTS_AT_ONCE
        store = self._store(retries=self.settings.retries, put_s=under_way / _SLOWEST_PUT)
        try:
            put = _obstore().put(store, self._key(name), data, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)
            return str(put["e_tag"] or "")
        except _errors() as err:
            caught = err
        raise error_of(self._refusal(caught), self._where(name), self._access, tries=self.settings.retries + 1)

    def _create(self, name: str, data: bytes) -> str:
        tries = 0
        while True:
            try:
                return str(_obstore().put(self._store(), self._key(name), data, mode="create")["e_tag"] or "")
            except _errors() as err:
                caught = err
            if isinstance(caught, _obstore().exceptions.AlreadyExistsError):
                # A request whose answer got lost may have made the object.
                if tries and self.read(name) == data:
                    return self.info(name).etag
                raise exists(self._where(name))
            tries = self._again(name, caught, tries)

    def _listed(self, name: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Returns a part of a listing. Of a store that gives one empty page after the other obstore asks for ever."""
        import asyncio  # not at import: a look at this machine asks no store

        patience_s = self.settings.patience_s

        async def bounded() -> T:
            return await asyncio.wait_for(ask(), patience_s)

        with ThreadPoolExecutor(1) as thread, contextlib.suppress(TimeoutError):  # a notebook has a loop in its own
            return thread.submit(asyncio.run, bounded()).result()
        raise RemoteError(
            f"{self._where(name)}: no name and no end of its listing in {patience_s:g} s, only page after page "
            "without any; name a URL below, or set remote.timeout_s higher",
            code="FB607",
        )

    def _asked(self, name: str, ask: Callable[[], T]) -> T:
        tries = 0
        while True:
            try:
                return ask()
            except _errors() as err:
                caught = err
            tries = self._again(name, self._told(name, caught), tries)

    def _told(self, name: str, err: Exception) -> Exception:
        """Returns an error that says more: the answer to HEAD has no body, so a byte is asked for."""
        refusal = self._refusal(err)
        if refusal.status != 403 or refusal.code or not name:
            return err
        try:
            self._get(name, 0, 1, "")
        except _errors() as more:
            return more if self._refusal(more).status == 403 else err
        return err

    def _again(self, name: str, err: Exception, tries: int, *, start: int = 0, stop: int = 0, etag: str = "") -> int:
        """Waits and returns how often the request was made again. Raises forebay's error where that is of no use.

        start: the byte that was reached. stop: the one that the body was to end at, 0 where no answer came.
        Is called outside of `except`: the text of the store's own error may hold a signed URL or a token, so that it
        must not become the context of another error.
        """
        refusal, where = self._refusal(err).reached(start, stop), self._where(name)
        if refusal.status == 412:
            raise replaced(where, wanted=etag, found=self._stored(name).etag)
        if refusal.status == 416:
            size = self._stored(name).size_bytes
            raise RemoteError(
                f"{where} has {size} bytes, and those from {start} on were asked for; check what names it"
            )
        if not refusal.may_pass or tries >= self.settings.retries:
            raise error_of(refusal, where, self._access, tries=tries + 1)
        pause_s = min(_PAUSE_S * 2**tries, LONGEST_PAUSE_S, self.settings.timeout_s) * random.uniform(0.5, 1.0)
        _log.warning(
            "%s: %s; again from byte %d in %.1f s (%d of %d)",
            where,
            refusal.words,
            start,
            pause_s,
            tries + 1,
            self.settings.retries,
        )
        time.sleep(pause_s)
        return tries + 1

    def _stored(self, name: str) -> ObjectInfo:
        """Returns what the store says of an object if it says it at once, for an error's text."""
        try:
            return self._info(_obstore().head(self._store(), self._key(name)))
        except _errors():
            return ObjectInfo(name=name, size_bytes=0, etag="", modified_ns=0)

    def _refusal(self, err: Exception) -> Refusal:
        if isinstance(err, ForebayError):  # a ConfigError is a ValueError, and some RemoteErrors are FileNotFoundErrors
            raise err
        return read_refusal(err, timeout_s=self.settings.timeout_s, secrets=secrets(self._access))

    def _store(self, *, retries: int = 0, put_s: float = 0.0) -> Any:
        """Returns obstore's store, which repeats puts alone. put_s: seconds that what is put at once takes to send."""
        found = self._stores.get((retries, put_s))
        if found is None:
            found = self._stores[retries, put_s] = self._connected(retries, self.settings.timeout_s + put_s)
        return found

    def _connected(self, retries: int, timeout_s: float) -> Any:
        stores = _obstore().store
        if self._access.endpoint is not None:
            check_resolved(self._access.endpoint)
        beside.threads_start()
        options = store_options(self.url, self._access)
        common: dict[str, Any] = {
            "client_options": client_options(self._access, timeout_s=timeout_s),
            "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=(retries + 1) * timeout_s)},
        }
        if self.url.is_web:
            return stores.HTTPStore.from_url(f"{self.url.scheme}://{self.url.bucket}", **common)
        kinds = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
        return kinds[self.url.scheme](self.url.bucket, **options, **common)

    def _where(self, name: str) -> Url:
        return self.url / name.rstrip("/") if name else self.url

    def _key(self, name: str) -> str:
        return self._where(name).key

    def _name(self, key: str) -> str:
        return key.removeprefix(self.url.key).lstrip("/")

    def _info(self, found: Any) -> ObjectInfo:
        modified_ns = int(found["last_modified"].timestamp() * 1e9)
        name = self._name(found["path"])
        return ObjectInfo(name=name, size_bytes=found["size"], etag=found["e_tag"] or "", modified_ns=modified_ns)


def _obstore() -> Any:
    """Returns the module, which is an extra. Raises MissingExtraError."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as err:
        raise MissingExtraError(
            f"a URL of a store needs obstore, which is not installed; run: {install_line('remote')}"
        ) from err
    return obstore


def _errors() -> tuple[type[Exception], ...]:
    return _obstore().exceptions.BaseError, FileNotFoundError, ValueError, EndedEarlyError


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
