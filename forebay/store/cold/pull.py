"""A cold form, read, and made the folder of its cache: each file is hashed before it has its name."""

from __future__ import annotations

import dataclasses
import io
import json
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import xxhash

from forebay.config.remote import RemoteConfig, is_url, parse_url
from forebay.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    CacheNotFoundError,
    ConfigError,
    RemoteError,
    RemoteMissingError,
)
from forebay.store.cold.arrays import (
    BEGUN,
    ROOT,
    ColdArray,
    DamagedError,
    GroupStrips,
    Mark,
    Piece,
    decode,
    mark_of,
    zarr,
)
from forebay.store.cold.push import file_array, written_as
from forebay.store.files import write_all, write_aside
from forebay.store.layout import Array, Group
from forebay.store.metadata import FILE_NAME, checked_fields, foreign_values, groups_of, parse_metadata
from forebay.store.remote.bucket.bucket import ObjectStore, find_bytes, object_store
from forebay.store.remote.carry.tally import TransferReport
from forebay.store.remote.carry.transfer import FolderPull, pull
from forebay.store.remote.node.node import WantedFile
from forebay.store.shard import entry_of, shard_fields, shard_name, table_dtype

_MAX_BYTES = 1 << 30
"""Of a file that is read into memory: metadata.json, and the shard tables."""


