"""Tables that are text: CSV, TSV and JSON lines, read by column; a row that cannot be read costs itself alone.

Of a CSV every value is a text, an empty one null. In a CSV quotation marks quote, as RFC 4180 has it; in a TSV they are
text (Common Voice writes them so), unless the header line is quoted.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import logging
import math
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from forebay.errors import ManifestError
from forebay.rows.kept_columns import TEXT, UNTYPED, parts_of_rows, unified, values_in
from forebay.rows.manifest import columns_of
from forebay.rows.meanings.recordings import span_columns
from forebay.rows.readers import json_lines
from forebay.rows.readers.json_lines import BAD_ROW, BAD_TEXT, BOM, JsonError, not_text, reading
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import at_hand

logger = logging.getLogger(__name__)
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_HEAD_BYTES = 1024 * 1024
_BLOCK_BYTES = 16 * 1024 * 1024
"""The most that a row may have."""
_BLOCK_ROWS = 1 << 15
"""Rows that are Python objects at once."""
_MOST_NAMES = 1_000
_SURROGATES = re.compile("[\ud800-\udfff]")
_NOT_UTF_8 = "\ufdd0\ufdd1"
"""Stands for a byte that is not UTF-8. Unicode keeps these two for such uses, no text has them."""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """One table, of which the wanted columns were read.

    schema: the names of all columns. values: the wanted columns, large_string, and float64 of those of numbers. parts:
    the same as they may be kept, see `kept.part_of`; those of a CSV where they are others. problems: reason and message
    of the rows that cannot be used, all of whose values are null.
    """

    schema: pa.Schema
    num_rows: int
    values: dict[str, pa.ChunkedArray]
    parts: dict[str, pa.ChunkedArray]
    problems: Mapping[int, tuple[str, str]]

    def __len__(self) -> int:
        return self.num_rows

    def columns(self, names: list[str]) -> pa.Table:
        """Returns wanted columns by name."""
        return pa.table({name: self.values[name] for name in names})

    def has_values(self, name: str) -> Array:
        """Returns bool [rows], whether a column has a value."""
        return np.asarray(pc.is_valid(self.values[name]).to_numpy())

    def part(self, name: str) -> pa.ChunkedArray:
        """Returns a column as it may be kept."""
        return self.parts[name] if name in self.parts else pc.cast(self.values[name], UNTYPED)


class WantedColumns(NamedTuple):
    """The columns that are read. first: the one that every such table has. numbers: those of seconds.

    spans: others, which may hold anything, see `pieces`.
    """

    names: frozenset[str]
    first: str
    numbers: tuple[str, ...] = ()
    spans: frozenset[str] = frozenset()

    @property
    def texts(self) -> list[str]:
        """Those that are no numbers."""
        return sorted(self.names.difference(self.numbers))


def read_csv(path: Path, wanted: WantedColumns) -> TextTable:
    """Returns the wanted columns of a CSV or TSV with a header line.

    Commas part the columns of a `.csv`, tabs those of a `.tsv`; where the header has the first column only if something
    else parts them, that is taken, and logged. Raises ManifestError for a file that is no such table.
    """
    form = _form_of(path, wanted)
    repeated = [name for name in form.names if name in wanted.names and form.names.count(name) > 1]
    if repeated:
        raise ManifestError(
            f"{path}: column {repeated[0]} occurs more than once, wanted it once; correct the manifest", code="FB203"
        )
    spans = {name for name in wanted.spans if form.names.count(name) == 1}
    read = [name for name in form.names if name in wanted.names or name in spans]
    table, bad = _csv_table(path, form, read)
    problems = {
        row: (BAD_ROW, f"{path}, row {row + 1}: {count} columns, the header has {len(form.names)}; correct the row")
        for row, count in bad.items()
    }
    count = len(table) + len(problems)
    if problems:
        places: Array = np.full(count, len(table), np.int64)
        places[np.setdiff1d(np.arange(count), list(problems))] = np.arange(len(table))
        table = table.take(pa.array(places, mask=places == len(table)))
    values, parts = {}, {}
    for name in read:
        values[name] = _texts(table[name], name, path, problems)
    for name in wanted.numbers:
        if name in values:
            parts[name] = pc.cast(values[name], UNTYPED)
            values[name] = _seconds(values[name], name, path, problems)
    schema = pa.schema([(name, TEXT) for name in form.names])
    return TextTable(schema=schema, num_rows=count, values=values, parts=parts, problems=problems)


class _Form(NamedTuple):
    delimiter: str
    is_quoted: bool
    names: list[str]


def _form_of(path: Path, wanted: WantedColumns) -> _Form:
    """Returns how a table is written, and what its columns are called."""
    if (problem := not_text(path, wanted="a table in UTF-8 with a header line")) is not None:
        raise problem
    with reading(path), at_hand(path) as local, open(local, "rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(BOM)
    try:
        text = head.decode("utf-8") if len(head) < _HEAD_BYTES else head.rpartition(b"\n")[0].decode("utf-8", "replace")
    except UnicodeDecodeError:
        text = head.decode("utf-8", "replace")
    if not text.strip():
        raise ManifestError(f"{path} is empty, wanted a table with a header line; add it", code="FB204")
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    forms = [_with_delimiter(text, each) for each in (usual, *(_DELIMITERS.keys() - {usual}))]
    found = next((form for form in forms if wanted.first in form.names), None)
    if found is None:  # the names are for a message
        return max(forms, key=lambda form: len(form.names))
    if found.delimiter != usual:
        logger.info("%s: its columns are parted by %s", path, _DELIMITERS[found.delimiter])
    return found


def _with_delimiter(text: str, delimiter: str) -> _Form:
    is_quoted = delimiter in ",;" or text.lstrip("\r\n").startswith('"')
    quoting: Any = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    lines = (line for line in text.splitlines(keepends=True) if line.strip("\r\n"))
    try:
        names = next(csv.reader(lines, delimiter=delimiter, quoting=quoting), [])
    except csv.Error:
        names = []
    return _Form(delimiter, is_quoted, names)


def _csv_table(path: Path, form: _Form, names: list[str]) -> tuple[pa.Table, dict[int, int]]:
    """Returns columns as they are written, large_binary, and how many values each row has that is no such row."""
    bad: dict[int, int] = {}

    def skip(row: Any) -> str:
        bad[row.number - 2] = row.actual_columns  # counted from 1, the header is the first
        return "skip"

    if not names:
        return pa.table({}), {}
    try:
        with at_hand(path) as local:
            is_utf_8, num_lines = _survey(local)
            table = pc_csv.read_csv(
                local if is_utf_8 else _marked(local),
                # One thread: only so rows that are left out are numbered.
                read_options=pc_csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
                parse_options=pc_csv.ParseOptions(
                    delimiter=form.delimiter,
                    quote_char='"' if form.is_quoted else False,
                    newlines_in_values=form.is_quoted,
                    invalid_row_handler=skip,
                ),
                convert_options=pc_csv.ConvertOptions(
                    include_columns=names,
                    column_types=dict.fromkeys(names, UNTYPED),
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
            if form.is_quoted and num_lines != 1 + len(table) + len(bad):
                _require_closed(path, local, form)
    except OSError as err:
        raise ManifestError(
            f"cannot read manifest {path}: {err}; check the path and its permissions", code="FB201"
        ) from err
    except (pa.ArrowException, UnicodeDecodeError) as err:
        raise ManifestError(
            f"{path} cannot be read as a table: {err}; look for a quotation mark that is not closed, or save the table "
            "again",
            code="FB205",
        ) from err
    return table, bad


def _survey(path: Path) -> tuple[bool, int]:
    """Returns whether a file is UTF-8, and how many lines it has."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_utf_8, lines, last = True, 0, b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            lines, last = lines + block.count(b"\n"), block[-1:]
            try:
                is_utf_8 = is_utf_8 and decoder.decode(block) is not None
            except UnicodeDecodeError:
                is_utf_8 = False
    return is_utf_8 and not decoder.getstate()[0], lines + (last not in (b"", b"\n"))


