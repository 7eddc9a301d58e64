"""A sealed cache to its cold form, a zarr hierarchy: arrays object by object, the root's zarr.json last.

What identifies the form (`BEGUN`) goes first, where no object has its name: so two caches never mix in one place.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash
from xxhash import xxh3_128_hexdigest

from forebay.config.remote import RemoteConfig
from forebay.errors import CacheCorruptError, CacheMismatchError, ConfigError, RemoteExistsError
from forebay.store.cache import Cache, open_cache
from forebay.store.cold.arrays import (
    BEGUN,
    CHUNK_BYTES,
    ROOT,
    SHARD_BYTES,
    ColdArray,
    DamagedError,
    GroupStrips,
    Mark,
    cold_array,
    decode,
    encode,
    mark_of,
    zarr,
)
from forebay.store.held import HeldFile
from forebay.store.key import SHORT
from forebay.store.layout import ROW_BITS, ROW_MASK, TEXT, Array, Group
from forebay.store.metadata import FILE_NAME, check_file
from forebay.store.remote.bucket.bucket import FolderStore, ObjectStore, find, find_bytes, object_store
from forebay.store.remote.carry.proof import proves
from forebay.store.remote.carry.tally import Tally, TransferReport, for_each
from forebay.store.remote.carry.transfer import metadata_bytes
from forebay.store.remote.carry.upload import MadeObject, PushedItem, Upload
from forebay.store.remote.node.node import WantedFile
from forebay.store.seal import check_shard
from forebay.store.shard import entry_of, shard_fields, to_table

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]*")
"""Names of fields and files that are names of arrays too."""
_MAX_SHOWN = 1 << 20
"""Bytes of a metadata.json that the root has among its attributes; the array files/metadata.json always has it."""
_MAX_CHUNK = 1 << 28
"""Values of a chunk of a foreign form, in bytes: they are in memory at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """An array and its values. read: gives rows. shards: the shards of `strips` that have some of these rows."""

    array: ColdArray
    read: Callable[[int, int], Array]
    strips: GroupStrips | None = None
    shards: Callable[[int, int], Sequence[int]] = lambda _start, _stop: ()


def mark_of_cache(cache: Cache, *, level: int) -> Mark:
    """Returns the mark of the cold form of a cache."""
    return Mark(
        key=cache.key,
        metadata=xxhash.xxh3_128_hexdigest(metadata_bytes(cache)),
        level=level,
        chunk_bytes=CHUNK_BYTES,
        shard_bytes=SHARD_BYTES,
    )


def arrays_of(cache: Cache) -> list[Filled]:
    """Returns all arrays of a cache's cold form. Raises CacheCorruptError for names that none of forebay's has."""
    found = [*_files(cache), *_samples(cache)]
    for group in cache.groups:
        fields = shard_fields(tuple(cache.fields.values()), group)
        table = to_table([entry for _, entry in cache.shard_entries(group)], len(fields))
        strips = GroupStrips(cache.folder, group, fields, table)
        for strip in strips.strips:
            read = partial(strips.read, strip)
            found.append(Filled(array=strip.array, read=read, strips=strips, shards=strip.shards))
        found.append(_in_memory(*strips.shard_rows))
    for filled in found:
        if not all(_NAME.fullmatch(part) for part in filled.array.path.split("/")):
            raise CacheCorruptError(
                f"{cache.folder}: {filled.array.path!r} is no name that a field or a file of a cache has; run: forebay "
                "preprocess CONFIG --rebuild"
            )
    return found


def _files(cache: Cache) -> list[Filled]:
    """The files beside the shards, byte for byte."""
    found = [_in_memory(file_array(FILE_NAME, len(data := metadata_bytes(cache))), np.frombuffer(data, np.uint8))]
    for file, entry in cache.files():
        if "/" not in file.place:
            array = file_array(file.place, int(entry["size_bytes"]))
            found.append(Filled(array=array, read=partial(_read_file, file)))
    return found


def _read_file(file: HeldFile, start: int, stop: int) -> Array:
    with file.open() as opened:
        opened.seek(start)
        return np.frombuffer(opened.read(stop - start), np.uint8)


def file_array(name: str, size_bytes: int) -> ColdArray:
    """Returns the array of a file that stands beside the shards."""
    return cold_array(f"files/{name}", "uint8", (size_bytes,), (f"{name}_byte",), content=f"the file {name}")


