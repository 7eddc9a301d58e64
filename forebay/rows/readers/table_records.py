"""Rows of tables one by one, whatever they mean: typed ones by row group, a CSV as a whole, JSON lines in runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import TABLE_FILES, SourceColumns
from forebay.errors import ManifestError
from forebay.rows.kept_columns import require_columns
from forebay.rows.manifest import VIDEO_FIELDS, WHOLE_FILE, InlineName, Meaning, MediaPlace, Record
from forebay.rows.meanings.canonical_chat import text_error
from forebay.rows.meanings.chat_fields import IN_STRUCTS, LEARNT_OF_ROW, MESSAGES, asked_of, with_asked
from forebay.rows.meanings.image_class import declared_classes, named_labels, written_label
from forebay.rows.reader import IDS, FilePiece, RowReader, Sink, one_a_file
from forebay.rows.readers import json_lines
from forebay.rows.readers.arrow_files import (
    DEFAULTS,
    HfFile,
    damaged,
    holds_media,
    is_bytes,
    is_list,
    list_place,
    media_part,
)
from forebay.rows.readers.csv_tables import WantedColumns, read_csv
from forebay.rows.readers.json_lines import JsonError, LineWhere, array_members, is_array, not_lines, reading
from forebay.store.layout import Group
from forebay.store.remote.raw.raw_sources import at_hand

BLOCK_BYTES = 2 * 1024 * 1024
MAX_LINE_BYTES = 16 * 1024 * 1024


_FORMS = {
    **dict.fromkeys((".csv", ".tsv"), "text"),
    **dict.fromkeys((".jsonl", ".json"), "lines"),
    **dict.fromkeys((".parquet", ".arrow"), "typed"),
}
_ROWS_PER_PART = 16_384
_ROWS_PER_BATCH = 4096
_IMAGES_PER_BATCH = 32
"""Rows that are held at once where their images are read with them."""
Places = Sequence[MediaPlace | str | JsonError | None]


def line_runs(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields (first byte, end, number of the first line from 1) of runs of whole lines, of about 2 MiB.

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
    facts = piece.meaning.facts
    schemes = tuple(f"data:{group}/" for group in facts.groups if group in facts.lists)
    marks = [*(scheme.encode() for scheme in schemes), *([b"input_audio"] if "data:audio/" in schemes else [])]

    def given(place: LineWhere, line: bytes, fields: dict[str, Any]) -> dict[str, Any]:
        is_inside = any(mark in line for mark in marks)
        return renamed(_with_places(fields, line, place, schemes) if is_inside else fields)

    made = functools.partial(_line_record, Path(piece.path), given)
    for place, line in piece_lines(piece):
        rows.take(functools.partial(made, place, line), where=f"{piece.name}, {place}", number=place.number)


def _line_record(
    path: Path,
    given: Callable[[LineWhere, bytes, dict[str, Any]], dict[str, Any]],
    place: LineWhere,
    line: bytes,
) -> Record:
    try:
        return Record(given(place, line, json_lines.parse_object(line)))
    except JsonError as err:
        if err.reason is None:
            raise not_lines(path, place, str(err)) from err
        raise text_error(err) from err


def _with_places(value: Any, line: bytes, place: LineWhere, schemes: tuple[str, ...]) -> Any:
    """Returns fields of a line with names in the place of items that stand in it, as `data:` URIs or `input_audio`."""
    match value:
        case {"type": "input_audio", "input_audio": {"data": str(data)}} if "data:audio/" in schemes:
            return {"type": "audio", "audio": _place_in(line, data, place) or data}
        case dict():
            return {name: _with_places(each, line, place, schemes) for name, each in value.items()}
        case list():
            return [_with_places(each, line, place, schemes) for each in value]
        case str() if value.startswith(schemes):
            return _place_in(line, value.partition(";base64,")[2], place) or value
    return value


def _place_in(line: bytes, text: str, place: LineWhere) -> str | None:
    """Returns the name of base64 in a line; None where it stands there with escapes, or is none."""
    encoded = text.encode("utf-8", "surrogatepass")
    start = line.find(encoded) if encoded else -1
    if start < 0:
        return None
    return InlineName.of(f"{place}, byte {start}", offset=place.at + start, size=len(encoded))


def piece_lines(piece: FilePiece) -> Iterator[tuple[LineWhere, bytes]]:
    """Returns the objects of some lines, or of a whole file, with their places; blank lines are none."""
    return json_lines.manifest_objects(Path(piece.path), piece.start, piece.stop, piece.first or 1)


JSONL_READER = RowReader(read=read_lines, runs=line_runs)


def form_of(path: Path) -> str:
    """Returns whether a table is "text", JSON "lines" or "typed". Raises ManifestError for other names."""
    if (form := _FORMS.get(path.suffix.lower())) is None:
        wanted = ", ".join(name[1:] for name in TABLE_FILES)
        raise ManifestError(f"{path}: the name of a table ends in {wanted}; rename it", code="FB205")
    return form


def table_runs(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields the runs of a table: a CSV as a whole, JSON lines and row groups in runs.

    Raises ManifestError for other names.
    """
    runs = {"text": one_a_file, "lines": line_runs, "typed": file_runs}
    yield from runs[form_of(path)](path)


