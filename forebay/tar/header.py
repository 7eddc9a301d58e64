"""One 512-byte tar header in its POSIX.1-1988 (ustar), v7 and GNU forms, read and written; the members of one tar.

Extended headers, GNU long names and PAX records, change what is said about the member that follows. Members are flat
arrays, 16 bytes each, read by row; names are decoded when asked. Tars that are written are the same bytes for the same
members, and no reader takes their names for something else.
"""

from __future__ import annotations

import itertools
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol
from urllib.parse import quote_from_bytes, unquote_to_bytes

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK = 512
CURRENT_DIRECTORY = b"./"
TYPE = 156
"""Position of the type flag; an `int`, since indexing bytes gives one."""
SIZE_FIELD = slice(124, 136)
REGULAR = frozenset(b"0\x007")
"""Regular files: '0', the NUL of v7, and '7' (contiguous, stored like a regular file)."""
WITHOUT_DATA = frozenset(b"123456")
"""Links, devices, directories and pipes: no data follows, whatever their size field says."""
LONG_NAME, LONG_LINK, SPARSE = b"LKS"
PAX_GLOBAL = ord("g")
DIRECTORY = ord("5")
VOLUME_LABEL = ord("V")
EXTENDED = frozenset(b"LKxXg")
_CHECKSUM_FIELD = slice(148, 156)
_DIGIT_WEIGHTS = 8 ** np.arange(5, -1, -1, dtype=np.int32)
_NUMBER_STARTS = np.zeros(256, bool)
_NUMBER_STARTS[np.frombuffer(b"01234567 \0\x80", np.uint8)] = True


def parse_number(field: bytes) -> int | None:
    """Returns the value of a numeric field: octal text, or base-256 where the first byte is 0x80 or 0xff; else None.

    0x80 is followed by a positive big-endian number, 0xff by a negative one in two's complement (GNU tar manual,
    "Basic Tar Format").
    """
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big", signed=field[0] == 0xFF)
    text = field.partition(b"\0")[0].strip(b" ")
    if not text:
        return 0
    return int(text, 8) if text.strip(b"01234567") == b"" else None


def header_name(block: bytes) -> bytes:
    """Returns the name in a header, with the ustar prefix in front of it where there is one.

    GNU headers (magic `ustar` and two spaces) keep times where ustar keeps the prefix, so theirs is left alone.
    """
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345] and block[TYPE] not in b"LKS":
        return block[345:500].partition(b"\0")[0] + b"/" + name
    return name


def header_size(block: bytes) -> int:
    """Returns the size field's value; -1 where it has none."""
    text = block[SIZE_FIELD]
    if text[11] in b"\0 ":
        try:
            return max(-1, int(text[:11], 8))
        except ValueError:
            pass  # padded in another way, or base-256
    size = parse_number(text)
    return -1 if size is None else max(-1, size)


def header_names(table: npt.NDArray[np.uint8], blocks: list[bytes]) -> list[bytes]:
    """Returns the names that the headers themselves give, without a leading `./`."""
    names: list[bytes] = np.ascontiguousarray(table[:, :100]).view("S100").ravel().tolist()
    for row in np.flatnonzero(table[:, 345]):
        names[row] = header_name(blocks[row])
    flat = b"\n".join(names)
    if b"\0" in flat or b"./" in flat:  # rare, and twice as dear as all the rest
        names = [name.partition(b"\0")[0].removeprefix(CURRENT_DIRECTORY) for name in names]
    return names


