"""Objects to a place, each proven: what a push of a cache and a push of its zarr form do alike.

What is there already, by its etag or by reading it back, is not sent again, and what somebody else writes there
meanwhile is seen. What an interrupted push has proven stands in its journal.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from forebay.errors import RemoteError, RemoteExistsError
from forebay.store.remote.bucket.bucket import ObjectInfo, ObjectStore
from forebay.store.remote.carry.tally import Kind, Tally
from forebay.store.remote.node.node import WantedFile

_MAX_NAMES = 5
"""Objects that a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeObject:
    """The object that is sent of an item.

    size_bytes: of the object; None: one of another size may stand for the item too. words: how an error calls its
    bytes. proves: whether an etag proves the object. read_back: reads the object; whether it is right, and its bytes.
    """

    data: Any
    size_bytes: int | None
    words: str
    proves: Callable[[str], bool]
    read_back: Callable[[], tuple[bool, int]]


@dataclass(frozen=True, slots=True)
class PushedItem:
    """One object to be.

    wanted: name, counted bytes, and hash for the journal. make: returns what is sent; CacheCorruptError if damaged.
    """

    wanted: WantedFile
    make: Callable[[], MadeObject]


class Upload:
    """A push into a place; each form is a subclass. known: names of objects to be. there: what was listed last."""

    elsewhere = "another place"

    def __init__(
        self, place: ObjectStore, tally: Tally, known: Collection[str], *, verify: bool, journal_ending: str
    ) -> None:
        self.place, self.tally, self.known, self.verify = place, tally, known, verify
        settings = place.settings
        where = xxhash.xxh3_64_hexdigest(f"{settings.endpoint or ''} {place.url}".encode())
        self.journal = Journal(settings.folder / "pushes" / f"{place.url.name}-{where}{journal_ending}")
        self.there: dict[str, ObjectInfo] = {}
        self._sent: dict[str, tuple[int, str]] = {}

    def is_this(self, name: str) -> bool:
        """Whether this very push's document of the name is there; RemoteExistsError for that of another one."""
        raise NotImplementedError

    def foreign(self, shown: str) -> str:
        """Returns the error for objects that are none of this push."""
        raise NotImplementedError

    def list_there(self) -> None:
        """Looks at what lies at the place. Raises RemoteExistsError where some of it is no object of this push."""
        found: dict[str, ObjectInfo] = {}
        foreign: list[str] = []
        for info in self.place.objects():
            found[info.name] = info
            foreign += [] if info.name in self.known else [info.name]
            if len(foreign) > _MAX_NAMES:  # a folder of other things may hold millions
                break
        if foreign:
            shown = ", ".join(foreign[:_MAX_NAMES]) + (", and more" if len(foreign) > _MAX_NAMES else "")
            raise RemoteExistsError(self.foreign(shown))
        self.there = found

    def keep(self, item: PushedItem) -> None:
        """Makes an item an object, unless it is one."""
        there = self.there.get(item.wanted.name)
        if there is not None and not self.verify and self.journal.knows(item.wanted, there.etag):
            self.done(item, there.size_bytes, there.etag, "kept")
        else:
            self.bring(item, there)

    def bring(self, item: PushedItem, there: ObjectInfo | None) -> None:
        """Sends an item, unless what is there is the very object."""
        made = item.make()
        if not self.is_kept(item, made, there):
            self.send(item, made)

    def is_kept(self, item: PushedItem, made: MadeObject, there: ObjectInfo | None) -> bool:
        """Whether what is there is the very object; it is counted then."""
        if there is None or made.size_bytes not in (None, there.size_bytes) or not self._is_right(made, there.etag):
            return False
        self.done(item, there.size_bytes, there.etag, "kept")
        return True

    def send(self, item: PushedItem, made: MadeObject, *, create: bool = False) -> None:
        """Puts an object, and proves it. Raises RemoteExistsError where `create` meets one, RemoteError."""
        name = item.wanted.name
        etag = self.place.put(name, made.data, create=create)
        if not self._is_right(made, etag):
            raise RemoteError(f"{self.place.url / name} was sent and is not the {made.words}; run the command again")
        size = len(made.data) if isinstance(made.data, bytes) else item.wanted.size_bytes
        self.done(item, size, etag, "moved")

    def _is_right(self, made: MadeObject, etag: str) -> bool:
        if not self.verify and made.proves(etag):
            return True
        is_right, size_bytes = made.read_back()
        self.tally.add_read_back(size_bytes)
        return is_right

    def done(self, item: PushedItem, size_bytes: int, etag: str, kind: Kind) -> None:
        """Counts an object that is there and proven."""
        self._sent[item.wanted.name] = size_bytes, etag
        self.journal.add(item.wanted, etag)
        self.tally.add(kind, item.wanted.size_bytes)

    def compare(self) -> None:
        """Raises RemoteError where something at the place is no longer what this push has found or sent."""
        self.list_there()
        for name, (size, etag) in self._sent.items():
            found = self.there.get(name)
            if found is None or found.size_bytes != size or (etag and found.etag != etag):
                now = "gone" if found is None else f"{found.size_bytes} bytes of etag {found.etag}"
                raise RemoteError(
                    f"{self.place.url / name} was {size} bytes of etag {etag} and is {now}: somebody else writes "
                    f"there; run the command again when they are done, or push to {self.elsewhere}"
                )

    def create(self, name: str, data: bytes) -> bool:
        """Puts a document that says what lies here; whether this push did, and not another one of the same cache."""
        try:
            self.place.put(name, data, create=True)
        except RemoteExistsError:
            self.is_this(name)
            return False
        if not self.is_this(name):
            raise RemoteError(f"{self.place.url / name} was sent and is not there; run the command again")
        return True


class Journal:
    """Objects that were proven, by their etags: a push that was interrupted does not prove them again.

    A file of JSON lines beside the node's cache. Where it cannot be written or read, more is read again, and no more.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[tuple[str, str], str] = {}
        with contextlib.suppress(OSError):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a process that was killed
                    entry = json.loads(line)
                    self._known[entry["name"], entry["xxh3_128"]] = entry["etag"]

    def knows(self, wanted: WantedFile, etag: str) -> bool:
        """Returns whether an object of this etag was proven to have the bytes that are wanted."""
        return bool(etag) and self._known.get((wanted.name, wanted.xxh3_128)) == etag

    def add(self, wanted: WantedFile, etag: str) -> None:
        """Keeps that an object of this etag has the bytes that are wanted."""
        entry = {"name": wanted.name, "xxh3_128": wanted.xxh3_128, "etag": etag}
        with self._lock, contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(b"%s\n" % json.dumps(entry).encode("ascii"))

    def remove(self) -> None:
        """Forgets all of it: the push is done."""
        with contextlib.suppress(OSError):
            self._path.unlink()