def read_table(piece: FilePiece, rows: Sink) -> None:
    """Gives the rows of a piece of a table.

    The image column holds a path relative to the table, in a CSV also a JSON list of paths; of parquet and arrow bytes
    too, as in `hf`. In a CSV messages are JSON, labels one value or a JSON list, and an empty value is none; rows that
    cannot be used are `bad_row` or `bad_text` there too. Raises ManifestError for a file that is no such table.
    """
    form = form_of(Path(piece.path))
    if form == "typed":
        read_typed(piece, rows)
    elif form == "lines":
        read_lines(piece, rows, renamed=lambda fields: _renamed(fields, piece.source.columns, piece.meaning.columns))
    else:
        _read_csv(piece, rows)


def _renamed(fields: Mapping[str, Any], columns: SourceColumns, names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a line under the names that rows have."""
    given = {name: column for name in names if (column := getattr(columns, name)) not in (None, name)}
    rest = {name: value for name, value in fields.items() if name not in given and name not in given.values()}
    return rest | {name: fields[column] for name, column in given.items() if column in fields}


def _read_csv(piece: FilePiece, rows: Sink) -> None:
    source, columns, beside = piece.source, piece.source.columns, piece.meaning.read_beside
    own = [getattr(columns, name) or name for name in (*piece.meaning.columns, "id")]
    wanted = frozenset((*own, *(IDS if columns.id is None else ()), *beside, *source.keep_columns))
    table = read_csv(Path(piece.path), WantedColumns(wanted, columns.image))
    names: list[str] = table.schema.names
    named = _named_columns(piece, names)
    named = {name: name for name in beside if name in {*names} - {*named.values()}} | named
    require_columns(source.keep_columns, names, where=piece.path)
    found = {name: table.values[column].to_pylist() for name, column in named.items()}
    kept = {name: table.part(name).to_pylist() for name in source.keep_columns}
    for row in range(len(table)):
        if (problem := table.problems.get(row)) is not None:
            rows.reject(None, *problem)
            continue
        fields = {name: value for name, values in found.items() if (value := values[row]) is not None}
        fields |= {name: _said(fields[name]) for name in LEARNT_OF_ROW if name in fields}
        if "label" in fields:
            fields["label"] = written_label(fields["label"])
        nested = ("messages", "image", "audio", *VIDEO_FIELDS)
        record = Record(fields, None, {name: values[row] for name, values in kept.items()}, nested)
        rows.take(record, where=f"{piece.name}, row {row + 1}", number=row + 1)
    rows.unused.add({*names} - {*named.values(), *source.keep_columns}, rows=len(table))


def _said(text: str) -> bool | str:
    """Returns what a cell says of whether a row is learnt; a text that says nothing of it as it is."""
    return {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}.get(text.lower(), text)


def _named_columns(piece: FilePiece, names: Sequence[str], *, messages: str = MESSAGES[0]) -> dict[str, str]:
    """Returns the columns that are read of a table, by the names that rows have.

    messages: what the column of that name may be called too. Raises ManifestError where the table lacks what is read,
    or a column by another name than its default.
    """
    columns, meaning = piece.source.columns, piece.meaning
    given = {name: getattr(columns, name) for name in (*meaning.columns, "id")}
    for name, column in given.items():
        if column not in names and column != getattr(DEFAULTS, name):
            raise _no_column(piece, f"{column} (source.columns.{name})", names)
    found = {name: column for name in given if (column := given[name] or name) in names}
    if columns.id is None:
        found |= {name: name for name in IDS if name in names}
    if "messages" in given and "messages" not in found and columns.messages == MESSAGES[0] and messages in names:
        found["messages"] = messages
    if (lacking := meaning.lacking({*found, *{*meaning.beside} & {*names}}, columns)) is not None:
        raise _no_column(piece, lacking, names)
    return found


def file_runs(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields (first row group or record batch, end, first row) of runs of a data file."""
    starts = HfFile(path).part_starts()
    start = 0
    while start < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[start] + _ROWS_PER_PART, side="right")) - 1
        stop = max(start + 1, last)
        yield start, stop, starts[start]
        start = stop


