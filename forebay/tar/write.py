"""Tars that forebay writes: the same members give the same bytes, and names that no reader takes for something else."""

from __future__ import annotations

import re
import tarfile
from typing import Protocol
from urllib.parse import quote_from_bytes, unquote_to_bytes

import xxhash

_BLOCK, _RECORD = 512, 10_240
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
        self._file.write(b"".join((header, data, bytes(-len(data) % _BLOCK))))
        offset = self.size_bytes + len(header)
        self.size_bytes = offset + len(data) + -len(data) % _BLOCK
        return offset

    def close(self) -> None:
        """Ends the tar; the file stays open."""
        end = 2 * _BLOCK
        end += -(self.size_bytes + end) % _RECORD
        self._file.write(bytes(end))
        self.size_bytes += end


def member_size(name: str, size: int) -> int:
    """Returns the bytes that a member takes, its header and padding too."""
    return len(_header(name, size)) + size + -size % _BLOCK


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