def _require_closed(path: Path, local: Path, form: _Form) -> None:
    """Raises ManifestError for a table in which a quotation mark is not closed: rows would lie inside of a value."""
    with open(local, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, delimiter=form.delimiter, strict=True)
        try:
            deque(reader, maxlen=0)
        except csv.Error as err:
            raise ManifestError(
                f"{path}, line {reader.line_num}: {err}: a quotation mark is not closed, or not doubled inside of a "
                "quoted value; correct the line, or save the table with tabs as .tsv, where quotation marks are text",
                code="FB203",
            ) from err


def _marked(path: Path) -> pa.BufferReader:
    """Returns a table with a mark for every byte that is not UTF-8: pyarrow itself refuses all of such a table."""
    data = path.read_bytes().decode("utf-8", "surrogateescape")
    return pa.BufferReader(_SURROGATES.sub(_NOT_UTF_8, data).encode("utf-8"))


def _texts(column: pa.ChunkedArray, name: str, path: Path, problems: dict[int, tuple[str, str]]) -> pa.ChunkedArray:
    """Returns the texts of a column; a value that is not UTF-8 costs its row."""
    texts = pc.cast(column, TEXT)
    is_bad = pc.fill_null(pc.match_substring(texts, _NOT_UTF_8), fill_value=False)
    for row in np.flatnonzero(np.asarray(is_bad)).tolist():
        problems[row] = (BAD_TEXT, f"{path}, row {row + 1}: column {name} is not UTF-8; save the table as UTF-8")
    return pc.if_else(is_bad, pa.scalar(None, TEXT), texts) if pc.any(is_bad).as_py() else texts