def read_typed(piece: FilePiece, rows: Sink, *, media: type[ItemColumn] | None = None) -> None:
    """Gives the rows of some row groups or record batches of a data file.

    The image column is `Image()` (bytes, path or both), binary, strings (paths relative to the data file), or a list of
    one of these; null is no image. Messages are a list or its JSON, left at their default also `conversations`; a
    ClassLabel is its names. Other columns are counted by name, or refused row by row as `canonical` does. No image is
    read where parquet's statistics say that all are there. media: the columns that name the images, where these are
    others. Raises ManifestError for missing columns and other types.
    """
    file = HfFile(Path(piece.path))
    images = _media_columns(file, piece, media)
    named = _named_columns(piece, file.schema.names, messages=MESSAGES[1])
    require_columns(piece.source.keep_columns, file.schema.names, where=piece.path)
    text = {name: column for name, column in named.items() if name not in piece.meaning.facts.groups}
    text |= {name: name for name in piece.source.keep_columns}
    taken = {*text.values(), *(name for each in images.values() for name in each.names)}
    held = _held(file, piece.meaning, taken)
    classes = declared_classes(file.schema, text["label"]) if "label" in text else None
    leaves = [leaf for each in images.values() for leaf in each.leaves]
    columns = list(dict.fromkeys([*text.values(), *held, *leaves]))
    is_large = any(map(_holds_bytes, (file.schema.field(name).type for name in held)))
    most = min([_ROWS_PER_BATCH, *(each.batch_rows for each in images.values())])
    parts, number = range(piece.start, piece.stop), piece.first
    try:
        starts = np.asarray(file.part_starts())
        for batch in file.batches(parts, columns, batch_rows=_IMAGES_PER_BATCH if is_large else most):
            runs = np.searchsorted(starts, np.arange(number, number + len(batch)), side="right")
            values = {name: batch[column].to_pylist() for name, column in text.items()}
            values |= {name: _values(batch[name]) for name in held}
            if classes is not None:
                values["label"] = [*named_labels(values["label"], classes)]
            places = {name: [*each.places(batch, number, runs.tolist())] for name, each in images.items()}
            for position in range(len(batch)):
                fields = {name: c[position] for name, c in values.items()}
                record = _record(piece, fields, {name: each[position] for name, each in places.items()})
                row = number + position + 1
                rows.take(record, where=f"{piece.name}, row {row}", number=row)
            number += len(batch)
    except (OSError, pa.ArrowException) as err:
        raise damaged(piece.path, err) from err
    rows.unused.add(set(file.schema.names) - taken - {*held}, rows=number - piece.first)
    rows.classes = classes


def _media_columns(file: HfFile, piece: FilePiece, media: type[ItemColumn] | None) -> dict[str, ItemColumn]:
    """The columns that say which items rows have, by the field that each becomes where items are fields."""
    if media is not None:
        return {piece.meaning.facts.groups[-1]: media(file, piece)}
    if not piece.meaning.in_fields:
        facts, names = piece.meaning.facts, {*file.schema.names}
        # Rows about videos alone need no column of images, nor of clips.
        is_of_videos = facts.has_videos and names & {*VIDEO_FIELDS}
        absent = {group for group in facts.lists if is_of_videos and getattr(DEFAULTS, group) not in names}
        listed = [group for group in facts.groups if group in facts.lists]
        return {
            group: ItemColumn(file, piece, group)
            for group in listed
            if group not in absent or getattr(piece.source.columns, group) != getattr(DEFAULTS, group)
        }
    named = {group: getattr(piece.source.columns, group) for group in piece.meaning.facts.groups}
    return {
        group: ItemColumn(file, piece, group)
        for group, column in named.items()
        if group in piece.meaning.columns and column in file.schema.names
    }


def _record(piece: FilePiece, fields: dict[str, Any], places: Mapping[str, Places]) -> Record:
    if not piece.meaning.in_fields:
        return Record(fields, places, nested=("messages",))
    own = {name: found[0] if len(found) == 1 else [*found] or None for name, found in places.items()}
    return Record(fields | own, nested=("messages",))


def _held(file: HfFile, meaning: Meaning, taken: set[str]) -> list[str]:
    """The columns that are looked at for whether a row has a value; one of images is no `mask` of what is learnt."""
    names = file.schema.names
    said = {name for name in meaning.read_beside if name in names and not _holds_bytes(file.schema.field(name).type)}
    return [name for name in names if name in (meaning.refuses | said) - taken]


