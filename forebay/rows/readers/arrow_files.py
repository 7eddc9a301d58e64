"""Data files, parquet or the arrow streams that `save_to_disk` writes: values by column and row, and their types."""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.config.data import SourceColumns, SourceConfig
from forebay.errors import DecodeError, ManifestError
from forebay.extras import require_module
from forebay.rows.kept_columns import part_of
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import at_hand, exists
from forebay.store.source_files import SourceFile

DEFAULTS = SourceColumns()
"""A column that a config leaves at its default may be missing."""
_PLACE_BITS = 40
_MATRIX = 2
_ARROW_FILE = b"ARROW1"
_SLICE_BYTES = 32 * 1024 * 1024
_BUFFER_BYTES = 1024 * 1024


def list_place(row: int, position: int) -> int:
    """Returns the `offset` of an element of a list column: the row in the low 40 bits, the position above."""
    return position << _PLACE_BITS | row


def place_row(place: int) -> int:
    """Returns the row of an `offset`, from 0."""
    return place & ((1 << _PLACE_BITS) - 1)


@dataclass(slots=True)
class _Stream:
    """Slices of one large row group, as far as they were read. at: the first row of the next one."""

    part: int
    at: int
    batches: Iterator[pa.RecordBatch]


class HfFile:
    """Rows of one file; a column of encoded media is read by row, nothing is decoded, nothing is copied to a cache.

    problems: of its rows none are known, unlike those of a table that is text.
    """

    problems: Mapping[int, tuple[str, str]] = {}

    def __init__(self, path: Path) -> None:
        """Opens a file. Raises ManifestError where it is not there, or neither parquet nor an arrow stream."""
        self.path = path
        self._held = ExitStack()
        weakref.finalize(self, self._held.close)
        self._parquet: pq.ParquetFile | None = None
        self._parts: list[pa.RecordBatch] = []
        try:
            self._local = self._held.enter_context(at_hand(path))
            if path.suffix == ".parquet":
                self._parquet = pq.ParquetFile(self._local)
                metadata = self._parquet.metadata
                counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                self.schema = self._parquet.schema_arrow
            else:
                with pa.memory_map(str(self._local)) as file:
                    self.schema, self._parts = _batches(file)
                counts = [len(part) for part in self._parts]
        except FileNotFoundError as err:
            message = f"{path} is not there, or links to what is not; bring that, or remove it from the source"
            raise ManifestError(message, code="FB201") from err
        except (OSError, UnicodeDecodeError, pa.ArrowException) as err:  # UnicodeDecodeError: of a damaged column name
            raise ManifestError(
                f"{path} is neither parquet nor an arrow stream: {err}; name a data file", code="FB205"
            ) from err
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._last: tuple[int, pa.Table | pa.RecordBatch] | None = None
        self._stream: _Stream | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def columns(self, names: list[str]) -> pa.Table:
        """Returns whole columns by name; `media.path` is a field of a struct, returned as column `path`."""
        if self._parquet is not None:
            table = self._parquet.read(columns=names)
        else:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
            table = pa.Table.from_batches(self._parts, self.schema).select(tops)
        return pa.table({name.rpartition(".")[2]: _field(table, name) for name in names})

    def part(self, name: str) -> pa.ChunkedArray:
        """Returns a column as it may be kept, see `kept.part_of`."""
        return part_of(self.columns([name])[name], name, where=str(self.path))

    def has_values(self, name: str) -> Array:
        """Returns bool [rows], whether a column has a value; parquet's statistics answer without reading it, mostly."""
        if self._parquet is None:
            return np.asarray(pc.is_valid(self.columns([name])[name.rpartition(".")[2]]).to_numpy())
        masks = [self._group_has_values(i, name) for i in range(self._parquet.metadata.num_row_groups)]
        return np.concatenate([np.zeros(0, bool), *masks])

    def encoded(self, place: int, column: str) -> bytes | None:
        """Returns the bytes that a column holds in a row, None where it holds none. place: the row, or `list_place`.

        Lists of numbers are returned as the .npy bytes of an array; DecodeError `wrong_shape` where they are ragged.
        Rows of a row group of up to 32 MiB are read together, those of a larger one in slices, fastest in rising order.
        """
        row, position = place_row(place), place >> _PLACE_BITS
        if self._last is None or not self._last[0] <= row < self._last[0] + len(self._last[1]):
            self._last = self._slice(row, column)
        if holds_numbers(self.schema.field(column).type):
            return _npy_bytes(self._last[1][column], row - self._last[0])
        value = self._last[1][column][row - self._last[0]].as_py()
        value = value[position] if isinstance(value, list) else value
        return value.get("bytes") if isinstance(value, dict) else value

    def part_starts(self) -> list[int]:
        """Returns the first row of every row group or record batch, and the number of rows at the end."""
        return [int(start) for start in self._starts]

    def leaves(self, column: str) -> list[str]:
        """Returns the parquet paths of a column's leaves (`image.bytes`, `images.list.element.path`), or its name."""
        if self._parquet is None:
            return [column]
        schema = self._parquet.metadata.schema
        paths = [schema.column(i).path for i in range(len(schema))]
        return [path for path in paths if path == column or path.startswith(f"{column}.")]

    def is_filled(self, leaf: str) -> bool:
        """Says whether parquet's statistics promise that a leaf has no null."""
        if self._parquet is None:
            return False
        groups = range(self._parquet.metadata.num_row_groups)
        chunks = [chunk for group in groups for chunk in self._chunks(group) if chunk.path_in_schema == leaf]
        return all(c.statistics is not None and c.statistics.null_count == 0 for c in chunks)

    def batches(self, parts: range, columns: list[str], *, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of some row groups or record batches; memory for `batch_rows` of them is enough."""
        if self._parquet is not None:
            with pq.ParquetFile(self._local, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
                yield from file.iter_batches(batch_rows, [*parts], columns, use_threads=False)
            return
        for part in parts:
            batch = self._parts[part].select(columns)
            yield from (batch.slice(start, batch_rows) for start in range(0, len(batch), batch_rows))

    def _slice(self, row: int, column: str) -> tuple[int, pa.Table | pa.RecordBatch]:
        """A run of rows that holds `row`: its first row and the rows."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        start = int(self._starts[part])
        if self._parquet is None:
            return start, self._parts[part]
        size = sum(
            c.total_uncompressed_size for c in self._chunks(part) if c.path_in_schema.partition(".")[0] == column
        )
        if size <= _SLICE_BYTES:
            return start, self._parquet.read_row_group(part, columns=[column])
        if self._stream is None or self._stream.part != part or row < self._stream.at:
            batch_rows = max(1, self._parquet.metadata.row_group(part).num_rows * _SLICE_BYTES // size)
            batches = self.batches(range(part, part + 1), [column], batch_rows=batch_rows)
            self._stream = _Stream(part, start, batches)
        for batch in self._stream.batches:
            first, self._stream.at = self._stream.at, self._stream.at + len(batch)
            if row < self._stream.at:
                return first, batch
        raise ManifestError(f"{self.path}: row {row + 1} is missing, row group {part} ends before it; write it again")

    def _chunks(self, group: int) -> list[Any]:
        assert self._parquet is not None
        metadata = self._parquet.metadata.row_group(group)
        return [metadata.column(i) for i in range(metadata.num_columns)]

    def _group_has_values(self, group: int, name: str) -> Array:
        assert self._parquet is not None
        metadata = self._parquet.metadata.row_group(group)
        for column in self._chunks(group):
            if column.path_in_schema == name and column.statistics is not None and column.statistics.has_null_count:
                nulls = column.statistics.null_count
                if nulls in (0, metadata.num_rows):
                    return np.full(metadata.num_rows, nulls == 0)
        values = self._parquet.read_row_group(group, columns=[name])
        return np.asarray(pc.is_valid(_field(values, name)).to_numpy())


@dataclass(frozen=True, slots=True)
class TypedColumns:
    """The columns of one manifest file; `path` names it in messages."""

    table: pa.Table
    path: Path

    def strings(self, name: str, *, nullable: bool) -> pa.ChunkedArray | None:
        """Returns a column as large_string, None if it is missing. Raises ManifestError for other types, bad UTF-8."""
        column = self._column(name)
        if column is None:
            return None
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (is_text(kind) or (pa.types.is_null(kind) and nullable)):
            raise self.wrong(name, f"is {column.type}, wanted string")
        if not nullable and column.null_count:
            raise self.wrong(name, "is null, wanted a string", row=first(pc.is_null(column)))
        try:
            column = pc.cast(column, pa.large_string())
            column.validate(full=True)
        except pa.ArrowInvalid as err:
            raise self.wrong(name, f"is not UTF-8 text: {err}") from err
        return column

    def seconds(self, name: str) -> pa.ChunkedArray | None:
        """Returns a column of durations as float64 with NaN for null, None where it is missing.

        Any integer, float or decimal type is taken; other types raise ManifestError.
        """
        column = self._column(name)
        if column is None:
            return None
        kind, types = column.type, pa.types
        if not any(is_one(kind) for is_one in (types.is_integer, types.is_floating, types.is_decimal, types.is_null)):
            raise self.wrong(name, f"is {kind}, wanted seconds as a number")
        return pc.fill_null(pc.cast(column, pa.float64(), safe=False), float("nan"))

    def segments(self, named: SourceColumns, durations: Sequence[str]) -> dict[str, Any]:
        """Returns where in their recordings rows lie, as SEGMENT_COLUMNS: float64, NaN for what no column says.

        durations: the columns that may hold seconds, of the segment where a start is named. Nothing where the columns
        of segments have no names.
        """
        if not named.has_segments:
            return {}
        count = len(self.table)
        nothing = pa.array(np.full(count, np.nan))

        def column(name: str | None, default: Any) -> Any:
            found = None if name is None else self.seconds(name)
            return default if found is None else found

        start = column(named.start, pa.array(np.zeros(count)))
        said = (self.seconds(name) for name in durations if named.start is not None)
        seconds = next((found for found in said if found is not None), nothing)
        end = column(named.end, pc.add(start, seconds))
        return {"start_s": start, "end_s": end, "channel": column(named.channel, nothing)}

    def ids(self, name: str) -> pa.ChunkedArray:
        """Returns a column of lists of integers as large_string: the numbers in decimal, parted by spaces."""
        column = self.table[name]
        if not is_list(column.type) or not pa.types.is_integer(column.type.value_type):
            raise self.wrong(name, f"is {column.type}, wanted lists of token ids")
        column = pc.cast(column, pa.large_list(column.type.value_type))
        column = pc.cast(column, pa.large_list(pa.large_string()))
        return pc.binary_join(column, pa.scalar(" ", pa.large_string()))

    def given_ids(self, names: Sequence[str]) -> tuple[str, pa.ChunkedArray | None]:
        """Returns the first of several columns that is there, and its ids; numbers are their digits."""
        name = next((name for name in names if name in self.table.column_names), "")
        if name and pa.types.is_integer(self.table[name].type):
            return name, pc.cast(self.table[name], pa.large_string())
        return name, self.strings(name, nullable=True) if name else None

    def wrong(self, name: str, problem: str, *, row: int | None = None) -> ManifestError:
        """Returns the error that names file, column and, counted from 1, row."""
        where = f"{self.path}, row {row + 1}" if row is not None else f"{self.path}"
        return ManifestError(f"{where}: column {name} {problem}; correct the manifest", code="FB203")

    def _column(self, name: str) -> pa.ChunkedArray | None:
        if name not in self.table.column_names:
            return None
        if self.table.column_names.count(name) > 1:
            raise self.wrong(name, "occurs more than once, wanted it once")
        return self.table[name]


def first(mask: Any) -> int:
    """Returns the position of the first true value."""
    return int(np.argmax(np.asarray(mask)))


def _field(table: pa.Table, name: str) -> pa.ChunkedArray:
    top, _, child = name.partition(".")
    return pc.struct_field(table[top], child) if child else table[top]


def _batches(file: pa.MemoryMappedFile) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Returns the schema and the batches of arrow's file form or its stream form."""
    magic = file.read(len(_ARROW_FILE))
    file.seek(0)
    if magic == _ARROW_FILE:
        whole = pa.ipc.open_file(file)
        return whole.schema, [whole.get_batch(number) for number in range(whole.num_record_batches)]
    stream = pa.ipc.open_stream(file)
    return stream.schema, list(stream)


def class_names(schema: pa.Schema, column: str, *, in_lists: bool = False) -> list[str] | None:
    """Returns the names of a ClassLabel's numbers, as the `datasets` library writes them; None for another column.

    in_lists: of a list of ClassLabels too, which older versions write as a list and newer ones as `feature` of one.
    """
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        if in_lists:
            feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        names = [str(name) for name in feature["names"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError):
        return None
    return names if feature.get("_type") == "ClassLabel" else None


def damaged(path: str, err: Exception) -> Exception:
    """Returns the ManifestError for what pyarrow raised over a data file, or the error itself if the machine failed."""
    if isinstance(err, OSError) and err.errno is not None:
        return err
    return ManifestError(f"{path} is damaged: {err}; copy or write it again")


def require_datasets() -> None:
    """Returns where the `datasets` library is installed. Raises MissingExtraError."""
    require_module("datasets", "hf", what='source.kind = "hf"')


def data_files(source: SourceConfig, manifests: Sequence[SourceFile]) -> list[tuple[int, SourceFile]]:
    """Returns the manifests that hold rows, with their numbers.

    Raises MissingExtraError without the `datasets` library, ManifestError where there is none.
    """
    require_datasets()
    found = [(number, file) for number, file in enumerate(manifests) if _is_data(file.path)]
    if not found:
        raise ManifestError(
            f"{', '.join(source.manifests)}: no .arrow or .parquet data file; name a save_to_disk folder", code="FB205"
        )
    return found


def holds_media(kind: pa.DataType) -> bool:
    """Says whether columns of an arrow type can hold encoded media: bytes, paths, or structs of one of them or both."""
    children = {field.name for field in kind} if pa.types.is_struct(kind) else set()
    return bool(children & {"bytes", "path"}) or is_bytes(kind) or is_text(kind)


def media_part(values: pa.Array, name: str) -> pa.Array | None:
    """Returns the `bytes` or the `path` of values of a type that holds media, None where these have no such part."""
    if pa.types.is_struct(values.type):
        return pc.struct_field(values, name) if name in {field.name for field in values.type} else None
    return values if is_bytes(values.type) == (name == "bytes") else None


def holds_numbers(kind: pa.DataType) -> bool:
    """Says whether columns of an arrow type hold matrices of floats: lists of lists, of fixed size or not."""
    # `Array2D` of the datasets library, once that is imported.
    depth, kind = 0, kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    while is_list(kind):
        depth, kind = depth + 1, kind.value_type
    return depth == _MATRIX and bool(pa.types.is_floating(kind))


def is_list(kind: pa.DataType) -> bool:
    """Says whether an arrow type is one of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _npy_bytes(column: Any, row: int) -> bytes | None:
    part = column.slice(row, 1)
    part = part.chunk(0) if isinstance(part, pa.ChunkedArray) else part
    part = part.storage if isinstance(part, pa.ExtensionArray) else part
    if part.null_count:
        return None
    shape: list[int] = []
    while is_list(part.type):
        sizes = pc.unique(pc.list_value_length(part)).to_pylist()
        if part.null_count or len(sizes) != 1:
            raise DecodeError("wrong_shape", f"its lists have lengths {sizes[:5]}, wanted one length for all of them")
        shape.append(sizes[0])
        part = part.flatten()
    buffer = io.BytesIO()
    np.save(buffer, part.to_numpy(zero_copy_only=False).reshape(shape))
    return buffer.getvalue()


def is_bytes(kind: pa.DataType) -> bool:
    """Says whether an arrow type is one of bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def is_text(kind: pa.DataType) -> bool:
    """Says whether an arrow type is one of strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_data(path: Path) -> bool:
    """Says whether a file holds rows. In a `save_to_disk` folder its state lists them; `map` leaves others."""
    if path.suffix not in {".arrow", ".parquet"}:
        return False
    state = path.parent / "state.json"
    if path.suffix == ".parquet" or not exists(state):
        return True
    try:
        with at_hand(state) as file:
            listed = {str(entry["filename"]) for entry in json.loads(file.read_bytes())["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        raise ManifestError(
            f"{state} is not the state of a save_to_disk folder: {err!r}; save the dataset again"
        ) from err
    return path.name in listed