def _seconds(column: pa.ChunkedArray, name: str, path: Path, problems: dict[int, tuple[str, str]]) -> pa.ChunkedArray:
    """Returns the seconds of a column, NaN where it has none; what is no number costs its row."""
    try:
        return pc.cast(column, pa.float64())
    except pa.ArrowInvalid:
        seconds = []
        for row, value in enumerate(column.to_pylist()):
            try:
                seconds.append(math.nan if value is None else float(value))
            except ValueError:
                seconds.append(math.nan)
                message = f"{path}, row {row + 1}: column {name} is {value!r:.40}, wanted seconds as a number"
                problems[row] = (BAD_ROW, f"{message}; correct the row")
        return pa.chunked_array([pa.array(seconds, pa.float64())])


def read_json_lines(path: Path, wanted: WantedColumns, *, kept: Collection[str]) -> TextTable:
    """Returns the wanted fields of JSON lines, or of one array. kept: those whose values may be kept.

    A line that is no object, has a field twice, or a value of another kind costs itself. Raises ManifestError where the
    first line is no object: the file is something else then.
    """
    kinds = dict.fromkeys(wanted.texts, TEXT) | dict.fromkeys(wanted.numbers, pa.float64())
    names: dict[str, None] = {}
    problems: dict[int, tuple[str, str]] = {}
    kept = sorted(kept)
    rows = _objects(path, wanted, kept, names, problems)
    blocks, parts, spans, start = [], [], dict[int, dict[str, Any]](), 0
    while block := [*itertools.islice(rows, _BLOCK_ROWS)]:
        values, of_kept, of_spans = zip(*block, strict=True)
        blocks.append(pa.table(columns_of(values, kinds)))
        parts.append(parts_of_rows(of_kept, kept))
        spans |= {start + at: found for at, found in enumerate(of_spans) if found}
        start += len(block)
    if not blocks:
        raise ManifestError(f"{path} is empty, wanted an object a line; add them", code="FB204")
    table = pa.concat_tables(blocks)
    return TextTable(
        schema=pa.schema([(name, TEXT) for name in names]),
        num_rows=len(table),
        values={name: table[name] for name in kinds}
        | span_columns(_Filled(spans, len(table)), sorted(wanted.spans.intersection(names) - {*kinds})),
        parts={name: unified([pa.chunked_array([part[name]]) for part in parts], name) for name in kept},
        problems=problems,
    )


@dataclass(frozen=True, slots=True)
class _Filled:
    """The rows of a few that say something, and of all others, which say nothing."""

    few: Mapping[int, Mapping[str, Any]]
    count: int

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self.few.get(row, {}) for row in range(self.count))


def _objects(
    path: Path, wanted: WantedColumns, kept: Sequence[str], names: dict[str, None], problems: dict[int, tuple[str, str]]
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]]:
    """Yields of each line its values, those that are kept, and those of spans; nothing of one that costs itself.

    names: gains those of all fields. problems: gains reason and message.
    """
    texts = wanted.texts
    nothing = (None,) * (len(texts) + len(wanted.numbers)), (None,) * len(kept), dict[str, Any]()
    for row, (where, line) in enumerate(json_lines.manifest_objects(path)):
        try:
            found = json_lines.parse_object(line)
            if len(names) < _MOST_NAMES:
                names |= dict.fromkeys(found)
            said = [_text_of(found.get(name)) if name in kept else json_lines.id_of(found, (name,)) for name in texts]
            seconds = [json_lines.seconds_of(found, (name,)) for name in wanted.numbers]
            spans = {name: found[name] for name in found.keys() & wanted.spans}
            yield (*said, *seconds), values_in(found, kept), spans
        except JsonError as err:
            if not row and err.reason is None and not line.lstrip().startswith(b"{"):
                raise json_lines.not_lines(path, where, str(err)) from err
            problems[row] = (err.reason or BAD_ROW, f"{path}, {where}: {err}; correct it")
            yield nothing


def _text_of(value: Any) -> str | None:
    """A kept field that is a text too, for example an id; its number as it is written."""
    return value if value is None or isinstance(value, str) else str(value)
