"""The head of a table: its columns, some of its rows, and how many rows there are; never the whole file.

Which column may hold what, by its name and by what stands in its rows; and the words of whole rows.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ConfigError, ManifestError
from forebay.init.folder_files import SAMPLE, spread
from forebay.rows.meanings.chat_fields import ANSWERS, IMAGES, MESSAGES, NAMED_BY, VIDEOS
from forebay.rows.meanings.chat_forms import two_rows
from forebay.rows.meanings.image_class import declared_classes, named_labels
from forebay.rows.readers.arrow_files import HfFile, holds_numbers, is_bytes, is_list
from forebay.rows.readers.csv_tables import WantedColumns, read_csv, read_json_lines
from forebay.rows.readers.json_lines import JsonError, is_array, manifest_objects, parse_object
from forebay.store.layout import Group

Form = Literal["csv", "jsonl", "data"]
Row = Mapping[str, Any]
_HEAD_BYTES = 512 * 1024
_PIECES, _PIECE_BYTES = 8, 64 * 1024
_COUNTED_BYTES = 256 * 1024 * 1024
"""Lines of a file up to this size are counted, those of a larger one estimated."""
_DELIMITERS = {".tsv": "\t", ".csv": ",;\t|"}
_MAX_ARRAY = 64 * 1024 * 1024
"""An array of objects up to this size is read whole, of a larger one the first rows."""


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
        file, left = HfFile(self.path), (64 * 1024 * 1024)
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
            begins = f"the line that begins with {line[:40].decode(errors='replace')!r}"
            raise ConfigError(f"{path} is no table of JSON lines: {begins} {err}; write an object a line") from err
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
    lines = [line.decode("utf-8", "replace") for line in _some_lines(path, size) if line.strip()]
    if not lines:
        raise ConfigError(f"{path} is empty; name a table with a header line")
    delimiter = max(delimiters, key=lambda each: (each in lines[0], _regularity(lines[:20], each)))
    names, *rest = _records(lines, delimiter)
    rows = tuple(dict(zip(names, row, strict=True)) for row in rest if len(row) == len(names))
    read = sum(len(line.encode("utf-8", "surrogateescape")) + 1 for line in lines[1:])
    num_lines, is_exact = _count(path, size, read / max(1, len(rest)))
    # A quoted value may hold line ends.
    num_rows = len(rest) if num_lines == len(lines) else max(0, num_lines - 1)
    is_exact &= num_lines == len(lines) or len(rest) == len(lines) - 1
    return TableHead(path, "csv", tuple(names), rows, num_rows, is_exact=is_exact, delimiter=delimiter)


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
    """Returns how many lines a file has that are not blank, and whether they were counted."""
    if size > _COUNTED_BYTES:
        return round(size / max(line_bytes, 1.0)), False
    with open(path, "rb") as file:
        return sum(not line.isspace() for line in file), True


NAMES: dict[str, list[str]] = {
    role: names.split()
    for role, names in {
        "text": "text sentence transcription transcript normalized_text raw_text raw_transcription target utterance "
        "words label_text normalized caption",
        "language": "language lang locale language_code lang_code lang_id language_id",
        "id": "sample_id id clip_id utt_id utterance_id segment_id uid key audio_id utt",
        "question": "question query prompt instruction input problem",
        "answer": "answer response output caption solution label text",
        "messages": "messages conversations conversation dialogue",
        "label": "label labels class class_name class_label category categories target fine_label coarse_label tags "
        "species",
    }.items()
}
"""Usual names of what a column holds, the likeliest first."""

_FEW = 100
_ENOUGH = 0.5
_CODE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8}){0,2}")
_LANGUAGES = """
af am ar as az ba be bg bn bo br bs ca cs cy da de el en es et eu fa fi fil fo fr ga gl gu ha haw he hi hr ht hu hy id
ig is it ja jv jw ka kk km kn ko la lb ln lo lt lv mg mi mk ml mn mr ms mt my ne nl nn no oc or pa pl ps pt ro ru rw sa
sd si sk sl sn so sq sr su sv sw ta te tg th tk tl tr tt ug uk ur uz vi wo xh yi yo yue zh zu
"""


@dataclass(frozen=True, slots=True)
class LikelyColumn:
    """A column that may be what is looked for. score: the likelier the more. folder: its paths are relative to."""

    name: str
    score: float
    folder: Path | None = None


def path_columns(table: TableHead, extensions: Iterable[str], *, folders: Sequence[Path]) -> list[LikelyColumn]:
    """Returns the columns that hold paths of files that are there, the likeliest first.

    folders: where relative paths may begin, the table's own first.
    """
    ends, found = frozenset(extensions), []
    for name in table.names:
        values = written_paths(table, name)
        named = [value for value in values if os.path.splitext(value)[1].lower() in ends]
        if len(named) < _ENOUGH * len(values) or not named:
            continue
        best = max(((_share_there(named, folder), -number, folder) for number, folder in enumerate(folders)))
        if best[0] >= _ENOUGH:
            found.append(LikelyColumn(name, best[0], best[2]))
    return sorted(found, key=lambda each: -each.score)


def written_paths(table: TableHead, name: str) -> list[str]:
    """Returns the paths that a column holds, as they are written: texts, lists of texts, or `path` of mappings."""
    named = (named_in(each) for value in table.values(name) for each in as_list(value))
    return [each for each in named if each and "\0" not in each]


def name_columns(table: TableHead, audio: Sequence[str]) -> list[LikelyColumn]:
    """Returns the columns that name recordings without their extensions. audio: the names that there are."""
    stems = {form.rpartition(".")[0] for name in audio for form in (name, name.rpartition("/")[2])}
    found = []
    for column in (name for name in table.names if name not in stems):
        values = [str(value) for value in table.values(column) if isinstance(value, str | int)]
        share = sum(value in stems for value in values) / max(1, len(values))
        if share >= _ENOUGH and len(set(values)) == len(values):
            found.append(LikelyColumn(column, share))
    return sorted(found, key=lambda each: -each.score)


def _share_there(values: Sequence[str], folder: Path) -> float:
    looked, there = spread(values, 40), 0
    for value in looked:
        with contextlib.suppress(OSError, ValueError):
            there += (folder / value).is_file()
    return there / len(looked)


def likely_columns(table: TableHead, role: str, *, taken: Iterable[str] = ()) -> list[LikelyColumn]:
    """Returns the columns that may hold a role, the likeliest first.

    Their scores are 1 to 2 for a usual name, the first of these most, and below 1 for the content alone: running text
    that seldom repeats, codes of languages that do. A ClassLabel has 3. Ids differ from row to row.
    """
    usual, by_content, not_taken = NAMES[role], _CONTENTS.get(role), {*taken}
    declared = [name for name in table.classes if role == "label" and name not in not_taken]
    found = [LikelyColumn(name, 3.0) for name in declared]
    for name in (name for name in table.names if name not in not_taken and name not in declared):
        values = table.values(name)
        if name.lower() in usual and (values or not table.rows) and _fits(role, values):
            if role != "id" or _are_ids(values, len(table.rows)):
                found.append(LikelyColumn(name, 2 - usual.index(name.lower()) / len(usual)))
        elif by_content is not None and len(values) >= _ENOUGH * len(table.rows) and by_content(values):
            found.append(LikelyColumn(name, 0.5))
    return sorted(found, key=lambda each: -each.score)


def _are_ids(values: list[Any], num_rows: int) -> bool:
    return all(isinstance(value, str | int) for value in values) and len(set(values)) == num_rows == len(values)


def _fits(role: str, values: list[Any]) -> bool:
    if role == "messages":
        return all(
            isinstance(value, list) or (isinstance(value, str) and value.lstrip()[:1] == "[") for value in values
        )
    if role == "label":
        return all(isinstance(each, str | int) for value in values for each in as_list(value))
    if role in ("text", "question", "answer"):
        return all(isinstance(value, str) for value in values)
    return all(isinstance(value, str | int | float) for value in values)


def _is_prose(texts: list[Any]) -> bool:
    if not texts or not all(isinstance(text, str) for text in texts) or len(set(texts)) < _ENOUGH * len(texts):
        return False
    spaced = sum(" " in text.strip() or _is_unspaced(text) for text in texts)
    return spaced >= _ENOUGH * len(texts) and not any("://" in text for text in texts[:20])


def _is_unspaced(text: str) -> bool:
    """Whether a text is of a script that writes no spaces: Chinese, Japanese, Thai, Lao, Khmer, Burmese."""
    return len(text) > 4 and any("\u0e00" <= c <= "\u0eff" or "\u1000" <= c <= "\u109f" or c >= "\u3040" for c in text)


def _are_languages(values: list[Any]) -> bool:
    different = {str(value) for value in values}
    return len(different) < _FEW and all(map(is_language, different))


_CONTENTS: Mapping[str, Callable[[list[Any]], bool]] = {"text": _is_prose, "language": _are_languages}


def is_language(text: str) -> bool:
    """Says whether a text looks like the code of a language: `hi`, `en-US`, `pt_br`."""
    return _CODE.fullmatch(text) is not None and re.split("[-_]", text.lower())[0] in _LANGUAGES.split()


def languages_of(tables: Iterable[TableHead], name: str | None) -> Counter[str]:
    """Returns how often each language stands in whole columns; of huge tables in the rows that were read."""
    return sum((table.counts(name) for table in tables), Counter()) if name else Counter()


def words_of(row: Row, columns: Mapping[str, str | None]) -> str | None:
    """Returns all words of a row's conversation, None where it holds none; of a pair those of the longer one.

    columns: by role, those that are named.
    """
    if (pair := pair_of(row)) is not None:
        return max((words_of(each, columns) or "" for each in pair), key=len) or None
    for name in (columns["messages"],) if columns.get("messages") else MESSAGES:
        if (found := _words_of_messages(row.get(name or ""))) is not None:
            return found
    named = (columns.get("question") or "question", columns.get("answer") or "answer")
    pairs = ((row.get(asked), row.get(answered)) for asked, answered in (named, *ANSWERS.items()))
    return next((f"{q}\n{a}" for q, a in pairs if isinstance(q, str) and isinstance(a, str)), None)


def pair_of(row: Row) -> tuple[Row, Row] | None:
    """Returns the rows of an answer to prefer and of one to reject; None of a row without both."""
    with contextlib.suppress(JsonError):
        return two_rows(row)
    return None


def are_pairs(rows: Sequence[Row]) -> bool:
    """Whether most rows have an answer to prefer and one to reject."""
    return 2 * sum(pair_of(row) is not None for row in rows) > len(rows)


def _words_of_messages(value: Any) -> str | None:
    messages = [] if isinstance(value, dict) else as_list(value)
    if not all(isinstance(each, dict) for each in messages):
        return None
    if not any(each.get("role") or each.get("from") for each in messages):
        return None
    return "\n".join(_words(each.get("content") or each.get("value")) for each in messages)


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def images_of_row(row: Row, column: str | None = None) -> list[str]:
    """Returns the names of images that a row has, in its fields and in the parts of its messages."""
    found = [each for name in ((column,) if column else IMAGES) for each in as_list(row.get(name))]
    return [each for each in (*found, *_in_parts(row, "image")) if isinstance(each, str) and each]


def videos_of_row(row: Row) -> list[Any]:
    """Returns what names the videos that a row has, in its fields and in the parts of its messages: names, or lists."""
    found = [each for name in NAMED_BY[VIDEOS] for each in as_list(row.get(name))]
    return [each for each in (*found, *_in_parts(row, VIDEOS)) if isinstance(each, str | list) and each]


def in_folder(folder: Path, name: str) -> Path | bytes:
    """Returns the file of a name, of a `data:` URI the bytes; none where these are no base64."""
    if not name.startswith("data:"):
        return folder / name
    with contextlib.suppress(ValueError):
        return base64.b64decode(name.partition(";base64,")[2])
    return b""


def clips_of_row(row: Row, column: str | None = None) -> list[Any]:
    """Returns what names the clips of a row's conversation: texts, or mappings with a path or without one."""
    named = [each for name in ((column,) if column else NAMED_BY["audio"]) for each in as_list(row.get(name))]
    return [each for each in (*named, *_in_parts(row, "audio")) if each]


def named_in(value: Any) -> str:
    """Returns the path that a text or a mapping is; "" where it is none."""
    if isinstance(value, dict):
        value = next((value[name] for name in ("audio", "path", "url") if value.get(name)), "")
    return value if isinstance(value, str) and not value.startswith("data:") else ""


def _in_parts(row: Row, kind: Group) -> list[Any]:
    """Returns what names the items of a kind in the parts of messages; of clips the parts themselves."""
    messages = [each for name in MESSAGES for each in as_list(row.get(name)) if isinstance(each, dict)]
    contents = (message.get("content") for message in messages)
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    if kind == VIDEOS:
        return [part.get(kind) for part in parts]
    if kind == "image":
        urls = (part.get("image_url") for part in parts)
        return [*(part.get("image") for part in parts), *(each.get("url") for each in urls if isinstance(each, dict))]
    return [part for part in parts if part.get("type") in ("audio", "input_audio")]


def classes_of(table: TableHead, name: str) -> Counter[str]:
    """Returns how often each class stands in the rows that were read; a row may have a list of them."""
    return Counter(str(each) for value in table.values(name) for each in as_list(value) if each is not None)
