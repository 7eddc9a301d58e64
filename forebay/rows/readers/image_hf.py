"""`kind = "hf"` of conversations: `save_to_disk` folders and parquet files with an image column."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import COLUMNS_READ, Reads, SourceColumns, SourceConfig
from forebay.errors import ManifestError, SampleError
from forebay.rows.kept_columns import require_columns
from forebay.rows.manifest import WHOLE_FILE
from forebay.rows.meanings.conversation import IDS, MESSAGES, REFUSED_OF_ROW, identifier, text_error
from forebay.rows.meanings.image_class import declared_classes, named_labels
from forebay.rows.parts import Part, PartRows, PartTask, Place, VisionKind, file_place, part_tasks
from forebay.rows.readers.arrow_files import (
    DEFAULTS,
    HfFile,
    damaged,
    data_files,
    holds_media,
    is_bytes,
    is_text,
    list_place,
)
from forebay.rows.readers.json_lines import JsonError, parse_nested
from forebay.store.source_files import SourceFile

_ROWS_PER_PART = 16_384

_ROWS_PER_BATCH = 4096

_IMAGES_PER_BATCH = 32
"""Rows that are held at once where their images are read with them."""

_IDS = tuple(sorted(IDS, reverse=True))

_HELD = {"system", *REFUSED_OF_ROW}
"""Columns that are looked at for whether a row has a value, beside those of texts."""


def hf_parts(source: SourceConfig, manifests: Sequence[SourceFile], cache_root: str) -> Iterator[PartTask]:
    """Returns the data files in runs of row groups or record batches; a run of several has up to 16384 rows.

    Raises MissingExtraError without the `datasets` library, ManifestError where there is no data file.
    """
    return part_tasks(source, data_files(source, manifests), cache_root, file_runs)


def file_runs(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields (first row group or record batch, end, first row) of runs of a data file."""
    starts = HfFile(path).part_starts()
    start = 0
    while start < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[start] + _ROWS_PER_PART, side="right")) - 1
        stop = max(start + 1, last)
        yield start, stop, starts[start]
        start = stop


def read_hf_part(task: PartTask) -> Part:
    """Returns the rows of some row groups or record batches of a data file.

    The image column is `Image()` (bytes, path or both), binary, strings (paths relative to the data file), or a list of
    one of these; null is no image. Text by `source.columns.messages` (a list, or its JSON; left at its default also
    `conversations`), else `source.columns.question` and `source.columns.answer`; optional `sample_id` or `id`,
    `system`. Or `source.columns.label` (a ClassLabel is its names) or `source.columns.text`, by what is read. Other
    columns are counted by name, or refused row by row as `canonical` does. No image is read where parquet's statistics
    say that all are there. Raises ManifestError for missing columns and other types.
    """
    file = HfFile(Path(task.path))
    images = _ImageColumn(file, task)
    text = _text_columns(file, task)
    require_columns(task.source.keep_columns, file.schema.names, where=task.path)
    text |= {name: name for name in task.source.keep_columns}
    taken = {*text.values(), task.source.columns.image}
    held = [name for name in file.schema.names if name in _HELD - taken] if task.reads == "conversations" else []
    classes = declared_classes(file.schema, text["label"]) if "label" in text else None
    columns = list(dict.fromkeys([*text.values(), *held, *images.leaves]))
    is_large = any(map(_holds_bytes, (file.schema.field(name).type for name in held)))
    batch_rows = _IMAGES_PER_BATCH if is_large else images.batch_rows
    rows, number = task.rows(), task.first
    parts = range(task.start, task.stop)
    try:
        starts = np.asarray(file.part_starts())
        for batch in file.batches(parts, columns, batch_rows=batch_rows):
            runs = np.searchsorted(starts, np.arange(number, number + len(batch)), side="right")
            values = {name: batch[column].to_pylist() for name, column in text.items()}
            values |= {name: _values(batch[name]) for name in held}
            if classes is not None:
                values["label"] = [*named_labels(values["label"], classes)]
            for position, places in enumerate(images.places(batch, number, runs.tolist())):
                fields = {name: column[position] for name, column in values.items()}
                _add(rows, fields, places, where=f"{task.name}, row {number + position + 1}")
            number += len(batch)
    except (OSError, pa.ArrowException) as err:
        raise damaged(task.path, err) from err
    rows.unused.add(set(file.schema.names) - taken - {*held}, rows=number - task.first)
    return rows.part(task.group, classes=classes)


def _add(rows: PartRows, fields: dict[str, Any], places: Sequence[Place | str | None], *, where: str) -> None:
    sample_id = None
    try:
        sample_id = identifier(fields)
        found = [file_place(place) if isinstance(place, str) else place for place in places]
        if None in found:
            raise SampleError("missing_file", "its image has neither bytes nor a path")
        if "messages" in fields:
            fields = {**fields, "messages": _decoded(fields["messages"])}
        used = [place for place in found if place is not None]
        rows.add(fields, used, sample_id=sample_id, explicit=sample_id is not None)
    except SampleError as err:
        rows.reject(sample_id, err.reason, f"{where}: {err}")


def _decoded(messages: Any) -> Any:
    if not isinstance(messages, str):
        return messages
    try:
        return parse_nested(messages)
    except JsonError as err:
        raise text_error(JsonError(f"field messages: {err}", reason=err.reason)) from err


def _values(column: pa.Array) -> list[Any]:
    """The values of a column; of one that holds encoded media whether each row has any, as True or None."""
    if not _holds_bytes(column.type):
        values: list[Any] = column.to_pylist()
        return values
    is_there = column.is_valid()
    if _is_list(column.type):
        is_there = pc.fill_null(pc.greater(pc.list_value_length(column), 0), fill_value=False)
    return [found or None for found in is_there.to_pylist()]


