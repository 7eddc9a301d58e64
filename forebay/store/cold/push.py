"""A sealed cache to its cold form: arrays to a store or a folder, object by object, the root's zarr.json last.

What identifies the form (`BEGUN`) goes first, where no object has its name: so two caches never mix in one place.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from forebay.config.remote import RemoteConfig
from forebay.errors import ConfigError, RemoteExistsError
from forebay.store.cache import Cache, open_cache
from forebay.store.cold.arrays import BEGUN, ROOT, DamagedError, Mark, decode, encode, mark_of, zarr
from forebay.store.cold.hierarchy import Filled, arrays_of, documents, mark_of_cache
from forebay.store.cold.strips import GroupStrips
from forebay.store.key import SHORT
from forebay.store.layout import Array
from forebay.store.metadata import FILE_NAME, check_file
from forebay.store.remote.bucket.object_store import FolderStore, ObjectStore, find, find_bytes, object_store
from forebay.store.remote.carry.proof import proves
from forebay.store.remote.carry.tally import Tally, TransferReport, for_each
from forebay.store.remote.carry.transfer import metadata_bytes
from forebay.store.remote.carry.upload import MadeObject, PushedItem, Upload
from forebay.store.remote.node.node import WantedFile
from forebay.store.seal import check_shard
from forebay.store.shard import entry_of

LEVEL = 3
"""Of zstd. Level 9 saves 0 to 3 % more and takes three times as long; level 1 is 1.3 to 2.7 times as fast and saves
1 to 7 % less (docs/benchmarks/zarr_2core_202611.md)."""


def write_zarr(cache: Cache, folder: Path, *, level: int = LEVEL, progress: bool = False) -> TransferReport:
    """Makes a folder the cold form of a cache, and returns what that took; see `push_zarr`."""
    return push_to(FolderStore(folder.absolute(), RemoteConfig()), cache, level=level, progress=progress)


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
    return push_to(object_store(place, settings), open_cache(folder), level=level, verify=verify, progress=progress)


def push_to(
    place: ObjectStore, cache: Cache, *, level: int = LEVEL, verify: bool = False, progress: bool = False
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
    ends = {name: texts.pop(name) for name in (BEGUN, ROOT)}
    # The bytes of an object are a function of the form and of its name.
    named = partial(WantedFile, xxh3_128=xxh3_128_hexdigest(str(mark.to_json()).encode()))
    items = []
    for name, data in texts.items():
        make = partial(_made, place, name, partial(bytes, data), data.__eq__)
        items.append(PushedItem(named(name=name, size_bytes=len(data)), make))
    checked = _Checked()
    cuts = [_Cut(filled, i, level, checked) for filled in arrays for i in range(filled.array.num_shards)]
    # In the order of the shards that they are of, so that each shard is read from the disk once.
    for cut in sorted(cuts, key=lambda cut: cut.order):
        make = partial(_made, place, cut.name, cut.encoded, cut.is_made)
        items.append(PushedItem(named(name=cut.name, size_bytes=cut.size_bytes), make))
    sizes = [*map(len, ends.values()), *(item.wanted.size_bytes for item in items)]
    with Tally(sizes, label="push", progress=progress) as tally:
        work = _ZarrUpload(cache, mark, ends, items, place, tally, verify=verify)
        already_there = work.run()
        report = tally.report("push", source=cache.folder, target=place.url, key=cache.key, already_there=already_there)
        return dataclasses.replace(report, stored_bytes=work.stored_bytes)


def _made(place: ObjectStore, name: str, encoded: Callable[[], bytes], is_made: Callable[[bytes], bool]) -> MadeObject:
    """Returns what is sent as an object. is_made: whether other bytes, compressed otherwise, have the same values."""
    data = encoded()

    def read_back() -> tuple[bool, int]:
        found = place.read(name)
        return found == data or is_made(found), len(found)

    words, proves_data = f"{len(data)} bytes that were", partial(proves, data=data)
    return MadeObject(data=data, size_bytes=None, words=words, proves=proves_data, read_back=read_back)


class _Cut:
    """Rows of an array, which one object holds."""

    def __init__(self, filled: Filled, index: int, level: int, checked: _Checked) -> None:
        self.filled, self.array, self.index = filled, filled.array, index
        self.level, self.checked, self.name = level, checked, filled.array.name(index)
        self.start, self.stop = filled.array.rows(index)
        self.shards = filled.shards(self.start, self.stop)
        self.size_bytes = (self.stop - self.start) * self.array.row_bytes
        self.order = (self.shards[0] if len(self.shards) else -1, self.array.path, index)

    def encoded(self) -> bytes:
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


class _ZarrUpload(Upload):
    """One push of the zarr form. ends: the documents that say what it is, by name: BEGUN goes first, ROOT last."""

    def __init__(
        self,
        cache: Cache,
        mark: Mark,
        ends: Mapping[str, bytes],
        items: Sequence[PushedItem],
        place: ObjectStore,
        tally: Tally,
        *,
        verify: bool,
    ) -> None:
        known = {*ends, *(item.wanted.name for item in items)}
        super().__init__(place, tally, known, verify=verify, journal_ending=".zarr.jsonl")
        self.cache, self.mark, self.items, self.ends = cache, mark, items, ends

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(info.size_bytes for info in self.there.values())

    def run(self) -> bool:
        """Returns whether all was there already."""
        is_sealed = self.is_this(ROOT)
        self.is_this(BEGUN)  # what was begun and is of another cache is named so, and not by its objects
        self.list_there()
        if is_sealed and not self.verify and not set(self.known) - self.there.keys():
            self.tally.keep_all()
            return True
        for file, entry in self.cache.files():
            if "/" not in file.place:
                check_file(file, entry, verify=True)
        self._begin()
        for_each(self.keep, self.items, num_threads=self.place.settings.max_concurrent)
        self.compare()
        made = not is_sealed and self.create(ROOT, self.ends[ROOT])
        self.tally.add("moved" if made else "kept", len(self.ends[ROOT]))
        self.there[ROOT] = self.place.info(ROOT)
        self.journal.remove()
        return not made and not self.tally.files["moved"]

    def is_this(self, name: str) -> bool:
        """Whether this very form has this document there. Raises RemoteExistsError where another one has."""
        data = find_bytes(self.place, name)
        found = None if data is None else mark_of(data, self.place.url / name)
        if data is None or found == self.mark:
            return data is not None
        if found is None:
            what = "is of another zarr hierarchy"
        elif found.key != self.mark.key:
            what = f"is of {found}, this cache has key {self.mark.key[:SHORT]}"
        elif found.metadata != self.mark.metadata:
            what = f"is of {found}, which was sealed by another build"
        else:
            what = f"is of {found} at level {found.level}, wanted level {self.mark.level}"
        raise RemoteExistsError(f"{self.place.url / name} {what}; use what is there, or push to another place")

    def foreign(self, shown: str) -> str:
        """Returns the error for objects that are none of this form."""
        is_cache = find(self.place, FILE_NAME) is not None
        what = "a cache in its own form" if is_cache else "what is not of the zarr form of this cache"
        return f"{self.place.url} holds {what}: {shown}; push {self.cache.folder} to another place, or remove them"

    def _begin(self) -> None:
        """Puts what identifies the form. Raises RemoteExistsError where that of another one is there."""
        is_there = self.is_this(BEGUN)
        if not is_there:
            if self.there:
                raise RemoteExistsError(
                    f"{self.place.url} has no {BEGUN} and holds {min(self.there)}: a part of a zarr form that nobody "
                    "can name; push to another place, or remove what is there"
                )
            self.create(BEGUN, self.ends[BEGUN])
        self.tally.add("kept" if is_there else "moved", len(self.ends[BEGUN]))


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
