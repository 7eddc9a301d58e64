"""`kind = "table"` of conversations: CSV, TSV, parquet, JSON lines or arrow with a row a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from forebay.config.data import COLUMNS_READ, TABLE_FILES, Reads, SourceColumns, SourceConfig
from forebay.errors import ManifestError, SampleError
from forebay.rows.kept_columns import require_columns
from forebay.rows.meanings.conversation import IDS, identifier, image_names, text_error
from forebay.rows.meanings.reading import written_label
from forebay.rows.parts import Part, PartRows, PartTask, VisionKind, file_place, part_tasks
from forebay.rows.readers.csv_tables import TextTable, Wanted, read_csv
from forebay.rows.readers.image_hf import file_runs, lacks_text, no_column, read_hf_part, wanted_text
from forebay.rows.readers.image_jsonl import line_blocks, read_jsonl_part
from forebay.rows.readers.json_lines import JsonError, parse_nested
from forebay.store.source_files import SourceFile

_TEXTS, _LINES, _TYPED = (".csv", ".tsv"), (".jsonl", ".json"), (".parquet", ".arrow")


def table_parts(source: SourceConfig, manifests: Sequence[SourceFile], cache_root: str) -> Iterator[PartTask]:
    """Returns the tables: a CSV as a whole, JSON lines and row groups in runs. Raises ManifestError for other names."""
    for number, file in enumerate(manifests):
        ending = file.path.suffix.lower()
        if ending not in (*_TEXTS, *_LINES, *_TYPED):
            wanted = ", ".join(name[1:] for name in TABLE_FILES)
            raise ManifestError(f"{file.path}: the name of a table ends in {wanted}; rename it", code="FB205")
        runs = line_blocks if ending in _LINES else file_runs if ending in _TYPED else _whole
        yield from part_tasks(source, [(number, file)], cache_root, runs)


def _whole(path: Path) -> Iterator[tuple[int, int, int]]:  # noqa: ARG001
    yield 0, 0, 0


def read_table_part(task: PartTask) -> Part:
    """Returns the rows of a part of a table.

    The image column holds a path relative to the table, in a CSV also a JSON list of paths; of parquet and arrow bytes
    too, as in `hf`. Text by `source.columns.messages` (in a CSV as JSON), else `source.columns.question` and
    `source.columns.answer`; optional `system`. Or `source.columns.label`, in a CSV one value or a JSON list, or
    `source.columns.text`, by what is read. An empty value of a CSV is none. Rows that cannot be used have their
    reasons, `bad_row` and `bad_text` of a CSV among them. Raises ManifestError for a file that is no such table.
    """
    ending = Path(task.path).suffix.lower()
    if ending in _TYPED:
        return read_hf_part(task)
    if ending in _LINES:
        return read_jsonl_part(task, renamed=lambda fields: _renamed(fields, task.source.columns, task.reads))
    return _read_csv_part(task)


def _renamed(fields: Mapping[str, Any], columns: SourceColumns, reads: Reads) -> dict[str, Any]:
    """Returns the fields of a line under the names that rows have."""
    names = COLUMNS_READ[reads]
    given = {name: column for name in names if (column := getattr(columns, name)) not in (None, name)}
    rest = {name: value for name, value in fields.items() if name not in given and name not in given.values()}
    return rest | {name: fields[column] for name, column in given.items() if column in fields}


def _read_csv_part(task: PartTask) -> Part:
    source, columns = task.source, task.source.columns
    named = {name: getattr(columns, name) or name for name in COLUMNS_READ[task.reads]}
    if task.reads == "conversations":
        named["system"] = "system"
    if columns.id is None:
        named |= {name: name for name in IDS}
    table = read_csv(Path(task.path), Wanted(frozenset((*named.values(), *source.keep_columns)), columns.image))
    names: list[str] = table.schema.names
    _require(task, names)
    require_columns(source.keep_columns, names, where=task.path)
    found = {name: table.values[column].to_pylist() for name, column in named.items() if column in names}
    kept = {name: table.part(name).to_pylist() for name in source.keep_columns}
    rows = task.rows()
    for row in range(len(table)):
        fields = {name: value for name, values in found.items() if (value := values[row]) is not None}
        _add(rows, fields, {name: values[row] for name, values in kept.items()}, table=table, row=row, task=task)
    rows.unused.add({*names} - {*named.values(), *source.keep_columns}, rows=len(table))
    return rows.part(task.group)


def _add(
    rows: PartRows, fields: dict[str, Any], kept: Mapping[str, Any], *, table: TextTable, row: int, task: PartTask
) -> None:
    where, sample_id = f"{task.name}, row {row + 1}", None
    if (problem := table.problems.get(row)) is not None:
        rows.reject(None, *problem)
        return
    try:
        sample_id = identifier(fields)
        for name in ("messages", "image"):
            if name in fields and (name == "messages" or fields[name].lstrip().startswith("[")):
                fields[name] = _nested(name, fields[name])
        if "label" in fields:
            fields["label"] = written_label(fields["label"])
        images = [*map(file_place, image_names(fields))]
        rows.add(fields, images, sample_id=sample_id, explicit=sample_id is not None, kept=kept)
    except SampleError as err:
        rows.reject(sample_id, err.reason, f"{where}: {err}")


def _nested(name: str, text: str) -> Any:
    try:
        return parse_nested(text)
    except JsonError as err:
        raise text_error(JsonError(f"field {name}: {err}", reason=err.reason)) from err


def _require(task: PartTask, names: Sequence[str]) -> None:
    """Raises ManifestError where a CSV lacks what is read of it, or a named column."""
    columns, reads = task.source.columns, task.reads
    defaults = {field.name: field.default for field in fields_of(SourceColumns)}
    missing = [
        f"{column} (source.columns.{name})"
        for name in COLUMNS_READ[reads]
        if (column := getattr(columns, name)) is not None and column not in names and column != defaults[name]
    ]
    if not missing and lacks_text(reads, {name for name in COLUMNS_READ[reads] if getattr(columns, name) in names}):
        missing = [wanted_text(columns, reads)]
    if missing:
        raise no_column(task, missing[0], names)


KIND = VisionKind(parts=table_parts, read=read_table_part, holds_images=True)