def _holds_bytes(kind: pa.DataType) -> bool:
    if _is_list(kind):
        return _holds_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_holds_bytes(child.type) for child in kind)
    return is_bytes(kind)


def _text_columns(file: HfFile, task: PartTask) -> dict[str, str]:
    """The columns of texts and ids by their names in a row. Raises ManifestError where there are none."""
    columns, names = task.source.columns, file.schema.names
    wanted = {name: getattr(columns, name) for name in COLUMNS_READ[task.reads] if name not in ("image", "id")}
    found = {name: column for name, column in wanted.items() if column in names}
    if task.reads == "conversations" and "messages" not in found and columns.messages == MESSAGES[0]:
        found |= {"messages": MESSAGES[1]} if MESSAGES[1] in names else {}
    ids = {name: name for name in _IDS if name in names} if columns.id is None else {"id": columns.id}
    for name, column in {**wanted, **ids}.items():
        if column not in names and column != getattr(DEFAULTS, name):
            raise no_column(task, f"{column} (source.columns.{name})", names)
    if lacks_text(task.reads, found):
        raise no_column(task, wanted_text(columns, task.reads), names)
    return found | ids


def lacks_text(reads: Reads, found: Collection[str]) -> bool:
    """Says whether a table with these of the columns of `[source.columns]` does not hold what rows are read as."""
    if reads == "conversations":
        return "messages" not in found and not {"question", "answer"} <= {*found}
    return reads != "images" and {"labels": "label", "texts": "text"}[reads] not in found


def wanted_text(columns: SourceColumns, reads: Reads) -> str:
    """Returns what to call the columns that rows are read from, beside the image's."""
    if reads == "conversations":
        return f"{columns.messages}, nor {columns.question} and {columns.answer}"
    return columns.label if reads == "labels" else columns.text


def no_column(task: PartTask, what: str, names: Sequence[str]) -> ManifestError:
    """Returns the error for a table without a column that is read."""
    *others, last = (name for name in COLUMNS_READ[task.reads] if name != "id")
    listed = f"{', '.join(others)} or {last}" if others else last
    return ManifestError(
        f"{task.path}: no column {what}; it has {', '.join(names)}; set {listed} under [source.columns]", code="FB202"
    )


class _ImageColumn:
    """The image column of a data file: what of it has to be read to know which rows have how many images, and where."""

    def __init__(self, file: HfFile, task: PartTask) -> None:
        self._name = name = task.source.columns.image
        if name not in file.schema.names:
            raise no_column(task, f"{name} (source.columns.image)", file.schema.names)
        kind = file.schema.field(name).type
        self._is_list = _is_list(kind)
        element = kind.value_type if self._is_list else kind
        if not holds_media(element):
            raise ManifestError(
                f"{task.path}: column {name} is {kind}, wanted images as bytes or path, or a list of them", code="FB203"
            )
        children = {field.name for field in element} if pa.types.is_struct(element) else set()
        self.leaves, self._all_inside = [name], False
        has_bytes = "bytes" in children or is_bytes(element)
        inside = next((p for p in file.leaves(name) if is_bytes(element) or p.endswith(".bytes")), name)
        if has_bytes and file.is_filled(inside):
            paths = [path for path in file.leaves(name) if children and path.endswith(".path")]
            if paths or not self._is_list:
                self.leaves, self._all_inside = paths, True
        reads_images = has_bytes and not self._all_inside
        self.batch_rows = _IMAGES_PER_BATCH if reads_images else _ROWS_PER_BATCH

    def places(self, batch: pa.RecordBatch, first: int, runs: list[int]) -> Iterator[Sequence[Place | str | None]]:
        """Yields the images of each row: a place in the file, a path, or None if there are neither bytes nor a path."""
        if not self.leaves:
            yield from ([_inside(first + row, 0, run)] for row, run in enumerate(runs))
            return
        column = batch[self._name]
        elements = column.flatten() if self._is_list else column.drop_null()
        lengths = (
            pc.fill_null(pc.list_value_length(column), 0) if self._is_list else pc.cast(column.is_valid(), "int32")
        )
        inside, paths = self._contents(elements)
        start = 0
        for row, (count, run) in enumerate(zip(lengths.to_pylist(), runs, strict=True)):
            yield [
                _inside(first + row, position, run) if inside[start + position] else paths[start + position]
                for position in range(count)
            ]
            start += count

    def _contents(self, elements: pa.Array) -> tuple[list[bool], list[str | None]]:
        """Whether each image has its bytes in the file, and its path."""
        nothing: list[str | None] = [None] * len(elements)
        if is_text(elements.type):
            return [False] * len(elements), elements.to_pylist()
        if is_bytes(elements.type):
            return elements.is_valid().to_pylist(), nothing
        children = {field.name for field in elements.type}
        paths = pc.struct_field(elements, "path").to_pylist() if "path" in children else nothing
        if self._all_inside:
            return [True] * len(elements), paths
        inside = (
            pc.struct_field(elements, "bytes").is_valid().to_pylist()
            if "bytes" in children
            else [False] * len(elements)
        )
        return inside, paths


def _inside(row: int, position: int, run: int) -> Place:
    member = f"row {row + 1}, image {position + 1}" if position else ""
    return Place(None, member, list_place(row, position), WHOLE_FILE, run)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


KIND = VisionKind(parts=hf_parts, read=read_hf_part, holds_images=True)
