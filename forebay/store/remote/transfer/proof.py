"""Whether an object of a store and a file of a cache are the same bytes: by etag where that proves it, else by hash.

Whether a cache in a store is what was sealed: by a listing, or byte for byte, of which nothing is kept.

Objects of a bucket that a push into the same bucket copies, so that no byte of them passes here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url
from forebay.errors import CacheCorruptError, RemoteError, RemoteMissingError
from forebay.store.files import write_all, write_aside
from forebay.store.held import AnyFile
from forebay.store.metadata import FILE_NAME as METADATA
from forebay.store.remote.bucket.bucket import MAX_COPY, Bucket, part_bytes
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.transfer.sent_columns import NAME as COLUMNS
from forebay.visible import human_bytes

_REPLACED = (
    "it is damaged, or was replaced after the cache was pushed: push the cache again from a machine that has it whole: "
    "forebay cache push CACHE URL --verify"
)

_md5 = functools.partial(hashlib.md5, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Proof:
    """The etags that S3 gives an object of these bytes: sent whole, or in parts.

    Other stores, and buckets that encrypt with a key of their owner, give etags that say nothing of the bytes.
    """

    whole: str
    in_parts: str

    def holds(self, etag: str) -> bool:
        """Returns whether an etag proves that the object has these bytes. False proves nothing."""
        return etag.strip('"').lower() in (self.whole, self.in_parts)


def proof_of(file: AnyFile, wanted: WantedFile) -> Proof:
    """Returns the proof of a file, which is read once. Raises CacheCorruptError where the file is not as wanted."""
    state, whole, parts, size_bytes = xxhash.xxh3_128(), _md5(), _md5(), 0
    part = part_bytes(wanted.size_bytes)
    buffer = memoryview(bytearray(min(part, max(1, wanted.size_bytes))))
    with file.open("rb", buffering=0) as opened:
        while count := _fill(buffer, opened):
            piece = buffer[:count]
            state.update(piece)
            whole.update(piece)
            parts.update(_md5(piece).digest())
            size_bytes += count
    found = state.hexdigest()
    if (size_bytes, found) != (wanted.size_bytes, wanted.xxh3_128):
        raise CacheCorruptError(
            f"{file} has {size_bytes} bytes of xxh3-128 {found}, its cache says {wanted.size_bytes} bytes of "
            f"{wanted.xxh3_128}; it is not pushed; run: forebay preprocess CONFIG --verify"
        )
    return Proof(whole.hexdigest(), f"{parts.hexdigest()}-{-(-size_bytes // part)}")


def proves(etag: str, data: bytes) -> bool:
    """Returns whether an etag proves that the object has these bytes, as `Proof` does. One MD5 is computed."""
    found = etag.strip('"').lower()
    if "-" not in found:
        return found == _md5(data).hexdigest()
    parts, part = _md5(), part_bytes(len(data))
    for start in range(0, len(data), part):
        parts.update(_md5(memoryview(data)[start : start + part]).digest())
    return found == f"{parts.hexdigest()}-{-(-len(data) // part)}"


def _fill(buffer: memoryview, file: io.FileIO) -> int:
    """Fills a buffer as far as the file goes: one call may give less."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled


def pieces_of(bucket: Bucket, wanted: WantedFile) -> Iterator[bytes]:
    """Yields the bytes of an object that is as large as wanted, and whose hash is as wanted.

    Raises RemoteError where the object is another one, as soon as that shows: what was yielded before is not to be
    used.
    """
    state, size_bytes, where = xxhash.xxh3_128(), 0, bucket.url / wanted.name
    for piece in bucket.stream(wanted.name):
        size_bytes += len(piece)
        if size_bytes > wanted.size_bytes:
            raise RemoteError(f"{where} has more than the {wanted.size_bytes} bytes that its cache says; {_REPLACED}")
        state.update(piece)
        yield piece
    if size_bytes != wanted.size_bytes:
        raise RemoteError(f"{where} has {size_bytes} bytes, its cache says {wanted.size_bytes}; {_REPLACED}")
    if (found := state.hexdigest()) != wanted.xxh3_128:
        raise RemoteError(f"{where} has xxh3-128 {found}, its cache says {wanted.xxh3_128}; {_REPLACED}")


