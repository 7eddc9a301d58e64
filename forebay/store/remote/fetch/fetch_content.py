"""What the bytes of an object must be: by a hash of a manifest, by an etag that is an MD5, by size alone."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import xxhash

from forebay.store.remote.bucket.bucket import ObjectInfo, part_bytes

CheckedBy = Literal["xxh3_128", "sha256", "md5", "etag", "size"]
HASHES: tuple[CheckedBy, ...] = ("xxh3_128", "sha256", "md5")
"""Hashes that a manifest may name, the one that is taken first."""
DIGITS = {"xxh3_128": 32, "sha256": 64, "md5": 32}

_MIB = 1024 * 1024
_PARTS = (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512)
"""Sizes of parts, in MiB, in which the usual tools put large objects."""
_ETAG = re.compile(r'"?(?P<md5>[0-9a-f]{32})(?:-(?P<parts>[1-9][0-9]{0,4}))?"?', re.IGNORECASE)

_md5 = functools.partial(hashlib.md5, usedforsecurity=False)
_MADE: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256, "md5": _md5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """An object that is to become a file.

    name: of the file, below the folder. key: of the object, below the bucket's URL. etag: of the version that is
    wanted, empty where the store tells none. modified_ns: 0 where only a manifest is known. hashes: hex digits by the
    name of the hash, as a manifest says.
    """

    name: str
    key: str
    size_bytes: int
    etag: str = ""
    modified_ns: int = 0
    hashes: tuple[tuple[str, str], ...] = ()

    @property
    def identity(self) -> str:
        """Says which bytes it is: what an interrupted download left of the same identity is gone on with."""
        return f"{self.key}\0{self.size_bytes}\0{self.hashes or self.etag or self.modified_ns}"

    def of(self, info: ObjectInfo) -> Expected:
        """Returns it as the store says it is now. The size of a manifest stays."""
        size = self.size_bytes if self.hashes else info.size_bytes
        return replace(self, size_bytes=size, etag=info.quoted_etag, modified_ns=info.modified_ns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison of bytes said. problem: empty where they are right. by: what they were compared with."""

    by: CheckedBy
    problem: str = ""


def judge(pieces: Iterable[bytes | memoryview], expected: Expected, *, etags_are_md5: bool) -> Verdict:
    """Returns whether these bytes, of the right size, are those that are expected.

    etags_are_md5: an etag that looks like an MD5 is one, so that another MD5 means other bytes. Without it an etag
    proves what it fits, and nothing else.
    """
    wanted = next(((kind, dict(expected.hashes)[kind]) for kind in HASHES if kind in dict(expected.hashes)), None)
    if wanted is not None:
        kind, digest = wanted
        state = _MADE[kind]()
        for piece in pieces:
            state.update(piece)
        found = state.hexdigest()
        return Verdict(kind, "" if found == digest else f"its {kind} is {found}, its manifest says {digest}")
    return _judge_etag(pieces, expected, etags_are_md5=etags_are_md5)


def _judge_etag(pieces: Iterable[bytes | memoryview], expected: Expected, *, etags_are_md5: bool) -> Verdict:
    match = _ETAG.fullmatch(expected.etag)
    if match is None:
        return Verdict("size")
    if match["parts"] is None:
        state = _md5()
        for piece in pieces:
            state.update(piece)
        found, wanted = state.hexdigest(), match["md5"].lower()
        if found != wanted and not etags_are_md5:
            return Verdict("size")
        return Verdict("etag", "" if found == wanted else f"the MD5 of its bytes is {found}, its etag {wanted}")
    candidates = [_Parts(size) for size in part_sizes(expected.size_bytes, int(match["parts"]))]
    for piece in pieces if candidates else ():
        for candidate in candidates:
            candidate.update(piece)
    is_proven = any(candidate.hexdigest() == match["md5"].lower() for candidate in candidates)
    # Another size of parts gives another etag, so that one which does not fit proves nothing.
    return Verdict("etag" if is_proven else "size")


def part_sizes(size_bytes: int, num_parts: int) -> Iterator[int]:
    """Yields the sizes of parts of which so many make the whole: forebay's own, those of the usual tools."""
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
