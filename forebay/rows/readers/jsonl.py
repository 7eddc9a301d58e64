"""`kind = "jsonl"`: one JSON object a line, or an array of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forebay.rows.meanings.canonical_chat import text_error
from forebay.rows.reader import FilePiece, RowReader, Sink
from forebay.rows.readers import json_lines
from forebay.rows.readers.json_lines import JsonError, LineWhere, array_members, is_array, not_lines, reading
from forebay.rows.record import Record
from forebay.store.remote.raw.raw_sources import at_hand

BLOCK_BYTES = 8 * 1024 * 1024

MAX_LINE_BYTES = 16 * 1024 * 1024


def line_runs(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields (first byte, end, number of the first line from 1) of runs of whole lines, of about 8 MiB.

    Of an array: of its objects. Raises ManifestError where the file cannot be read, or a line has more than 16 MiB.
    """
    if is_array(path):
        yield from _member_runs(path)
        return
    start, number = 0, 1
    with reading(path), at_hand(path) as local, open(local, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            end = block.rfind(b"\n") + 1
            while not end and (more := file.read(BLOCK_BYTES)):
                block += more
                end = block.rfind(b"\n") + 1
                if (block.find(b"\n") if end else len(block)) > MAX_LINE_BYTES:
                    raise not_lines(path, number, f"more than {MAX_LINE_BYTES} bytes; name a file of JSON lines")
            end = end or len(block)
            yield start, start + end, number
            start, number = start + end, number + block.count(b"\n", 0, end)
            file.seek(start)


def _member_runs(path: Path) -> Iterator[tuple[int, int, int]]:
    start = stop = 0
    first = number = 1
    for number, (at, data) in enumerate(array_members(path), 1):
        start = start or at
        if stop and at + len(data) - start > BLOCK_BYTES:
            yield start, stop, first
            start, first = at, number
        stop = at + len(data)
    if stop:
        yield start, stop, first


def read_lines(
    piece: FilePiece, rows: Sink, *, renamed: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields
) -> None:
    """Gives the objects of some lines, or of a whole file; blank lines are none.

    A line of images is a conversation as `canonical` takes it with `image` or `images` (a path or paths, relative to
    the manifest) and optional `sample_id` or `id`; or an image with `label`, with `text`, or alone. A line of a
    recording is as `Recorded` takes it. Raises ManifestError, with the line, for what is no JSON object; a line
    that has a field twice fails. renamed: gives the fields of a line the names that rows have.
    """
    made = functools.partial(_record, Path(piece.path), renamed)
    for place, line in piece_lines(piece):
        rows.take(functools.partial(made, place, line), where=f"{piece.name}, {place}", number=place.number)


def _record(path: Path, renamed: Callable[[dict[str, Any]], dict[str, Any]], place: LineWhere, line: bytes) -> Record:
    try:
        return Record(renamed(json_lines.parse_object(line)))
    except JsonError as err:
        if err.reason is None:
            raise not_lines(path, place, str(err)) from err
        raise text_error(err) from err


def piece_lines(piece: FilePiece) -> Iterator[tuple[LineWhere, bytes]]:
    """Returns the objects of some lines, or of a whole file, with their places; blank lines are none."""
    return json_lines.manifest_objects(Path(piece.path), piece.start, piece.stop, piece.first or 1)


READER = RowReader(read=read_lines, runs=line_runs)
