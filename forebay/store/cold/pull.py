"""A cold form to the folder of its cache, byte for byte.

Each file is written from the arrays that hold its bytes, and hashed, before it has its name.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from forebay.config.remote import RemoteConfig, is_url, parse_url
from forebay.errors import CacheNotFoundError, ConfigError, RemoteError, RemoteMissingError
from forebay.store.cold.arrays import DamagedError, decode, zarr
from forebay.store.cold.cold_form import ColdForm
from forebay.store.cold.strips import Piece
from forebay.store.files import write_all, write_aside
from forebay.store.metadata import FILE_NAME
from forebay.store.remote.bucket.object_store import ObjectStore, object_store
from forebay.store.remote.carry.tally import TransferReport
from forebay.store.remote.carry.transfer import FolderPull, pull
from forebay.store.remote.node.node import WantedFile

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
        """Yields the bytes of a piece, those of one object at a time."""
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
