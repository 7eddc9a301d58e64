"""The lines of a text file, plain or compressed, a block at a time: a file of any size costs the memory of one line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import xxhash

from forebay.errors import ManifestError
from forebay.rows.readers.json_lines import BOM
from forebay.store.files import write_bytes
from forebay.store.layout import TEXT_INDEX, Array
from forebay.store.memo import Stat, is_same, is_young, stat_now
from forebay.store.remote.raw.raw_sources import at_hand, kept_path

CODECS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}
"""How names of compressed texts end, and the codec of pyarrow that reads them."""
_LF, _CR = 10, 13
_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(b" \t\n\r\x0b\x0c")] = True
"""What `bytes.strip` takes off."""
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 20
"""Bytes of the first read and of later ones: the first lines of a large file cost little, all of them few reads."""
_HEAD_BYTES = 1 << 16


_log = logging.getLogger(__name__)
ENDING = ".lines"
LINES = 4096
"""Lines from one mark to the next."""
_VERSION = 1
_MARK = np.dtype([("offset", "<i8"), ("line", "<i8"), ("rows", "<i8"), ("digest", "V16")])


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
            file: Any = held.enter_context(open(held.enter_context(at_hand(path)), "rb"))
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
    size, most = _FIRST_BYTES, len(BOM) + max_bytes + len(b"\r\n") + 1
    # The beginning of a line whose end has not been read; of a long one no more than is wanted of it.
    held, num_held = bytearray(), 0
    while chunk := file.read(size):
        size = min(2 * size, _MOST_BYTES)
        if num_held:
            end = chunk.find(b"\n") + 1 or len(chunk)
            held += chunk[: min(end, most - len(held))]
            num_held += end
            if chunk[end - 1] != _LF:
                continue
            place = (block := _block(bytes(held), place, raw_bytes=num_held, max_bytes=max_bytes)).after
            yield block
            chunk = chunk[end:]
        if end := chunk.rfind(b"\n") + 1:
            place = (block := _block(chunk[:end], place, raw_bytes=end, max_bytes=max_bytes)).after
            yield block
        held, num_held = bytearray(chunk[end : end + most]), len(chunk) - end
    if num_held:
        yield _block(bytes(held), place, raw_bytes=num_held, max_bytes=max_bytes)


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
    is_row = np.asarray(stops > starts)
    # Few lines begin with a space, so few are looked at one by one.
    for line in np.flatnonzero(is_row & _IS_SPACE[letters[np.minimum(starts, len(letters) - 1)]]).tolist():
        is_row[line] = bool(data[starts[line] : min(stops[line], starts[line] + max_bytes + 1)].strip())
    return LineBlock(place, data, begins, starts, stops, is_row)


_CHECKSUM_BYTES, _LENGTH_BYTES = 16, 8
_FIRST = (LinePlace(), bytes(16))


@dataclass(frozen=True, slots=True)
class LineIndex:
    """Where the lines of a large file begin, kept under the cache root: a slice reads its own lines and no others.

    There is a mark every 4,096 lines: the place where the line begins, and a digest of all bytes before it, which is
    the digest of the mark before it and of the bytes in between. A file that has grown, or was edited somewhere, keeps
    the marks before the change. An index is never believed where its file may be another one: its stat is compared, as
    `hashes.memo` does it, and where that moved the bytes before a mark are hashed before the mark is used.

    stat: of the file that was read; seen_ns: when that began.

    max_bytes: `source.max_sample_bytes`, which decides whether a line of spaces is blank. marks: places with the digest
    of what lies before them, the beginning first. num_rows: of the whole file, None where it was not read to its end.
    """

    path: str
    stat: Stat
    seen_ns: int
    max_bytes: int
    marks: tuple[tuple[LinePlace, bytes], ...] = (_FIRST,)
    num_rows: int | None = None

    def mark_of(self, row: int) -> LinePlace:
        """Returns the last mark at which a row is still to come, at most 4,096 lines before it."""
        rows = [place.rows for place, _ in self.marks]
        return self.marks[int(np.searchsorted(rows, row, side="right")) - 1][0]

    def knows(self, row: int | None) -> bool:
        """Whether the place of a row is known to within 4,096 lines, or that there is none.

        row: None asks for the number of rows.
        """
        return self.num_rows is not None or (row is not None and row < self.marks[-1][0].rows)


def index_path(path: str | os.PathLike[str], *, cache_root: str | os.PathLike[str]) -> Path:
    """Returns where the index of a file is kept: named by the hash of its real path, or of its URL."""
    return kept_path(path, Path(cache_root) / TEXT_INDEX, ENDING)


def indexed_text(path: Path) -> tuple[str | None, bool]:
    """Returns the file that a kept index is of, None where it is not known from here; and whether that is still it.

    Raises ManifestError where the index is damaged.
    """
    try:
        index = _read(path)
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ManifestError(f"the index {path} is damaged ({err}); it is made again where it is needed") from err
    if index_path(index.path, cache_root=path.parents[1]).name != path.name:
        return None, False
    return index.path, is_same(stat_now(Path(index.path)), index.stat)


def line_index(path: Path, row: int | None = None, *, max_bytes: int, cache_root: Path | None) -> LineIndex:
    """Returns an index of a file as it is now that knows a row, counted from 0; None: all of them.

    The kept index is used, mended and gone on with as far as the row; what was learned is kept.
    """
    place = None if cache_root is None else index_path(path, cache_root=cache_root)
    seen_ns = time.time_ns()
    stat = stat_now(path)
    if stat is None:  # reading says why
        next(line_blocks(path, max_bytes=max_bytes), None)
        raise ManifestError(f"cannot read manifest {path}; check the path and its permissions", code="FB201")
    fresh = LineIndex(os.fspath(path), stat, seen_ns, max_bytes)
    kept = _kept(place, fresh)
    found = _believed(kept, fresh)
    if not found.knows(row):
        found = _extended(found, path, row)
    if place is not None and found is not kept and len(found.marks) > 1 and stat_now(path) == stat:
        _keep(found, place)
    return found


def _kept(place: Path | None, fresh: LineIndex) -> LineIndex:
    """Returns the kept index of a file, the empty one where there is none that can be used."""
    if place is None or not place.exists():
        return fresh
    try:
        index = _read(place)
    except (OSError, ValueError, KeyError, TypeError) as err:
        _log.warning("the index %s of %s is damaged (%s); it is made again", place, fresh.path, err)
        return fresh
    return index if index.max_bytes == fresh.max_bytes else fresh


def _believed(index: LineIndex, fresh: LineIndex) -> LineIndex:
    """Returns an index without what the file as it is now does not bear out."""
    if index is fresh or (is_same(index.stat, fresh.stat) and not is_young(index.stat, index.seen_ns)):
        return index
    with at_hand(Path(fresh.path)) as local, open(local, "rb") as file:
        return replace(fresh, marks=index.marks[: _unchanged(file, index.marks)])


def _unchanged(file: BinaryIO, marks: tuple[tuple[LinePlace, bytes], ...]) -> int:
    """Returns how many of some marks the bytes of a file bear out."""
    for number in range(1, len(marks)):
        (before, digest), (place, wanted) = marks[number - 1], marks[number]
        if _chained(file, digest, before.offset, place.offset) != wanted:
            return number
    return len(marks)


def _chained(file: BinaryIO, before: bytes, start: int, stop: int) -> bytes | None:
    """Returns the digest of a mark; None where the file ends before it."""
    state = xxhash.xxh3_128(before)
    file.seek(start)
    while start < stop:
        part = file.read(min(1 << 20, stop - start))
        if not part:
            return None
        state.update(part)
        start += len(part)
    return state.digest()


def _extended(index: LineIndex, path: Path, row: int | None) -> LineIndex:
    """Returns an index that goes on behind its last mark until it knows a row, or to the end of the file."""
    marks, num_rows = list(index.marks), None
    with at_hand(path) as local, open(local, "rb") as file:
        last = marks[-1][0]
        for block in line_blocks(path, max_bytes=index.max_bytes, place=last):
            for place in _places(block, marks[-1][0].line + LINES):
                digest = _chained(file, marks[-1][1], marks[-1][0].offset, place.offset)
                if digest is None:  # it was cut off meanwhile
                    return replace(index, marks=tuple(marks))
                marks.append((place, digest))
            last = block.after
            if row is not None and row < marks[-1][0].rows:
                break
        else:
            num_rows = last.rows
    return replace(index, marks=tuple(marks), num_rows=num_rows)


def _places(block: LineBlock, line: int) -> Iterator[LinePlace]:
    """Yields the places of every 4,096th line that begins in a block, from a line on.

    Not what is right behind the block: a last line without an end may go on when the file has grown.
    """
    counted = np.concatenate([[0], np.cumsum(block.is_row)])
    for at in range(line - block.place.line, len(block.is_row), LINES):
        yield LinePlace(int(block.begins[at]), block.place.line + at, block.place.rows + int(counted[at]))


def _keep(index: LineIndex, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, _to_bytes(index))
    except OSError as err:
        _log.info("the index of %s is not kept at %s: %s", index.path, path, err.strerror)


def _to_bytes(index: LineIndex) -> bytes:
    marks = np.zeros(len(index.marks), _MARK)
    for number, (place, digest) in enumerate(index.marks):
        marks[number] = (*astuple(place), np.void(digest))
    document = {
        "version": _VERSION,
        "path": os.fsencode(index.path).decode("utf-8", "surrogateescape"),
        "stat": list(index.stat),
        "seen_ns": index.seen_ns,
        "max_bytes": index.max_bytes,
        "num_rows": index.num_rows,
        "num_marks": len(marks),
    }
    head = json.dumps(document).encode("ascii")
    body = len(head).to_bytes(_LENGTH_BYTES, "little") + head + marks.tobytes()
    return xxhash.xxh3_128_digest(body) + body


def _read(path: Path) -> LineIndex:
    """Returns a kept index. Raises OSError, ValueError, KeyError or TypeError for what forebay did not write."""
    data = path.read_bytes()
    checksum, body = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != checksum:
        raise ValueError("its checksum is another one")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    document: dict[str, Any] = json.loads(body[_LENGTH_BYTES:end])
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}, wanted {_VERSION}")
    marks = np.frombuffer(body[end:], _MARK)
    if len(marks) != document["num_marks"] or not len(marks):
        raise ValueError(f"{len(marks)} marks, wanted {document['num_marks']}")
    digests = marks["digest"].tobytes()
    columns = zip(*(marks[name].tolist() for name in ("offset", "line", "rows")), strict=True)
    return LineIndex(
        path=document["path"],
        stat=tuple(document["stat"]),
        seen_ns=document["seen_ns"],
        max_bytes=document["max_bytes"],
        marks=tuple((LinePlace(*place), digests[16 * n : 16 * n + 16]) for n, place in enumerate(columns)),
        num_rows=document["num_rows"],
    )