def hash_object(bucket: Bucket, name: str) -> str:
    """Returns the xxh3-128 of an object, all of which is read and nothing kept. Raises RemoteError."""
    state = xxhash.xxh3_128()
    for piece in bucket.stream(name):
        state.update(piece)
    return state.hexdigest()


class Journal:
    """What was proven of objects, by their etags: a push that was interrupted does not prove it again.

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


_MEND = "push the cache again from a machine that has it whole: forebay cache push"


def check_sizes(bucket: Bucket, files: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Returns what is wrong with the files of a cache by their names and sizes, and what is there beside them.

    files: entries by name. A web server lists nothing: each file is asked for, and nothing else is known.
    """
    found = _sizes(bucket, files)
    problems = []
    for name, entry in files.items():
        if (size := found.pop(name, None)) is None:
            problems.append(f"{bucket.url / name} is missing; {_MEND}")
        elif size != entry["size_bytes"]:
            problems.append(f"{bucket.url / name} has {size} bytes, its metadata says {entry['size_bytes']}; {_MEND}")
    for name in (METADATA, COLUMNS):
        found.pop(name, None)
    return problems, [f"{bucket.url}/{name} does not belong to this cache" for name in sorted(found)]


def check_bytes(bucket: Bucket, files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, str | None]]:
    """Yields the bytes of each file, which is read to its end, and what is wrong with it; in no order."""
    with ThreadPoolExecutor(bucket.settings.max_concurrent) as threads:
        futures = [threads.submit(_check_file, bucket, name, entry) for name, entry in files.items()]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _sizes(bucket: Bucket, files: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    if bucket.url.scheme not in ("http", "https"):
        return {found.name: found.size_bytes for found in bucket.objects()}
    with ThreadPoolExecutor(bucket.settings.max_concurrent) as threads:
        sizes = zip(files, threads.map(lambda name: _size(bucket, name), files), strict=True)
        return {name: size for name, size in sizes if size is not None}


def _size(bucket: Bucket, name: str) -> int | None:
    try:
        return bucket.info(name).size_bytes
    except RemoteMissingError:
        return None


def _check_file(bucket: Bucket, name: str, entry: Mapping[str, Any]) -> tuple[int, str | None]:
    state, size = xxhash.xxh3_128(), 0
    try:
        for piece in bucket.stream(name):
            state.update(piece)
            size += len(piece)
    except RemoteMissingError:
        return 0, f"{bucket.url / name} is missing; {_MEND}"
    if (found := state.hexdigest()) == entry["xxh3_128"]:
        return size, None
    return 0, f"{bucket.url / name}: stored xxh3-128 {entry['xxh3_128']}, computed {found}; {_MEND}"


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedObjects:
    """An object with the bytes of a file that is pushed.

    proof: of these bytes. etag: of the object, when they were proven. None, empty: nothing is known but the size.
    """

    url: Url
    proof: Proof | None
    etag: str

    def is_copied(self, etag: str) -> bool | None:
        """Returns whether an object of this etag, and of the same size, is a copy; None where etags do not say so."""
        if self.proof is None or not self.proof.holds(self.etag):
            return None
        return self.proof.holds(etag)


NOTHING_STAGED: Mapping[str, StagedObjects] = MappingProxyType({})


def download_staged(staged: StagedObjects, wanted: WantedFile, path: Path, settings: RemoteConfig) -> None:
    """Makes a file the whole of a staged object, which is larger than what a store copies at once."""
    logger.warning(
        "%s has %s, and stores copy no more than %s at once: it goes through this machine; a smaller "
        "layout.rows_per_shard makes smaller shards",
        staged.url,
        human_bytes(wanted.size_bytes),
        human_bytes(MAX_COPY),
    )
    with write_aside(path) as whole:
        for piece in pieces_of(Bucket(staged.url.parent, settings), replace(wanted, name=staged.url.name)):
            write_all(whole, piece)
