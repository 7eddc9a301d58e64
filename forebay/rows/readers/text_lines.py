"""Texts in lines, plain or JSON: of a block of lines to rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import ConfigError, ManifestError, TextError
from forebay.rows.manifest import joined
from forebay.rows.readers.json_lines import JsonError, not_text, parse_object
from forebay.rows.readers.line_blocks import Block, codec_of, head_of, line_blocks, plain_name
from forebay.rows.readers.line_index import LINES, find_row
from forebay.rows.readers.text_json import JsonLines
from forebay.rows.readers.text_rows import BAD_TEXT, TOO_LARGE, LineFile, Wanted, named_columns
from forebay.store.layout import Array

PLAIN = ".txt"
"""How names of plain text end."""


def list_lines(file: LineFile, wanted: Wanted, *, cache_root: Path | None) -> None:
    """Adds the rows of a file that are wanted; nothing behind the last one is looked at.

    Raises ManifestError for a file that is no text, and with the line for what is no such object.
    """
    rows, path = file.rows, file.path
    max_bytes, base, place = rows.source.max_sample_bytes, rows.count, None
    first = wanted.next_from(base)
    if first is None:
        return
    taker = _taker(file)
    if first - base > LINES and codec_of(path) is None:
        place, num_rows = find_row(path, first - base, max_bytes=max_bytes, cache_root=cache_root)
        if num_rows is not None and first - base >= num_rows:
            rows.count += num_rows
            return
    for block in line_blocks(path, max_bytes=max_bytes, place=place):
        before, lines = base + block.place.rows, np.flatnonzero(block.is_row)
        chosen = wanted.among(before, len(lines))
        if len(chosen):
            taker.take(block, lines[chosen], before + chosen)
        rows.count = base + block.after.rows
        if rows.is_enough or wanted.next_from(rows.count) is None:
            break
    taker.finish()


def _taker(file: LineFile) -> JsonLines | PlainLines:
    path, source = file.path, file.rows.source
    if Path(plain_name(path.name)).suffix != PLAIN or _begins_with_object(path, source):
        return JsonLines(file)
    _require_no_fields(path, source)
    head = None if codec_of(path) is None else head_of(path)
    if (problem := not_text(path, head=head)) is not None:
        raise problem
    return PlainLines(file)


def _require_no_fields(path: Path, source: SourceConfig) -> None:
    """Raises ConfigError or ManifestError where settings ask for what lines of plain text do not have."""
    named = named_columns(source)
    if named or source.keep_columns:
        setting, value = ("columns", named) if named else ("keep_columns", list(source.keep_columns))
        raise ConfigError(
            f"{path} is plain text, whose lines have no fields, and source.{setting} is {value}; leave {setting} out, "
            "or write JSON lines",
            code="FB205",
        )
    if source.languages is not None:
        raise ManifestError(
            f"{path} is plain text, whose lines have no language, and source.languages is {list(source.languages)}; "
            "leave source.languages out, or write JSON lines of text and language"
        )


def _begins_with_object(path: Path, source: SourceConfig) -> bool:
    """Whether the first line is a JSON object with a text: such a file is JSON lines, whatever its name says."""
    for block in line_blocks(path, max_bytes=source.max_sample_bytes):
        for line in np.flatnonzero(block.is_row).tolist():
            data = block.data[block.starts[line] : block.stops[line]]
            try:
                return data.lstrip()[:1] == b"{" and source.columns.text in parse_object(data)
            except JsonError:
                return False
    return False


@dataclass(frozen=True, slots=True)
class PlainLines:
    """Lines that are texts: columns are made of a whole block, one by one only where some of it is no text."""

    file: LineFile

    def take(self, block: Block, lines: Array, rows: Array) -> None:
        """Adds lines as rows; a line that is too long or no UTF-8 costs itself."""
        is_good = self._is_good(block, lines, rows)
        lines, rows = lines[is_good], rows[is_good]
        numbers = pa.array(block.place.line + lines)
        columns = {
            "row": pa.array(rows),
            "sample_id": joined(f"{self.file.stem}/", numbers),
            "text": _packed(block, lines),
        }
        self.file.rows.add_columns(columns, group=self.file.group)
        self.file.rows.note_all(columns["sample_id"])

    def finish(self) -> None:
        """Does nothing: lines of plain text have no fields that could be missing."""

    def _is_good(self, block: Block, lines: Array, rows: Array) -> Array:
        most = self.file.rows.source.max_sample_bytes
        is_good = np.ones(len(lines), bool)
        is_long = block.stops[lines] - block.starts[lines] > most
        is_clean = not is_long.any() and _is_text(block.data[block.starts[lines[0]] : block.stops[lines[-1]]])
        for at in [] if is_clean else range(len(lines)):
            data = block.data[block.starts[lines[at]] : block.stops[lines[at]]]
            try:
                require_text(data, most)
            except TextError as err:
                is_good[at] = False
                self.file.fail(int(rows[at]), block.place.line + int(lines[at]), err.reason, str(err))
        return is_good


def _is_text(data: bytes) -> bool:
    """Whether bytes are UTF-8; line ends part the lines, so this holds for each of them."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def require_text(data: bytes, max_bytes: int) -> None:
    """Raises TextError for what costs a sample: too many bytes, or none that are UTF-8."""
    if len(data) > max_bytes:
        raise TextError(TOO_LARGE, f"has more than {max_bytes} bytes, which is source.max_sample_bytes")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise TextError(BAD_TEXT, f"is not UTF-8: {err}") from err


def _packed(block: Block, lines: Array) -> pa.Array:
    """Returns lines of a block as large_string: their bytes without what is in between."""
    starts, stops = block.starts[lines], block.stops[lines]
    offsets = np.concatenate([[0], np.cumsum(stops - starts)])
    edges = np.zeros(len(block.data) + 1, np.int8)
    edges[starts] += 1  # a line is not empty, so no two edges of a kind are at one place
    edges[stops] -= 1
    letters = np.frombuffer(block.data, np.uint8)[np.cumsum(edges[:-1], dtype=np.int8).view(bool)]
    return pa.LargeStringArray.from_buffers(len(lines), pa.py_buffer(offsets), pa.py_buffer(letters))
