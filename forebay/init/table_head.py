"""The head of a table: its columns, some of its rows, and how many rows there are; never the whole file."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ConfigError, ManifestError
from forebay.init.folder_files import SAMPLE, spread
from forebay.rows.meanings.image_class import declared_classes, named_labels
from forebay.rows.readers.arrow_files import HfFile, holds_numbers, is_bytes, is_list
from forebay.rows.readers.csv_tables import WantedColumns, read_csv, read_json_lines
from forebay.rows.readers.json_lines import JsonError, is_array, manifest_objects, parse_object

Form = Literal["csv", "jsonl", "data"]
Row = Mapping[str, Any]

_HEAD_BYTES = 512 * 1024
_PIECES, _PIECE_BYTES = 8, 64 * 1024
_COUNTED_BYTES = 256 * 1024 * 1024
"""Lines of a file up to this size are counted, those of a larger one estimated."""
_DELIMITERS = {".tsv": "\t", ".csv": ",;\t|"}
_MAX_ARRAY = 64 * 1024 * 1024
"""An array of objects up to this size is read whole, of a larger one the first rows."""
_MAX_BLOB = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TableHead:
    """The facts in the head of a table.

    names: its columns. rows: some of the rows, spread over the file, without what is in `blobs`. num_rows: about so
    many, exactly where `is_exact`. blobs: columns of encoded media. matrices: columns of features. delimiter: of a CSV.
    """

    path: Path
    form: Form
    names: tuple[str, ...]
    rows: tuple[Row, ...]
    num_rows: int
    is_exact: bool = True
    blobs: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    delimiter: str = ","

    def values(self, name: str) -> list[Any]:
        """Returns what a column holds in the rows that were read, without null and empty texts."""
        found = (row.get(name) for row in self.rows)
        return [value for value in found if value is not None and value != ""]

    def strings(self, name: str | None) -> list[str]:
        """Returns the texts of a column in the rows that were read; none of no column."""
        return [value for value in self.values(name or "") if isinstance(value, str)]

    def counts(self, name: str) -> Counter[str]:
        """Returns how often each value stands in the whole of a column; of a huge table in the rows that were read."""
        try:
            column = None if name in self.classes else self._whole(name)
        except (ManifestError, KeyError, ValueError):  # a name that is not UTF-8 among them
            column = None
        if column is None:
            return Counter(map(str, self.values(name)))
        found = {each["values"]: each["counts"] for each in pc.value_counts(column).to_pylist()}
        return Counter({str(value): count for value, count in found.items() if value not in (None, "")})

    def _whole(self, name: str) -> pa.ChunkedArray | None:
        """Returns a column of a table; None where the table is huge, and a text."""
        if self.form == "data":
            return HfFile(self.path).columns([name])[name]
        if os.path.getsize(self.path) > _COUNTED_BYTES:
            return None
        wanted = WantedColumns(frozenset((name,)), name)
        read = read_csv(self.path, wanted) if self.form == "csv" else read_json_lines(self.path, wanted, kept=())
        return read.values[name]

    def encoded(self, name: str) -> Iterator[bytes]:
        """Yields some of the encoded media of a column of `blobs`."""
        file, left = HfFile(self.path), _MAX_BLOB
        for part in spread(range(len(file.part_starts()) - 1), 4):
            for batch in islice(file.batches(range(part, part + 1), [name], batch_rows=8), 3):
                values = (each for value in batch.column(0).to_pylist() for each in as_list(value))
                for data in (each.get("bytes") if isinstance(each, dict) else each for each in values):
                    if isinstance(data, bytes):
                        left -= len(data)
                        yield data
                if left < 0:
                    break


def as_list(value: Any) -> list[Any]:
    """Returns the values of a list, of its JSON, or a value alone."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
    return value if isinstance(value, list) else [value]


def read_table(path: Path) -> TableHead:
    """Returns the head of a table; its form is that of its name. Raises ConfigError for what is no such table."""
    suffix = path.suffix.lower()
    try:
        if suffix in (".parquet", ".arrow"):
            return _data(path)
        return _lines(path) if suffix in (".jsonl", ".json") else _delimited(path, _DELIMITERS.get(suffix, ",;\t|"))
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror or err}; check its permissions") from err


def _data(path: Path) -> TableHead:
    try:
        file = HfFile(path)
        blobs = tuple(column.name for column in file.schema if _is_blob(column.type))
        matrices = tuple(column.name for column in file.schema if holds_numbers(column.type))
        light = [name for name in dict.fromkeys(file.schema.names) if name not in {*blobs, *matrices}]
        classes = {name: found for name in light if (found := declared_classes(file.schema, name))}
        rows = tuple(_data_rows(file, light, classes)) if light else ()
    except (ManifestError, pa.ArrowException) as err:
        raise ConfigError(f"{path} cannot be read: {err}") from err
    names = tuple(file.schema.names)
    return TableHead(path, "data", names, rows, len(file), blobs=blobs, matrices=matrices, classes=classes)