def valid_headers(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Returns which of the blocks [n, 512] carry their own checksum; some old tars summed signed bytes, both are right.

    The sum runs over all 512 bytes with the checksum field taken as eight spaces. A block of zeros is not a header.
    """
    field = blocks[:, _CHECKSUM_FIELD]
    stored = _stored_checksums(field)
    computed = blocks.sum(axis=1, dtype=np.int32) - field.sum(axis=1, dtype=np.int32) + 8 * ord(" ")
    valid: npt.NDArray[np.bool_] = computed == stored
    for row in np.flatnonzero(~valid & (stored >= 0)):  # rare: the signed sum costs as much as all the rest
        high = (blocks[row] >= 128).sum() - (field[row] >= 128).sum()
        valid[row] = high > 0 and computed[row] - 256 * int(high) == stored[row]
    return valid


def _stored_checksums(field: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Returns the checksums in the fields [n, 8], -1 where there is no number."""
    digits = field[:, :6] - np.uint8(ord("0"))  # what is below '0' wraps around to above 7
    plain = (digits < 8).all(axis=1) & ((field[:, 6] == 0) | (field[:, 6] == ord(" ")))
    stored = (digits.astype(np.int32) @ _DIGIT_WEIGHTS).astype(np.int64)
    stored[~plain] = -1
    for row in np.flatnonzero(~plain & _NUMBER_STARTS[field[:, 0]]):
        value = parse_number(field[row].tobytes())
        if value is not None and value <= BLOCK * 255:
            stored[row] = value
    return stored


MAX_EXTENDED_BYTES = 1024 * 1024
"""Larger extended headers are refused unread: a flipped bit in a size must not fill memory."""
MAX_NAME_BYTES = 64 * 1024


@dataclass(slots=True)
class Extension:
    """The words of extended headers about the next member; the member is refused with `problem` if that is set."""

    name: bytes | None = None
    size: int | None = None
    sparse: bool = False
    problem: str | None = None

    def apply_long_name(self, payload: bytes) -> None:
        """Takes the name of a GNU `L` header."""
        self._set_name(payload.partition(b"\0")[0])

    def apply_pax(self, payload: bytes) -> None:
        """Takes `path`, `size` and the sparse marks of PAX records; an empty value leaves the header's own."""
        records = pax_records(payload)
        if records is None:
            self.problem = "bad_extended_header"
            return
        for keyword, value in records:
            if keyword == b"path":
                self._set_name(value or None)
            elif keyword == b"size":
                self._set_size(value)
            elif keyword.startswith(b"GNU.sparse."):
                self.sparse = True
        # The path of a sparse member is an invented one; its own name stands in GNU.sparse.name.
        for keyword, value in records if self.sparse else ():
            if keyword == b"GNU.sparse.name":
                self._set_name(value or None)

    def _set_name(self, name: bytes | None) -> None:
        if name is not None and len(name) > MAX_NAME_BYTES:
            self.problem = "extended_header_too_large"
        else:
            self.name = name

    def _set_size(self, value: bytes) -> None:
        if not value:
            self.size = None
        elif value.isdigit() and len(value) < 20:
            self.size = int(value)
        else:
            self.problem = "bad_extended_header"


def lost_extension(block: bytes) -> Extension | None:
    """Returns what to hold against the member behind a bad block: its name or size may have stood in that block.

    Type flag or usual name is enough to take the block for an extended header: one of them may be what is broken.
    """
    name = block[:100]
    if block[TYPE] in EXTENDED or b"@LongLink" in name or b"PaxHeader" in name:
        return Extension(problem="bad_extended_header")
    return None


def pax_records(payload: bytes) -> list[tuple[bytes, bytes]] | None:
    """Returns the (keyword, value) pairs of a PAX header, or None where its framing is broken.

    A record is `length keyword=value newline`; the length counts the whole record in bytes (POSIX.1-2001, pax).
    """
    records = []
    position, end = 0, len(payload)
    while position < end and payload[position]:
        space = payload.find(b" ", position, position + 20)
        digits = payload[position:space]
        if space < 0 or not digits.isdigit():
            return None
        stop = position + int(digits)
        keyword, equals, value = payload[space + 1 : stop - 1].partition(b"=")
        if stop > end or stop <= space + 1 or payload[stop - 1] != 0x0A or not equals:
            return None
        records.append((keyword, value))
        position = stop
    return records


class RefusedHeader(NamedTuple):
    """A member that cannot be read by offset and size, or a block that is no header.

    reason: `bad_checksum`, `bad_size`, `truncated`, `sparse`, `hard_link`, `symlink`, `special_file`, `unknown_type`,
    `bad_extended_header`, `extended_header_too_large` or `no_name`. offset: of its header, in bytes.
    """

    name: str
    reason: str
    offset: int


class FileStamp(NamedTuple):
    """A stamp that tells one state of a file from another without a read. No device is in it: mounts renumber it."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStamp:
        """Returns the stamp of a stat result."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    @classmethod
    def of_source(cls, stat: tuple[int, int, int, int, int]) -> FileStamp:
        """Returns the stamp of a source's stat: of an object of a store, that of its version."""
        _, inode, size_bytes, mtime_ns, ctime_ns = stat
        return cls(size_bytes, mtime_ns, ctime_ns, inode)


@dataclass(frozen=True, kw_only=True, eq=False)
class TarIndex:
    """Where each regular member of one tar lies, in archive order; of names only a leading `./` is removed.

    name_bytes: uint8, the names one after another, UTF-8 as stored in the tar.
    name_bounds: int64 [num_members + 1], where each name begins in `name_bytes`.
    offsets: int64 [num_members], of the data in the tar file. sizes: int64 [num_members], in bytes.
    refused: members that are there and cannot be read, each with its reason. Directories are in neither list.
    """

    path: str
    stamp: FileStamp
    name_bytes: npt.NDArray[np.uint8]
    name_bounds: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    refused: tuple[RefusedHeader, ...] = ()

    @classmethod
    def of(
        cls,
        path: str,
        stamp: FileStamp,
        names: Sequence[bytes],
        offsets: npt.ArrayLike,
        sizes: npt.ArrayLike,
        refused: Sequence[RefusedHeader] = (),
    ) -> TarIndex:
        """Returns the index of these members."""
        bounds = np.zeros(len(names) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, names), np.int64, len(names)), out=bounds[1:])
        name_bytes = np.frombuffer(b"".join(names), np.uint8)
        return cls(
            path=path,
            stamp=stamp,
            name_bytes=name_bytes,
            name_bounds=bounds,
            offsets=np.array(offsets, np.int64),
            sizes=np.array(sizes, np.int64),
            refused=tuple(refused),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def names(self) -> list[str]:
        """The member names; bytes that are not UTF-8 become surrogates, as `os.fsdecode` does it."""
        flat, bounds = self.name_bytes.tobytes(), self.name_bounds.tolist()
        return [flat[a:b].decode("utf-8", "surrogateescape") for a, b in itertools.pairwise(bounds)]

    @cached_property
    def rows(self) -> dict[str, int]:
        """Name to row, for many lookups. Of members with one name the last counts, as when tar extracts them."""
        return {name: row for row, name in enumerate(self.names)}

    def find(self, name: str) -> int | None:
        """Returns the row of a member, or None, by its name in the tar or in `names`."""
        row = self.rows.get(name.removeprefix("./"))
        return self.rows.get(name) if row is None else row

    def find_refused(self, name: str) -> RefusedHeader | None:
        """Returns why the member of this name is not in the index, or None where the tar has no trace of it."""
        name = name.removeprefix("./")
        return next((refused for refused in reversed(self.refused) if refused.name == name), None)


_RECORD = 10_240
_MAX_KEY = 180
"""Characters of a member's key: with its extension it stays below the 255 bytes of a file name."""
_HASHED = re.compile(r"%%[0-9a-f]{32}\Z")


def member_key(sample_id: str) -> str:
    """Returns an id as the part of a member's name before its first dot: ASCII letters, digits, `-`, `_`, `%`.

    Any other byte of its UTF-8 is written as `%2F`, so that a dot or a slash in an id does not divide a sample in two,
    and no name leads out of a folder. Different ids have different keys. A key of more than 180 characters is cut, and
    ends in `%%` and the id's xxh3-128; the id itself stands in the sample's JSON. An empty id is such a hash.
    """
    data = sample_id.encode("utf-8", "surrogateescape")
    key = quote_from_bytes(data, safe="").replace(".", "%2E").replace("~", "%7E")
    if 0 < len(key) <= _MAX_KEY:
        return key
    return f"{key[: _MAX_KEY - 34]}%%{xxhash.xxh3_128_hexdigest(data)}"


def id_of_key(key: str) -> str | None:
    """Returns the id whose key this is, None where the key was cut."""
    return None if _HASHED.search(key) else unquote_to_bytes(key).decode("utf-8", "surrogateescape")


class _Writes(Protocol):
    """A file that writes all that it is given, or raises."""

    def write(self, data: bytes, /) -> int: ...


class TarWriter:
    """Writes regular files into a tar, in the order in which they come: time 0, no owner, mode 644, GNU long names."""

    def __init__(self, file: _Writes) -> None:
        self._file = file
        self.size_bytes = 0
        """What was written so far."""

    def add(self, name: str, data: bytes) -> int:
        """Appends a member and returns where its data begins."""
        header = _header(name, len(data))
        self._file.write(b"".join((header, data, bytes(-len(data) % BLOCK))))
        offset = self.size_bytes + len(header)
        self.size_bytes = offset + len(data) + -len(data) % BLOCK
        return offset

    def close(self) -> None:
        """Ends the tar; the file stays open."""
        end = 2 * BLOCK
        end += -(self.size_bytes + end) % _RECORD
        self._file.write(bytes(end))
        self.size_bytes += end


def member_size(name: str, size: int) -> int:
    """Returns the bytes that a member takes, its header and padding too."""
    return len(_header(name, size)) + size + -size % BLOCK


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