def _values(column: pa.Array) -> list[Any]:
    """The values of a column; of one that holds encoded media whether each row has any, as True or None."""
    if not _holds_bytes(column.type):
        values: list[Any] = column.to_pylist()
        return values
    is_there = column.is_valid()
    if is_list(column.type):
        is_there = pc.fill_null(pc.greater(pc.list_value_length(column), 0), fill_value=False)
    return [found or None for found in is_there.to_pylist()]


def _holds_bytes(kind: pa.DataType) -> bool:
    if is_list(kind):
        return _holds_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_holds_bytes(child.type) for child in kind)
    return is_bytes(kind)


def _no_column(piece: FilePiece, what: str, names: Sequence[str]) -> ManifestError:
    """Returns the error for a table without a column that is read."""
    *others, last = (name for name in piece.meaning.columns if name != "id")
    listed = f"{', '.join(others)} or {last}" if others else last
    return ManifestError(
        f"{piece.path}: no column {what}; it has {', '.join(names)}; set {listed} under [source.columns]", code="FB202"
    )


_NOUNS: Mapping[Group, str] = {"audio": "sound", "image": "images"}


class ItemColumn:
    """The column of items of a data file: what of it has to be read to know which rows have how many, and where.

    names: of the columns that say so. leaves: what of them is read. batch_rows: rows that are held at once.
    """

    names: Sequence[str]
    leaves: Sequence[str]
    batch_rows = _ROWS_PER_BATCH

    def __init__(self, file: HfFile, piece: FilePiece, group: Group = "image") -> None:
        self._name = name = getattr(piece.source.columns, group)
        self.names = [name]
        if name not in file.schema.names:
            raise _no_column(piece, f"{name} (source.columns.{group})", file.schema.names)
        kind = file.schema.field(name).type
        self._is_list = is_list(kind)
        element = kind.value_type if self._is_list else kind
        if not holds_media(element):
            raise ManifestError(
                f"{piece.path}: column {name} is {kind}, wanted {_NOUNS[group]} as bytes or path, or a list of them",
                code="FB203",
            )
        children = {field.name for field in element} if pa.types.is_struct(element) else set()
        self.leaves = [name]
        self._kind, self._asked = group, sorted(children & IN_STRUCTS.get(group, frozenset()))
        self._all_inside = False
        has_bytes = "bytes" in children or is_bytes(element)
        inside = next((p for p in file.leaves(name) if is_bytes(element) or p.endswith(".bytes")), name)
        if has_bytes and file.is_filled(inside):
            beside = ("path", *self._asked) if children else ()
            paths = [path for path in file.leaves(name) if path.rpartition(".")[2] in beside]
            if paths or not self._is_list:
                self.leaves, self._all_inside = paths, True
        if has_bytes and not self._all_inside:
            self.batch_rows = _IMAGES_PER_BATCH

    def places(self, batch: pa.RecordBatch, first: int, runs: list[int]) -> Iterator[Places]:
        """Yields the items of each row: a place in the file, a path, or None if there are neither bytes nor a path.

        Of one of which something is asked that cannot be, the error that says so.
        """
        if not self.leaves:
            yield from ([_inside(first + row, 0, run)] for row, run in enumerate(runs))
            return
        column = batch[self._name]
        elements = column.flatten() if self._is_list else column.drop_null()
        lengths = (
            pc.fill_null(pc.list_value_length(column), 0) if self._is_list else pc.cast(column.is_valid(), "int32")
        )
        data, named = media_part(elements, "bytes"), media_part(elements, "path")
        nothing: list[Any] = [None] * len(elements)
        inside = nothing if data is None else data.is_valid().to_pylist()
        paths = nothing if named is None else named.to_pylist()
        asked = pa.table({n: pc.struct_field(elements, n) for n in self._asked}).to_pylist() or nothing
        start = 0
        for row, (count, run) in enumerate(zip(lengths.to_pylist(), runs, strict=True)):
            found = [
                _inside(first + row, at - start, run) if self._all_inside or inside[at] else paths[at]
                for at in range(start, start + count)
            ]
            yield [self._with_asked(*each) for each in zip(found, asked[start : start + count], strict=True)]
            start += count

    def _with_asked(self, place: MediaPlace | str | None, said: Mapping[str, Any] | None) -> Any:
        if place is None or said is None:
            return place
        try:
            return with_asked(place, self._kind, asked_of(said, self._kind, f"column {self._name}")[0])
        except JsonError as err:
            return err


def _inside(row: int, position: int, run: int) -> MediaPlace:
    member = f"row {row + 1}, image {position + 1}" if position else ""
    return MediaPlace(None, member, list_place(row, position), WHOLE_FILE, run)
