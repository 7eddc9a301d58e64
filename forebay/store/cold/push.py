"""A sealed cache to its cold form: arrays to a store or a folder, object by object, the root's zarr.json last.

What identifies the form (`BEGUN`) goes first, where no object has its name: so two caches never mix in one place.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from forebay.config.remote import RemoteConfig
from forebay.errors import ConfigError, RemoteError, RemoteExistsError, RemoteMissingError
from forebay.store.cache import Cache, open_cache
from forebay.store.cold.arrays import BEGUN, ROOT, DamagedError, Mark, decode, encode, mark_of, zarr
from forebay.store.cold.cold_form import ColdPlace, Folder, place_of
from forebay.store.cold.hierarchy import Filled, arrays_of, documents, mark_of_cache, metadata_bytes
from forebay.store.cold.strips import GroupStrips
from forebay.store.key import SHORT
from forebay.store.layout import Array
from forebay.store.metadata import FILE_NAME, check_file
from forebay.store.remote.bucket.bucket import ObjectInfo
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.transfer.proof import Journal, proves
from forebay.store.remote.transfer.tally import Kind, Tally, TransferReport, for_each
from forebay.store.seal import check_shard
from forebay.store.shard import entry_of

LEVEL = 3
"""Of zstd. Level 9 saves 0 to 3 % more and takes three times as long; level 1 is 1.3 to 2.7 times as fast and saves
1 to 7 % less (docs/benchmarks/zarr_2core_202611.md)."""

_MAX_NAMES = 5
"""Objects that a message names."""


def write_zarr(cache: Cache, folder: Path, *, level: int = LEVEL, progress: bool = False) -> TransferReport:
    """Makes a folder the cold form of a cache, and returns what that took; see `push_zarr`."""
    return push_to(Folder(folder.absolute(), RemoteConfig()), cache, level=level, progress=progress)


def push_zarr(
    folder: Path,
    place: str,
    settings: RemoteConfig,
    *,
    level: int = LEVEL,
    verify: bool = False,
    progress: bool = False,
) -> TransferReport:
    """Makes a URL, or a folder, the cold form of a cache, and returns what that took. An interrupted push goes on.

    Every shard is hashed before its values are sent. An object is proved by its etag, and where that says nothing of
    its bytes by reading it back. verify: every object is read back, and what is damaged is sent again. level: of zstd,
    1 to 22. Raises CacheCorruptError for a damaged shard, MissingExtraError without zarr; RemoteExistsError where
    another cache, or anything else, lies at the place; RemoteError where the store does not keep what was sent.
    """
    return push_to(place_of(place, settings), open_cache(folder), level=level, verify=verify, progress=progress)


def push_to(
    place: ColdPlace, cache: Cache, *, level: int = LEVEL, verify: bool = False, progress: bool = False
) -> TransferReport:
    """Makes a place the cold form of a cache, and returns what that took; see `push_zarr`."""
    zarr()
    if not 1 <= level <= 22:
        raise ConfigError(f"level is {level}, wanted 1 to 22; zstd has no other")
    if cache.mirror is not None:
        raise ConfigError(
            f"{cache.folder} is what this node has of {cache.mirror.url}; run: forebay cache pull, and push that"
        )
    arrays = arrays_of(cache)
    mark = mark_of_cache(cache, level=level)
    texts = documents([filled.array for filled in arrays], mark, metadata_bytes(cache))
    items: list[PushedItem] = [Text(name, data) for name, data in texts.items() if name not in (BEGUN, ROOT)]
    checked = _Checked()
    items += [
        ObjectCut(filled, index, mark.level, checked) for filled in arrays for index in range(filled.array.num_shards)
    ]
    sizes = [len(texts[BEGUN]), len(texts[ROOT]), *(item.size_bytes for item in items)]
    with Tally(sizes, label="push", progress=progress) as tally:
        work = _Push(cache, mark, (texts[BEGUN], texts[ROOT]), items, place, tally, verify=verify)
        already_there = work.run()
        target, source = str(place.url), str(cache.folder)
        report = tally.report("push", source=source, target=target, key=cache.key, already_there=already_there)
        return dataclasses.replace(report, stored_bytes=work.stored_bytes)


class PushedItem(Protocol):
    """One object to be."""

    @property
    def name(self) -> str:
        """Its name below the root."""

    @property
    def size_bytes(self) -> int:
        """Bytes of what is in it, before it is compressed."""

    @property
    def order(self) -> tuple[int, str, int]:
        """What is sent first is first here: documents, then arrays in the order of the shards that they are of."""

    def make(self) -> bytes:
        """Returns its bytes."""

    def is_made(self, data: bytes) -> bool:
        """Returns whether these bytes stand for what is to be in it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A document."""

    name: str
    data: bytes

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return len(self.data)

    @property
    def order(self) -> tuple[int, str, int]:
        """Before all arrays."""
        return (-2, self.name, 0)

    def make(self) -> bytes:
        """Returns its bytes."""
        return self.data

    def is_made(self, data: bytes) -> bool:
        """Returns whether these are its bytes."""
        return data == self.data


class ObjectCut:
    """Rows of an array."""

    def __init__(self, filled: Filled, index: int, level: int, checked: _Checked) -> None:
        self.filled, self.array, self.index = filled, filled.array, index
        self.level, self.checked = level, checked
        self.name = filled.array.name(index)
        self.start, self.stop = filled.array.rows(index)
        self.shards = filled.shards(self.start, self.stop)

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return (self.stop - self.start) * self.array.row_bytes

    @property
    def order(self) -> tuple[int, str, int]:
        """After the first of the shards that it is of: so each shard is read from the disk once."""
        return (self.shards[0] if len(self.shards) else -1, self.array.path, self.index)

    def make(self) -> bytes:
        """Returns the object of the rows. Raises CacheCorruptError where a shard that they are of is damaged."""
        return encode(self.array, self._rows(), level=self.level)

    def is_made(self, data: bytes) -> bool:
        """Returns whether an object has these rows, perhaps compressed by another version of zstd."""
        try:
            found = decode(self.array, data, self.index, start=self.start, stop=self.stop)
        except DamagedError:
            return False
        return found.tobytes() == self._rows().tobytes()

    def _rows(self) -> Array:
        if self.filled.strips is not None:
            for shard in self.shards:
                self.checked.require(self.filled.strips, shard)
        return self.filled.read(self.start, self.stop)


class _Push:
    """One push: what its steps share."""

    def __init__(
        self,
        cache: Cache,
        mark: Mark,
        ends: tuple[bytes, bytes],
        items: Sequence[PushedItem],
        place: ColdPlace,
        tally: Tally,
        *,
        verify: bool,
    ) -> None:
        self.cache, self.mark, self.items, self.place = cache, mark, items, place
        self.tally, self.verify = tally, verify
        self.ends = dict(zip((BEGUN, ROOT), ends, strict=True))
        self.known = {*self.ends, *(item.name for item in items)}
        self.identity = xxhash.xxh3_128_hexdigest(str(mark.to_json()).encode())
        where = xxhash.xxh3_64_hexdigest(f"{place.settings.endpoint or ''} {place.url}".encode())
        self.journal = Journal(place.settings.folder / "pushes" / f"{place.url.name}-{where}.zarr.jsonl")
        self.there: dict[str, ObjectInfo] = {}
        self.etags: dict[str, str] = {}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(info.size_bytes for info in self.there.values())

    def run(self) -> bool:
        """Returns whether all was there already."""
        is_sealed = self._is_this(ROOT)
        self._is_this(BEGUN)  # what was begun and is of another cache is named so, and not by its objects
        self.there = self._listed()
        if is_sealed and not self.verify and not self.known - self.there.keys():
            for size_bytes in [*map(len, self.ends.values()), *(item.size_bytes for item in self.items)]:
                self.tally.add("kept", size_bytes)
            return True
        for file, entry in self.cache.files():
            if "/" not in file.place:
                check_file(file, entry, verify=True)
        self._begin()
        items = sorted(self.items, key=lambda item: item.order)
        for_each(self._place, items, num_threads=self.place.settings.max_concurrent)
        self._compare()
        made = not is_sealed and self._create(ROOT)
        self.tally.add("moved" if made else "kept", len(self.ends[ROOT]))
        self.there[ROOT] = self.place.info(ROOT)
        self.journal.remove()
        return not made and not self.tally.files["moved"]

    def _is_this(self, name: str) -> bool:
        """Whether this very form has this document there. Raises RemoteExistsError where another one has."""
        try:
            data = self.place.read(name)
        except RemoteMissingError:
            return False
        found = mark_of(data, self.place.url / name)
        if found == self.mark:
            return True
        if found is None:
            what = "is of another zarr hierarchy"
        elif found.key != self.mark.key:
            what = f"is of {found}, this cache has key {self.mark.key[:SHORT]}"
        elif found.metadata != self.mark.metadata:
            what = f"is of {found}, which was sealed by another build"
        else:
            what = f"is of {found} at level {found.level}, wanted level {self.mark.level}"
        raise RemoteExistsError(f"{self.place.url / name} {what}; use what is there, or push to another place")

    def _listed(self) -> dict[str, ObjectInfo]:
        """What lies there, by name. Raises RemoteExistsError where some of it is of no object of this form."""
        found: dict[str, ObjectInfo] = {}
        foreign: list[str] = []
        for info in self.place.objects():
            found[info.name] = info
            foreign += [] if info.name in self.known else [info.name]
            if len(foreign) > _MAX_NAMES:  # a folder of other things may hold millions
                break
        if foreign:
            names = ", ".join(foreign[:_MAX_NAMES]) + (", and more" if len(foreign) > _MAX_NAMES else "")
            is_cache = FILE_NAME in foreign or self._has(FILE_NAME)
            what = "a cache in its own form" if is_cache else "what is not of the zarr form of this cache"
            raise RemoteExistsError(
                f"{self.place.url} holds {what}: {names}; push {self.cache.folder} to another place, or remove them"
            )
        return found

    def _has(self, name: str) -> bool:
        try:
            self.place.info(name)
        except RemoteMissingError:
            return False
        return True

    def _begin(self) -> None:
        """Puts what identifies the form. Raises RemoteExistsError where that of another one is there."""
        is_there = self._is_this(BEGUN)
        if not is_there:
            if self.there:
                raise RemoteExistsError(
                    f"{self.place.url} has no {BEGUN} and holds {min(self.there)}: a part of a zarr form that nobody "
                    "can name; push to another place, or remove what is there"
                )
            self._create(BEGUN)
        self.tally.add("kept" if is_there else "moved", len(self.ends[BEGUN]))

    def _create(self, name: str) -> bool:
        """Puts a document that says what the form is; whether this push did, and not another one of the same form."""
        try:
            self.place.put(name, self.ends[name], create=True)
        except RemoteExistsError:
            self._is_this(name)
            return False
        if not self._is_this(name):
            raise RemoteError(f"{self.place.url / name} was sent and is not there; run the command again")
        return True

    def _place(self, item: PushedItem) -> None:
        """Makes an item an object, unless it is one."""
        there = self.there.get(item.name)
        if there is not None and not self.verify and self.journal.knows(self._wanted(item), there.etag):
            return self._done(item, there.etag, "kept")
        data = item.make()
        if there is not None and self._is_sent(item, data, there.etag):
            return self._done(item, there.etag, "kept")
        etag = self.place.put(item.name, data)
        if not self._is_sent(item, data, etag):
            raise RemoteError(
                f"{self.place.url / item.name} was sent and is not the {len(data)} bytes that were; run the command "
                "again"
            )
        return self._done(item, etag, "moved")

    def _is_sent(self, item: PushedItem, data: bytes, etag: str) -> bool:
        """Whether the object of this etag is what it is to be: its bytes, or the same values compressed otherwise."""
        if not self.verify and proves(etag, data):
            return True
        found = self.place.read(item.name)
        self.tally.add_read_back(len(found))
        return found == data or item.is_made(found)

    def _done(self, item: PushedItem, etag: str, kind: Kind) -> None:
        self.etags[item.name] = etag
        self.journal.add(self._wanted(item), etag)
        self.tally.add(kind, item.size_bytes)

    def _wanted(self, item: PushedItem) -> WantedFile:
        """What the journal knows an object by: the bytes are a function of the mark and the name."""
        return WantedFile(name=item.name, size_bytes=item.size_bytes, xxh3_128=self.identity)

    def _compare(self) -> None:
        """Raises RemoteError where something is no longer what this push has found or sent."""
        self.there = self._listed()
        for name, sent in self.etags.items():
            found = self.there.get(name)
            if found is None or (sent and found.etag != sent):
                now = "gone" if found is None else f"of etag {found.etag}"
                raise RemoteError(
                    f"{self.place.url / name} was sent with etag {sent} and is {now}: somebody else writes there; run "
                    "the command again when they are done, or push to another place"
                )


class _Checked:
    """Shards that were hashed by this push. Threads share it; each shard is hashed once."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
        self._done: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def require(self, strips: GroupStrips, shard: int) -> None:
        """Raises CacheCorruptError where a shard is not, byte for byte, what its cache says."""
        place = (strips.group, shard)
        with self._lock:
            lock = self._locks[place]
        with lock:
            if place not in self._done:
                check_shard(strips.path(shard), entry_of(strips.table, shard))
                strips.check(shard)
                self._done.add(place)
