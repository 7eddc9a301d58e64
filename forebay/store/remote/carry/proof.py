"""The bytes that an object or a file must be: by a hash, by an etag that is an MD5, by size alone; and who reads them.

Objects are compared as a whole. Where neither a hash nor an etag proves them they are read back, and nothing is kept.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from forebay.errors import CacheCorruptError, RemoteError, RemoteMissingError
from forebay.store.files import write_all, write_aside
from forebay.store.held import AnyFile
from forebay.store.metadata import FILE_NAME as METADATA
from forebay.store.remote.bucket.bucket import CHUNK, Bucket, ObjectInfo, find, part_bytes
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.small_files import NAME as COLUMNS

CheckedBy = Literal["xxh3_128", "sha256", "md5", "etag", "size"]
HASHES: tuple[CheckedBy, ...] = ("xxh3_128", "sha256", "md5")
"""Hashes that a manifest may name, the one that is taken first."""
DIGITS = {"xxh3_128": 32, "sha256": 64, "md5": 32}
_MIB = 1024 * 1024
_PARTS = (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512)
"""Sizes of parts, in MiB, in which the usual tools put large objects."""
_ETAG = re.compile(r'"?(?P<md5>[0-9a-f]{32})(?:-(?P<parts>[1-9][0-9]{0,4}))?"?', re.IGNORECASE)
_REPLACED = (
    "it is damaged, or was replaced after the cache was pushed: push the cache again from a machine that has it whole: "
    "forebay cache push CACHE URL --verify"
)
_MEND = "push the cache again from a machine that has it whole: forebay cache push"
_md5 = functools.partial(hashlib.md5, usedforsecurity=False)
_MADE: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256, "md5": _md5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """An object that is to become a file.

    name: below the bucket's URL and the folder. etag: of the wanted version, empty where none is told. modified_ns: 0
    where only a manifest is known. hashes: hex digits by the name of the hash, as a manifest says.
    """

    name: str
    size_bytes: int
    etag: str = ""
    modified_ns: int = 0
    hashes: tuple[tuple[str, str], ...] = ()

    @property
    def identity(self) -> str:
        """Says which bytes it is: what an interrupted download left of the same identity is gone on with."""
        return f"{self.name}\0{self.size_bytes}\0{self.hashes or self.etag or self.modified_ns}"

    @property
    def may_be_proven(self) -> bool:
        """Whether more than the size tells that bytes are the right ones."""
        return bool(self.hashes) or _ETAG.fullmatch(self.etag) is not None

    def of(self, info: ObjectInfo) -> Expected:
        """Returns it as the store says it is now. The size of a manifest stays."""
        size = self.size_bytes if self.hashes else info.size_bytes
        return replace(self, size_bytes=size, etag=info.quoted_etag, modified_ns=info.modified_ns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison of bytes. problem: empty if they are right. by: what they were compared with."""

    by: CheckedBy
    problem: str = ""


def judge(pieces: Iterable[bytes | memoryview], expected: Expected, *, etags_are_md5: bool) -> Verdict:
    """Returns whether these bytes, of the right size, are those that are expected.

    etags_are_md5: another MD5 than the etag means other bytes. Without it an etag proves what it fits, and no more.
    """
    hashes = dict(expected.hashes)
    for kind in HASHES:
        if kind in hashes:
            found = _hashed(_MADE[kind](), pieces)
            is_right = found == hashes[kind]
            return Verdict(kind, "" if is_right else f"its {kind} is {found}, its manifest says {hashes[kind]}")
    if (match := _ETAG.fullmatch(expected.etag)) is None:
        return Verdict("size")
    wanted = match["md5"].lower()
    if match["parts"] is None:
        found = _hashed(_md5(), pieces)
        if found == wanted or not etags_are_md5:
            return Verdict("etag" if found == wanted else "size")
        return Verdict("etag", f"the MD5 of its bytes is {found}, its etag {wanted}")
    candidates = [_Parts(size) for size in _part_sizes(expected.size_bytes, int(match["parts"]))]
    for piece in pieces if candidates else ():
        for candidate in candidates:
            candidate.update(piece)
    # Another size of parts gives another etag, so that one which does not fit proves nothing.
    return Verdict("etag" if any(candidate.hexdigest() == wanted for candidate in candidates) else "size")


def _hashed(state: Any, pieces: Iterable[bytes | memoryview]) -> str:
    for piece in pieces:
        state.update(piece)
    return str(state.hexdigest())


