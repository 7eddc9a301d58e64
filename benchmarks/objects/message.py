"""HTTP/1.1 messages on plain sockets: heads that are parsed, bodies that are passed on in pieces."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit

_MOST_OF_A_HEAD = 1 << 16
PIECE = 1 << 18
"""Bytes that are read at once. With 256 KiB the system calls cost little and the pieces stay in the CPU's cache."""


class GoneError(Exception):
    """The other side of a connection has closed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first line of a message and its headers, as they came."""

    first: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        """Returns the header's value, or None."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def length(self) -> int:
        """Content-Length, 0 without one."""
        return int(self.get("content-length") or 0)

    @property
    def chunked(self) -> bool:
        """Says if the body comes in chunks."""
        return (self.get("transfer-encoding") or "").lower() == "chunked"

    @property
    def closes(self) -> bool:
        """Says if the connection ends with this message."""
        return (self.get("connection") or "").lower() == "close"

    def but(self, *, first: str | None = None, **headers: str | None) -> Head:
        """Returns the head with some headers set anew (`_` stands for `-`) or, where the value is None, gone."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        kept = [(key, value) for key, value in self.headers if key.lower() not in names]
        added = [(key.title(), value) for key, value in names.items() if value is not None]
        return Head(first=first or self.first, headers=(*kept, *added))

    def encode(self) -> bytes:
        """Returns the head's bytes, the empty line included."""
        lines = [self.first, *(f"{key}: {value}" for key, value in self.headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target of a request line, in the words of S3."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]

    @staticmethod
    def of(head: Head) -> Target:
        """Reads a path-style request. A GET without a key is LIST, and its key is the prefix."""
        method, url, _ = head.first.split(" ", 2)
        parts = urlsplit(url)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if method == "GET" and not key:
            return Target(method="LIST", bucket=bucket, key=query.get("prefix", ""), query=query)
        return Target(method=method, bucket=bucket, key=unquote(key), query=query)

    def line(self, key: str) -> str:
        """Returns the request line that asks the same of another key."""
        return f"{self.method} /{self.bucket}/{quote(key)} HTTP/1.1"


class Wire:
    """One end of a connection: reads heads and bodies, writes pieces."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._rest = b""
        self._buffer = bytearray(PIECE)

    def head(self) -> Head:
        """Returns the next message's head. Raises `GoneError` if there is none."""
        raw = self._until(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return Head(first=first, headers=tuple((key.strip(), value.strip()) for key, _, value in pairs))

    def body(self, length: int, *, piece: Callable[[], int] = lambda: PIECE) -> Iterator[memoryview]:
        """Yields `length` bytes in pieces. A piece is valid until the next one."""
        while length > 0:
            most = min(length, PIECE, piece())
            if self._rest:
                part = memoryview(self._rest)[:most]
                self._rest = self._rest[most:]
            else:
                count = self.sock.recv_into(self._buffer, most)
                if not count:
                    raise GoneError
                part = memoryview(self._buffer)[:count]
            length -= len(part)
            yield part

    def unread(self, data: bytes) -> None:
        """The next body begins with `data`."""
        self._rest = data + self._rest

    def chunks(self) -> bytes:
        """Returns a body that comes in chunks, whole. Lists and errors come so, objects do not."""
        found = bytearray()
        while size := int(self._until(b"\r\n").split(b";")[0], 16):
            found += b"".join(bytes(part) for part in self.body(size))
            self._until(b"\r\n")
        self._until(b"\r\n")
        return bytes(found)

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._rest:
            part = self.sock.recv(_MOST_OF_A_HEAD)
            if not part:
                raise GoneError
            self._rest += part
        found, _, self._rest = self._rest.partition(mark)
        return found