def _data_rows(file: HfFile, names: list[str], classes: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """Yields some of the rows, with the names of a ClassLabel, or of a list of them, instead of numbers."""
    parts = spread(range(len(file.part_starts()) - 1), 8)
    for part in parts:
        wanted = max(1, SAMPLE // len(parts))
        for batch in islice(file.batches(range(part, part + 1), names, batch_rows=wanted), 1):
            columns = batch.slice(0, wanted).to_pydict()
            columns |= {name: [*named_labels(columns[name], of_name)] for name, of_name in classes.items()}
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _is_blob(kind: pa.DataType) -> bool:
    """Says whether a column holds encoded media in itself: bytes, structs of bytes, or lists of these."""
    if is_list(kind):
        return _is_blob(kind.value_type)
    return any(inner.name == "bytes" for inner in kind) if pa.types.is_struct(kind) else is_bytes(kind)


def _lines(path: Path) -> TableHead:
    names: dict[str, None] = {}
    rows: list[Row] = []
    size, read, members = os.path.getsize(path), 0, _members(path) if is_array(path) else None
    for line in _some_lines(path, size) if members is None else spread(members):
        read += len(line) + 1
        if not line.strip():
            continue
        try:
            rows.append(parse_object(line))
        except JsonError as err:
            raise ConfigError(f"{path} is no table of JSON lines: a line {err}; write an object a line") from err
        names.update(dict.fromkeys(rows[-1]))
    if not rows:
        raise ConfigError(f"{path} holds no JSON lines; name a file with an object a line")
    if members is None:
        num_rows, is_exact = _count(path, size, read / len(rows))
    else:
        is_exact = size <= _MAX_ARRAY
        num_rows = len(members) if is_exact else round(size * len(members) / sum(map(len, members)))
    return TableHead(path, "jsonl", tuple(names), tuple(rows), num_rows, is_exact=is_exact)


def _members(path: Path) -> list[bytes]:
    """Returns the objects of an array; of a large one the first ones."""
    try:
        found = (data for _, data in manifest_objects(path))
        return list(found if os.path.getsize(path) <= _MAX_ARRAY else islice(found, SAMPLE))
    except ManifestError as err:
        raise ConfigError(str(err)) from err


def _delimited(path: Path, delimiters: str) -> TableHead:
    size = os.path.getsize(path)
    lines = [line.decode("utf-8", "replace") for line in _some_lines(path, size)]
    if not lines:
        raise ConfigError(f"{path} is empty; name a table with a header line")
    delimiter = max(delimiters, key=lambda each: (each in lines[0], _regularity(lines[:20], each)))
    names, *rest = _records(lines, delimiter)
    rows = tuple(dict(zip(names, row, strict=True)) for row in rest if len(row) == len(names))
    read = sum(len(line.encode("utf-8", "surrogateescape")) + 1 for line in lines[1:])
    num_rows, is_exact = _count(path, size, read / max(1, len(rest)))
    return TableHead(path, "csv", tuple(names), rows, max(0, num_rows - 1), is_exact=is_exact, delimiter=delimiter)


def _records(lines: list[str], delimiter: str) -> list[list[str]]:
    try:
        # As `kind = "table"` reads them: in a TSV quotation marks are text, unless the header line is quoted.
        if delimiter in "\t|" and not lines[0].startswith('"'):
            return [line.split(delimiter) for line in lines]
        return [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except csv.Error:
        return [line.split(delimiter) for line in lines]


def _regularity(lines: list[str], delimiter: str) -> float:
    """Returns the share of lines with as many fields as the first one, a little more for more fields."""
    counts = [len(row) for row in _records(lines, delimiter)]
    if not counts or counts[0] < 2:
        return 0.0
    return counts.count(counts[0]) / len(counts) + min(counts[0], 50) / 1000


def _some_lines(path: Path, size: int) -> Iterator[bytes]:
    """Yields the first line, and up to `SAMPLE` others from the beginning and from places further on."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf")
        first, *lines = _whole_lines(head, is_last=size <= _HEAD_BYTES) or [b""]
        if first:
            yield first
        if size <= _HEAD_BYTES:
            yield from spread(lines)
            return
        yield from lines[: SAMPLE // 2]
        for piece in range(1, _PIECES + 1):
            file.seek(size * piece // (_PIECES + 1))
            yield from _whole_lines(file.read(_PIECE_BYTES), is_last=False)[1:][: SAMPLE // 2 // _PIECES]


def _whole_lines(data: bytes, *, is_last: bool) -> list[bytes]:
    lines = data.split(b"\n")
    if not is_last or not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


def _count(path: Path, size: int, line_bytes: float) -> tuple[int, bool]:
    """Returns how many lines a file has, and whether they were counted."""
    if size > _COUNTED_BYTES:
        return round(size / max(line_bytes, 1.0)), False
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n"), True