def _part_sizes(size_bytes: int, num_parts: int) -> Iterator[int]:
    """Yields the sizes of parts that make the whole by this number: forebay's own, those of the usual tools."""
    known = {part_bytes(size_bytes), *(part * _MIB for part in _PARTS), *(part * 1_000_000 for part in _PARTS)}
    return (part for part in sorted(known) if -(-size_bytes // part) == num_parts)


class _Parts:
    """The MD5 of the MD5s of parts: the etag of an object that was put in parts."""

    def __init__(self, part: int) -> None:
        self._part, self._left = part, part
        self._whole, self._state = _md5(), _md5()

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            piece, view = view[: self._left], view[self._left :]
            self._state.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._end()

    def _end(self) -> None:
        self._whole.update(self._state.digest())
        self._state, self._left = _md5(), self._part

    def hexdigest(self) -> str:
        if self._left < self._part:
            self._end()
        return self._whole.hexdigest()


@dataclass(frozen=True, slots=True)
class Proof:
    """The etags of S3 for these bytes, sent whole or in parts; those of other stores, or encrypted, say nothing."""

    whole: str
    in_parts: str

    def holds(self, etag: str) -> bool:
        """Returns whether an etag proves that the object has these bytes. False proves nothing."""
        return etag.strip('"').lower() in (self.whole, self.in_parts)


def proof_of(file: AnyFile, wanted: WantedFile) -> Proof:
    """Returns the proof of a file, which is read once. Raises CacheCorruptError where the file is not as wanted."""
    part = part_bytes(wanted.size_bytes)
    state, whole, parts, size_bytes = xxhash.xxh3_128(), _md5(), _Parts(part), 0
    with file.open("rb", buffering=0) as opened:
        while piece := opened.read(CHUNK):
            for each in (state, whole, parts):
                each.update(piece)
            size_bytes += len(piece)
    found = state.hexdigest()
    if (size_bytes, found) != (wanted.size_bytes, wanted.xxh3_128):
        raise CacheCorruptError(
            f"{file} has {size_bytes} bytes of xxh3-128 {found}, its cache says {wanted.size_bytes} bytes of "
            f"{wanted.xxh3_128}; it is not pushed; run: forebay preprocess CONFIG --verify"
        )
    return Proof(whole.hexdigest(), f"{parts.hexdigest()}-{-(-size_bytes // part)}")


def proves(etag: str, data: bytes) -> bool:
    """Returns whether an etag proves that the object has these bytes, as `Proof` does. One MD5 is computed."""
    found, part = etag.strip('"').lower(), part_bytes(len(data))
    if "-" not in found:
        return found == _md5(data).hexdigest()
    parts = _Parts(part)
    parts.update(data)
    return found == f"{parts.hexdigest()}-{-(-len(data) // part)}"


def pieces_of(bucket: Bucket, wanted: WantedFile) -> Iterator[bytes]:
    """Yields the bytes of an object that is as large as wanted, and whose hash is as wanted.

    Raises RemoteError as soon as it shows to be another one: what was yielded before is not to be used.
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


def save_object(bucket: Bucket, wanted: WantedFile, path: Path) -> None:
    """Makes a path the file of an object, complete and of the hash that is wanted, or absent. Raises RemoteError."""
    with write_aside(path) as file:
        for piece in pieces_of(bucket, wanted):
            write_all(file, piece)


def hash_object(bucket: Bucket, name: str) -> str:
    """Returns the xxh3-128 of an object, all of which is read and nothing kept. Raises RemoteError."""
    return _hashed(xxhash.xxh3_128(), bucket.stream(name))


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
    others = sorted(found.keys() - {METADATA, COLUMNS})
    return problems, [f"{bucket.url}/{name} does not belong to this cache" for name in others]


def check_bytes(bucket: Bucket, files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, str | None]]:
    """Yields the bytes of each file, which is read to its end, and what is wrong with it; in no order."""
    with ThreadPoolExecutor(bucket.settings.max_concurrent) as threads:
        futures = [threads.submit(_check_file, bucket, name, entry) for name, entry in files.items()]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _sizes(bucket: Bucket, files: Iterable[str]) -> dict[str, int]:
    if not bucket.url.is_web:
        return {found.name: found.size_bytes for found in bucket.objects()}
    with ThreadPoolExecutor(bucket.settings.max_concurrent) as threads:
        return {
            found.name: found.size_bytes
            for found in threads.map(functools.partial(find, bucket), files)
            if found is not None
        }


def _check_file(bucket: Bucket, name: str, entry: Mapping[str, Any]) -> tuple[int, str | None]:
    try:
        found = hash_object(bucket, name)
    except RemoteMissingError:
        return 0, f"{bucket.url / name} is missing; {_MEND}"
    if found == entry["xxh3_128"]:
        return int(entry["size_bytes"]), None
    return 0, f"{bucket.url / name}: stored xxh3-128 {entry['xxh3_128']}, computed {found}; {_MEND}"
