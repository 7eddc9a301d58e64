"""The lines of a text file, plain or compressed, a block at a time: a file of any size costs the memory of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from forebay.errors import ManifestError
from forebay.rows.readers.json_lines import BOM
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import at_hand

CODECS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}
"""How names of compressed texts end, and the codec of pyarrow that reads them."""

_LF, _CR = 10, 13
_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(b" \t\n\r\x0b\x0c")] = True
"""What `bytes.strip` takes off."""
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 20
"""Bytes of the first read and of later ones: the first lines of a large file cost little, all of them few reads."""
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Where lines begin: byte `offset` of a file, at line `line` (from 1), before which `rows` lines are not blank."""

    offset: int = 0
    line: int = 1
    rows: int = 0


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Lines of a file that follow each other.

    place: of the first one. data: their bytes, of a line that is too long only the first ones. begins: int64 [lines],
    where each begins in the file, and where the last one ends. starts, stops: int64 [lines], where in `data` each line
    lies, without its end and without a byte order mark. is_row: bool [lines], it is not blank.
    """

    place: LinePlace
    data: bytes
    begins: Array
    starts: Array
    stops: Array
    is_row: Array

    @property
    def after(self) -> LinePlace:
        """Where the lines behind the block begin."""
        lines, rows = len(self.is_row), int(np.count_nonzero(self.is_row))
        return LinePlace(int(self.begins[-1]), self.place.line + lines, self.place.rows + rows)


def plain_name(name: str) -> str:
    """Returns the name of a file without the ending of its compression."""
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in CODECS else name


def codec_of(path: Path) -> str | None:
    """Returns the codec that a file is compressed by, as its name says; None for one that is not."""
    return CODECS.get(path.suffix)


def line_blocks(path: Path, *, max_bytes: int, place: LinePlace | None = None) -> Iterator[LineBlock]:
    """Yields the lines of a file in blocks, from its beginning or from a place on that was found before.

    A line ends with LF or CRLF; a byte order mark at the beginning is taken off; lines of nothing but ASCII whitespace
    are blank. Of a line of more than `max_bytes` the first `max_bytes` + 1 are there, so that a file without any line
    end costs no more memory than that, whatever it unpacks to. Raises ManifestError, with the name, for a file that
    cannot be read, and for compressed bytes that are truncated or damaged. Of a compressed file every place but the
    first costs what lies before it.
    """
    with _unpacked(path) as file:
        place = place or LinePlace()
        if place.offset:
            file.seek(place.offset)
        try:
            yield from _blocks(file, place, max_bytes=max_bytes)
        except (OSError, ValueError) as err:
            _refuse(path, err)


def head_of(path: Path) -> bytes:
    """Returns the first bytes of a text, unpacked. Raises ManifestError as `line_blocks` does."""
    with _unpacked(path) as file:
        try:
            return bytes(file.read(_HEAD_BYTES))
        except (OSError, ValueError) as err:
            _refuse(path, err)


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[Any]:
    """Yields a file whose `read(n)` gives n bytes, fewer at the end only."""
    with contextlib.ExitStack() as held:
        try:
            local = held.enter_context(at_hand(path))
            file: Any = held.enter_context(open(local, "rb"))
        except OSError as err:
            _refuse(path, err)
        codec = codec_of(path)
        if codec is not None:
            if not file.read(1):
                _refuse(path, OSError("it is empty"))
            file.seek(0)
            import pyarrow as pa

            file = held.enter_context(pa.CompressedInputStream(file, codec))
        yield file


def _refuse(path: Path, err: Exception) -> NoReturn:
    """Raises ManifestError for what reading a file raised."""
    if isinstance(err, OSError) and err.errno is not None:
        raise ManifestError(
            f"cannot read manifest {path}: {err.strerror}; check the path and its permissions", code="FB201"
        ) from err
    raise ManifestError(
        f"{path} cannot be unpacked ({codec_of(path)}): {err}; it is truncated or damaged: copy it again, or write it "
        "again",
        code="FB205",
    ) from err


def _blocks(file: Any, place: LinePlace, *, max_bytes: int) -> Iterator[LineBlock]:
    size, carried = _FIRST_BYTES, _Carried()
    while chunk := file.read(size):
        size = min(2 * size, _MOST_BYTES)
        end = chunk.rfind(b"\n") + 1
        if not end:
            carried.add(chunk, max_bytes)
            continue
        if carried.size_bytes:  # one line ends here, which may be a long one
            end = chunk.find(b"\n") + 1
            carried.add(chunk[:end], max_bytes)
            place = (block := _block(carried.taken(), place, raw_bytes=carried.size_bytes, max_bytes=max_bytes)).after
            yield block
            chunk, end = chunk[end:], chunk.rfind(b"\n") + 1 - end
        if end:
            place = (block := _block(chunk[:end], place, raw_bytes=end, max_bytes=max_bytes)).after
            yield block
        carried = _Carried()
        carried.add(chunk[end:], max_bytes)
    if carried.size_bytes:
        yield _block(carried.taken(), place, raw_bytes=carried.size_bytes, max_bytes=max_bytes)


class _Carried:
    """The beginning of a line whose end has not been read; of a long one no more than is wanted of it."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._parts: list[bytes] = []
        self._held = 0

    def add(self, part: bytes, max_bytes: int) -> None:
        """Adds bytes to the line."""
        self.size_bytes += len(part)
        most = len(BOM) + max_bytes + len(b"\r\n")
        if part and self._held <= most:
            self._parts.append(part[: most + 1 - self._held])
            self._held += len(self._parts[-1])

    def taken(self) -> bytes:
        """Returns what is held of the line."""
        return b"".join(self._parts)


def _block(data: bytes, place: LinePlace, *, raw_bytes: int, max_bytes: int) -> LineBlock:
    """Returns the block of whole lines. raw_bytes: of the file that they are; more than there are of a long line."""
    letters = np.frombuffer(data, np.uint8)
    is_cut = raw_bytes != len(data)
    stops = np.flatnonzero(letters == _LF)
    if is_cut or not data.endswith(b"\n"):
        stops = np.append(stops, len(data))
    starts = np.concatenate([[0], stops[:-1] + 1])
    begins = np.append(starts, raw_bytes) + place.offset
    if place.line == 1 and data.startswith(BOM):
        starts[0] = len(BOM)
    if not is_cut:
        stops = stops - ((stops > starts) & (letters[stops - 1] == _CR))
    return LineBlock(place, data, begins, starts, stops, _is_row(data, letters, starts, stops, max_bytes))


def _is_row(data: bytes, letters: Array, starts: Array, stops: Array, max_bytes: int) -> Array:
    """Which lines are not blank: bool [lines]. Few lines begin with a space, so few are looked at one by one."""
    is_row = stops > starts
    for line in np.flatnonzero(is_row & _IS_SPACE[letters[np.minimum(starts, len(letters) - 1)]]).tolist():
        is_row[line] = bool(data[starts[line] : min(stops[line], starts[line] + max_bytes + 1)].strip())
    return np.asarray(is_row)