def _samples(cache: Cache) -> list[Filled]:
    """The table by which a reader without forebay finds a sample: its shard, its row in the arrays, and its lengths."""
    slots = cache.slots

    def shards(start: int, stop: int) -> Array:
        return (slots[start:stop] >> ROW_BITS).astype("<i4")

    found = [
        Filled(array=_of_samples("row", "int64", cache), read=_rows(cache, TEXT, slots)),
        Filled(array=_of_samples("shard", "int32", cache), read=shards),
    ]
    for group in cache.listed:
        items = cache.items(group)
        listed = cold_array(f"items/{group}_row", "int64", (len(items.slots),), (f"{group}_item",))
        found.append(Filled(array=listed, read=_rows(cache, group, items.slots)))
        found.append(_in_memory(_of_samples(f"{group}_first", "int64", cache), items.offsets[:-1]))
    return found + [_in_memory(_of_samples(name, "int32", cache), values) for name, values in cache.lengths.items()]


def _rows(cache: Cache, group: Group, slots: Array) -> Callable[[int, int], Array]:
    """Returns what gives the rows, in the arrays of a group, of these slots."""
    counts = np.array([entry.rows for _, entry in cache.shard_entries(group)], np.int64)
    starts = np.cumsum(counts) - counts
    return lambda start, stop: np.asarray(starts[slots[start:stop] >> ROW_BITS] + (slots[start:stop] & ROW_MASK))


def _of_samples(name: str, dtype: str, cache: Cache) -> ColdArray:
    return cold_array(f"samples/{name}", dtype, (len(cache),), ("sample",))


def _in_memory(array: ColdArray, values: Array) -> Filled:
    return Filled(array=array, read=lambda start, stop: values[start:stop])


def documents(arrays: Sequence[ColdArray], mark: Mark, metadata: bytes) -> dict[str, bytes]:
    """Returns every zarr.json of a hierarchy by its name, the root's last, with all of them inside (consolidated)."""
    memory: dict[str, Any] = {}
    store = zarr().storage.MemoryStore(memory)
    about: dict[str, Any] = mark.to_json()
    if len(metadata) <= _MAX_SHOWN:
        about["metadata"] = json.loads(metadata)
    root = zarr().create_group(store, attributes=about)
    for path in sorted({str(parent) for array in arrays for parent in PurePosixPath(array.path).parents} - {"."}):
        root.create_group(path, attributes=mark.to_json() if path == "files" else {})
    for array in arrays:
        _create(root, array, level=mark.level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns that other readers may pass over what they do not know
        zarr().consolidate_metadata(store)
    texts = {name: document.to_bytes() for name, document in memory.items()}
    return {name: texts[name] for name in sorted(texts, key=lambda name: (name == ROOT, name))}


def _create(root: Any, array: ColdArray, *, level: int) -> None:
    rest = tuple(max(1, axis) for axis in array.shape[1:])
    root.create_array(
        array.path,
        shape=array.shape,
        dtype=array.dtype,
        chunks=(array.chunk_rows, *rest),
        shards=(array.shard_rows, *rest),
        compressors=[zarr().codecs.ZstdCodec(level=level, checksum=True)],
        fill_value=0,
        dimension_names=array.dimensions,
        attributes=dict(array.attributes),
    )


def written_as(array: ColdArray, documents: Mapping[str, Any], where: object) -> ColdArray:
    """Returns the array as a cold form has cut it. documents: of all arrays by path, from the root's document.

    Raises CacheMismatchError where it is not there, of another shape or in another code than forebay writes.
    """
    try:
        document = documents[array.path]
        (codec,) = document["codecs"]
        inner = codec["configuration"]
        names = [one["name"] for one in inner["codecs"]]
        chunk_rows, shard_rows = inner["chunk_shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
        found = (codec["name"], names, inner.get("index_location", "end"), tuple(document["shape"]))
        dtype = np.dtype(document["data_type"]).newbyteorder("<")
        is_cut = 0 < chunk_rows <= shard_rows and shard_rows % chunk_rows == 0
        is_cut = is_cut and (chunk_rows == 1 or chunk_rows * array.row_bytes <= _MAX_CHUNK)
    except (LookupError, TypeError, ValueError) as err:
        raise CacheMismatchError(f"{where}: {array.path} is missing, or none that forebay writes: {err!r:.80}") from err
    wanted = ("sharding_indexed", ["bytes", "zstd"], "end", array.shape)
    if found != wanted or dtype != array.dtype or not is_cut:
        raise CacheMismatchError(
            f"{where}: {array.path} is {dtype} {found}, the cache's metadata wants {array.dtype} {wanted}; push the "
            "cache again to another URL"
        )
    return dataclasses.replace(array, chunk_rows=chunk_rows, chunks=shard_rows // chunk_rows)


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
        report = tally.report("push", source=cache.folder, target=place.url, key=cache.key, already_there=work.run())
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
