"""Tars for tests: written by tarfile, or header by header."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
END = bytes(1024)


def tar_bytes(
    members: Iterable[tuple[str, bytes]], *, tar_format: int = tarfile.USTAR_FORMAT, mtime: float = 0
) -> bytes:
    """Returns an archive of regular members. Raises ValueError for a name that the format cannot hold."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tar_format, encoding="utf-8", errors="surrogateescape") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            tar.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def clips(count: int, *, size: int = 700) -> list[tuple[str, bytes]]:
    return [(f"clips/{i:04d}.flac", bytes([i % 251 + 1]) * size) for i in range(count)]


def header(
    name: bytes,
    size: int | bytes,
    *,
    kind: bytes = b"0",
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    signed: bool = False,
    checksum: bytes | None = None,
) -> bytes:
    """Returns one header block with a right checksum, or with the given one."""
    field = b"%011o\0" % size if isinstance(size, int) else size
    block = bytearray(512)
    block[:100] = name.ljust(100, b"\0")
    block[100:124] = b"0000644\0" * 3
    block[124:136] = field
    block[136:148] = b"%011o\0" % 0
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257:265] = magic.ljust(8, b"\0")
    block[345:500] = prefix.ljust(155, b"\0")
    total = sum(block) - (256 * sum(byte >= 128 for byte in block) if signed else 0)
    block[148:156] = b"%06o\0 " % total if checksum is None else checksum
    return bytes(block)


def member(name: bytes, data: bytes, **kwargs: object) -> bytes:
    return header(name, len(data), **kwargs) + padded(data)  # type: ignore[arg-type]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(records: dict[str, str | bytes], *, kind: bytes = b"x") -> bytes:
    payload = b""
    for key, value in records.items():
        body = b" " + key.encode() + b"=" + (value.encode() if isinstance(value, str) else value) + b"\n"
        length = len(body) + 1
        while len(b"%d" % length) + len(body) != length:
            length += 1
        payload += b"%d" % length + body
    return member(b"PaxHeaders/x", payload, kind=kind)


def settle(path: Path) -> None:
    """Waits until the clock has left the tick in which a file was last changed."""
    while time.time_ns() < os.stat(path).st_ctime_ns + 30_000_000:
        time.sleep(0.005)
