"""Whether an object of a store and a file of a cache are the same bytes: by etag where that proves it, else by hash."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from forebay.errors import CacheCorruptError, RemoteError
from forebay.store.held import AnyFile
from forebay.store.remote.bucket.bucket import Bucket, part_bytes
from forebay.store.remote.node.node import Wanted

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


def proof_of(file: AnyFile, wanted: Wanted) -> Proof:
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


def pieces_of(bucket: Bucket, wanted: Wanted) -> Iterator[bytes]:
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

    def knows(self, wanted: Wanted, etag: str) -> bool:
        """Returns whether an object of this etag was proven to have the bytes that are wanted."""
        return bool(etag) and self._known.get((wanted.name, wanted.xxh3_128)) == etag

    def add(self, wanted: Wanted, etag: str) -> None:
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