class ColdForm:
    """The cold form at a place. metadata: the bytes of the cache's metadata.json."""

    def __init__(self, place: ObjectStore) -> None:
        """Reads the documents and the shard tables.

        Raises CacheNotFoundError where no cold form lies there, CacheIncompleteError where its push did not end,
        CacheMismatchError where a newer forebay made it, CacheCorruptError where it describes no cache.
        """
        self.place = place
        self.mark, self._documents = self._root()
        self._arrays: dict[str, ColdArray] = {}
        self.metadata = self._metadata()
        self._strips: dict[Group, GroupStrips] = {}
        folder = Path(str(place.url))
        try:
            document = parse_metadata(folder, self.metadata)
            fields = checked_fields(folder, document)
            self._small = dict(document["files"])
            for group, shape in groups_of(folder, document).items():
                of_group = shard_fields(fields, group)
                table = self._table(group, len(of_group), shape.num_shards)
                with foreign_values(folder):
                    self._strips[group] = GroupStrips(folder, group, of_group, table)
        except CacheCorruptError as err:
            raise self._corrupt(err.args[0].partition("; run:")[0]) from err

    @staticmethod
    def lies_at(place: ObjectStore) -> bool:
        """Returns whether there is a cold form, or the beginning of one."""
        return any(_mark_at(place, name) is not None for name in (ROOT, BEGUN))

    @cached_property
    def files(self) -> list[WantedFile]:
        """Every file of the cache but metadata.json."""
        found = [WantedFile.of(name, entry) for name, entry in self._small.items()]
        for group, strips in self._strips.items():
            for index in range(len(strips.table)):
                entry = entry_of(strips.table, index)
                name, size = shard_name(group, index), entry.size_bytes
                found.append(WantedFile(name=name, size_bytes=size, xxh3_128=entry.xxh3_128))
        return found

    def pieces(self, name: str) -> list[Piece]:
        """Returns what a file of the cache is made of, in the order of its bytes."""
        group, _, number = name.removesuffix(".tdz").rpartition("/")
        if group in self._strips:
            return self._strips[group].pieces(int(number))
        size = self._small[name]["size_bytes"]
        return [Piece(offset=0, size_bytes=size, array=file_array(name, size), start=0, stop=size)]

    def array(self, wanted: ColdArray) -> ColdArray:
        """Returns an array as this form has cut it. Raises CacheMismatchError where it is not there, or another one."""
        found = self._arrays.get(wanted.path)
        if found is None:
            found = self._arrays[wanted.path] = written_as(wanted, self._documents, self.place.url)
        return found

    def _root(self) -> tuple[Mark, Mapping[str, Any]]:
        try:
            data = self.place.read(ROOT)
        except RemoteMissingError as err:
            if (begun := _mark_at(self.place, BEGUN)) is not None:
                raise CacheIncompleteError(
                    f"{self.place.url} has no {ROOT}: the push of {begun} did not end; run it again: forebay cache "
                    f"push CACHE {self.place.url} --form zarr --level {begun.level}"
                ) from err
            raise CacheNotFoundError(
                f"{self.place.url} holds neither a sealed cache (metadata.json) nor the zarr form of one ({ROOT}); "
                "name another place"
            ) from err
        mark = mark_of(data, self.place.url / ROOT)
        if mark is None:
            raise CacheNotFoundError(
                f"{self.place.url / ROOT} is of a zarr hierarchy that forebay did not write; name another place"
            )
        try:
            return mark, dict(json.loads(data)["consolidated_metadata"]["metadata"])
        except (LookupError, TypeError, ValueError) as err:
            raise self._corrupt(f"it has no consolidated metadata ({err!r:.60})") from err

    def _metadata(self) -> bytes:
        path = f"files/{FILE_NAME}"
        try:
            size = int(self._documents[path]["shape"][0])
        except (LookupError, TypeError, ValueError) as err:
            raise self._corrupt(f"it has no {path} ({err!r:.60})") from err
        data = self._read(FILE_NAME, size)
        self._require(path, data, self.mark.metadata)
        return data

    def _read(self, name: str, size: int) -> bytes:
        if not 0 <= size <= _MAX_BYTES:
            raise self._corrupt(f"files/{name} is said to have {size} bytes, at most {_MAX_BYTES} are expected")
        array = self.array(file_array(name, size))
        parts = []
        for index in range(array.num_shards):
            start, stop = array.rows(index)
            try:
                parts.append(decode(array, self.place.read(array.name(index)), index, start=start, stop=stop).tobytes())
            except (DamagedError, RemoteMissingError) as err:
                raise self._corrupt(f"{array.name(index)} is damaged or missing: {err}") from err
        return b"".join(parts)

    def _table(self, group: Group, num_fields: int, num_shards: int) -> Array:
        name, dtype = f"{group}.npy", table_dtype(num_fields)
        entry = self._small[name]
        data = self._read(name, int(entry["size_bytes"]))
        self._require(f"files/{name}", data, entry["xxh3_128"])
        try:
            table = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, TokenError) as err:
            raise self._corrupt(f"files/{name} is no .npy file: {err}") from err
        if table.dtype != dtype or table.shape != (num_shards,):
            raise self._corrupt(f"files/{name} holds {list(table.shape)} entries, its metadata says {num_shards}")
        return table

    def _require(self, path: str, data: bytes, wanted: str) -> None:
        if (found := xxhash.xxh3_128_hexdigest(data)) != wanted:
            raise self._corrupt(f"{path}: stored xxh3-128 {wanted}, computed {found}")

    def _corrupt(self, what: str) -> CacheCorruptError:
        return CacheCorruptError(
            f"{self.place.url} is no zarr form of a cache: {what}; push the cache again from a machine that has it "
            f"whole: forebay cache push CACHE {self.place.url} --form zarr --verify"
        )


def _mark_at(place: ObjectStore, name: str) -> Mark | None:
    data = find_bytes(place, name)
    return None if data is None else mark_of(data, place.url / name)


_KEPT_BYTES = 512 * 1024 * 1024
"""Compressed objects that are in memory in case the next shard needs them too."""


def pull_any(source: str, folder: Path, settings: RemoteConfig, *, progress: bool = False) -> TransferReport:
    """Makes `folder` the sealed cache of a URL, or of a folder that holds a cold form; see `pull` and `pull_zarr`."""
    if not is_url(source):
        if (Path(source) / FILE_NAME).is_file():
            raise ConfigError(
                f"{source} is a cache of this machine already; a pull takes a cache in a store, or the zarr form of one"
            )
        return pull_zarr(object_store(source, settings), folder, progress=progress)
    try:
        return pull(parse_url(source), folder, settings, progress=progress)
    except CacheNotFoundError:
        place = object_store(source, settings)
        if not ColdForm.lies_at(place):
            raise
    return pull_zarr(place, folder, progress=progress)


def pull_zarr(place: ObjectStore, folder: Path, *, progress: bool = False) -> TransferReport:
    """Makes `folder` the sealed cache of a cold form, byte for byte, and returns what that took.

    An interrupted pull goes on; what another cache beside `folder` has is linked. Raises CacheNotFoundError where no
    cold form lies there, CacheIncompleteError where its push did not end, CacheMismatchError where a newer forebay made
    it or something else stands at `folder`, MissingExtraError without zarr, and RemoteError where an object is damaged
    or missing: no file gets its name then whose hash is not that of the cache.
    """
    zarr()
    form = ColdForm(place)
    objects = _Objects(place)
    work = FolderPull(_Making(form, objects).make, form.files, form.metadata, form.mark.key)
    report = work.run(place.url, folder, place.settings, donors=[], progress=progress)
    return dataclasses.replace(report, stored_bytes=objects.read_bytes)


class _Making:
    """Files from a cold form's arrays."""

    def __init__(self, form: ColdForm, objects: _Objects) -> None:
        self.form, self.objects = form, objects

    def make(self, path: Path, wanted: WantedFile) -> None:
        """Makes a file, complete and of the hash that is wanted, or absent. Raises RemoteError."""
        state = xxhash.xxh3_128()
        with write_aside(path) as file:
            for piece in self.form.pieces(wanted.name):
                for data in self._bytes(piece, wanted):
                    state.update(data)
                    write_all(file, data)
            if (found := state.hexdigest()) != wanted.xxh3_128:
                raise RemoteError(
                    f"{wanted.name} made of {self.form.place.url} has xxh3-128 {found}, its cache says "
                    f"{wanted.xxh3_128}; {self._mend}"
                )

    def _bytes(self, piece: Piece, wanted: WantedFile) -> Iterator[memoryview]:
        array, start = self.form.array(piece.array), piece.start
        while start < piece.stop:
            index = start // array.shard_rows
            stop, where = min(piece.stop, array.rows(index)[1]), self.form.place.url / array.name(index)
            try:
                rows = decode(array, self.objects.get(array.name(index)), index, start=start, stop=stop)
            except DamagedError as err:
                raise RemoteError(f"{where} is damaged, {wanted.name} needs it: {err}; {self._mend}") from err
            except RemoteMissingError as err:
                raise RemoteError(f"{where} is missing, {wanted.name} needs it; {self._mend}") from err
            values = np.ascontiguousarray(rows - piece.added if piece.added else rows)
            yield values.reshape(-1).view(np.uint8).data
            start = stop

    @property
    def _mend(self) -> str:
        return (
            "push the cache again from a machine that has it whole: forebay cache push CACHE "
            f"{self.form.place.url} --form zarr --verify --level {self.form.mark.level}"
        )


class _Objects:
    """Objects of a place, each read once while it is needed. Threads share it."""

    def __init__(self, place: ObjectStore) -> None:
        self.place, self.read_bytes = place, 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def get(self, name: str) -> bytes:
        """Returns an object; threads that want the same one wait for one request."""
        with self._lock:
            lock = self._locks[name]
        with lock:
            with self._lock:
                if name in self._kept:
                    self._kept.move_to_end(name)
                    return self._kept[name]
            data = self.place.read(name)
            with self._lock:
                self._kept[name] = data
                self.read_bytes += len(data)
                self._size += len(data)
                while self._size > _KEPT_BYTES:
                    self._size -= len(self._kept.popitem(last=False)[1])
        return data
