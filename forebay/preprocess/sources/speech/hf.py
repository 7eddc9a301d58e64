"""`kind = "hf"`: a `save_to_disk` folder of the `datasets` library, or parquet files, with an audio column.

`Columns` checks those of a foreign table and brings them to the types of the common form, for parquet manifests too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig
from forebay.errors import DecodeError, ManifestError
from forebay.preprocess.sources.hf_file import (
    DEFAULTS,
    HfFile,
    data_files,
    holds_media,
    holds_numbers,
    is_bytes,
    is_list,
    is_text,
)
from forebay.preprocess.sources.members import member_stems
from forebay.preprocess.sources.naming import NamedFiles, manifest_files, path_stem, usable_name
from forebay.preprocess.sources.rows import Manifest, Unused, joined, rejections, require_rows, row_table
from forebay.preprocess.sources.speech.locate import (
    DURATIONS,
    IDS,
    Failures,
    Located,
    LocateTask,
    SpeechKind,
    duration_of,
    locate_loose,
    located,
    no_duration,
)
from forebay.steps.audio.given import HOP_S, matrix_of, num_valid
from forebay.store.source_files import SourceFile


def list_hf(source: SourceConfig) -> Manifest:
    """Returns the rows of `hf` data files: their place is a row number, or a file where the column holds only paths.

    The audio column is `Audio()`: bytes, path or both (paths relative to the data file), or plain binary or strings; it
    is never decoded here. With `source.columns.features` it is not looked at: that column holds the features, matrices
    of floats. With `source.columns.labels` the text of a row is the ids in that column, in decimal and parted by
    spaces. Text and language by `source.columns.text` and `source.columns.language` (null where those
    are left at their default and missing), a ClassLabel language by its name. Optional: `sample_id` or `id`,
    `duration_s` or `duration`, `prompt`; other columns are counted by name. An id left out is the path without
    extension, else `<file>/<row>`. Raises MissingExtraError without the `datasets` library, ManifestError for missing
    columns and other types.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    tables, rejected, unused = [], [], Unused()
    start = 0
    for number, manifest in data_files(source, manifests):
        file = _File(manifest, number, source)
        rows, failed = file.rows(files, start)
        unused.add(file.unused, rows=len(rows) + len(failed))
        start += len(rows) + len(failed)
        tables.append(rows)
        rejected.append(failed)
    require_rows(start, manifests)
    return Manifest(
        files=tuple(files.files),
        rows=pa.concat_tables(tables),
        rejected=pa.concat_tables(rejected),
        unused=unused.counts,
    )


class _File:
    """The listing of one data file."""

    def __init__(self, manifest: SourceFile, number: int, source: SourceConfig) -> None:
        self._manifest = manifest
        self._number = number
        self._source = source
        self._file = HfFile(manifest.path)
        self._names: list[str] = self._file.schema.names
        self._audio_kind = self._checked_audio_kind()

    @property
    def unused(self) -> set[str]:
        """The columns that nothing takes."""
        return set(self._names) - self._taken() - {self._source.columns.media}

    def rows(self, files: NamedFiles, start: int) -> tuple[pa.Table, pa.Table]:
        """Returns the rows, numbered from `start`, and those that hold no audio."""
        inside, paths = self._audio()
        count = len(self._file)
        numbers, problems = self._numbers(files, inside, paths)
        columns = Columns(self._plain_columns(), self._manifest.path)
        ids, explicit = self._ids(columns, paths)
        table = row_table(
            {
                "row": pa.array(np.arange(start, start + count)),
                "sample_id": ids,
                "explicit_id": explicit,
                "group": pa.array(np.full(count, self._number, np.int32)),
                "file": pa.array(numbers),
                "member": pc.fill_null(paths, ""),
                "offset": pa.array(np.where(inside, np.arange(count), 0)),
                "duration_s": next((c for n in self._durations() if (c := columns.seconds(n)) is not None), None),
                "language": self._language(columns),
                "prompt": columns.strings("prompt", nullable=True),
                "text": self._text(columns),
            },
            num_rows=count,
        )
        bad = np.zeros(count, bool)
        bad[list(problems)] = True
        gone = table.filter(pa.array(bad))
        failed = rejections(
            gone["row"],
            gone["sample_id"],
            kind="failed",
            reason="missing_file" if self._source.columns.features is None else "missing_features",
            message=pa.array([*problems.values()], pa.large_string()),
        )
        return table.filter(pa.array(~bad)), failed

    def _checked_audio_kind(self) -> Any:
        named = self._source.columns
        name, is_given = named.media, named.features is not None
        for setting in ("features" if is_given else "audio", "text", "language", "id", "labels"):
            column, is_needed = getattr(named, setting), setting in ("audio", "features")
            if column not in self._names and (is_needed or column != getattr(DEFAULTS, setting)):
                near = difflib.get_close_matches(column, self._names, n=1)
                raise ManifestError(
                    f"{self._manifest.path}: no column {column} (source.columns.{setting}); "
                    f"it has {', '.join(self._names)}{f'; did you mean {near[0]}?' if near else ''}",
                    code="FB202",
                )
        kind = self._file.schema.field(name).type
        if is_given and not holds_numbers(kind):
            raise ManifestError(
                f"{self._manifest.path}: column {name} is {kind}, wanted features as a matrix of floats "
                "[n_mels, 3000] a row; of an extractor's batch of one, save input_features[0]",
                code="FB203",
            )
        if not is_given and not holds_media(kind):
            raise ManifestError(
                f"{self._manifest.path}: column {name} is {kind}, wanted audio as bytes or path", code="FB203"
            )
        return kind

    def _audio(self) -> tuple[np.ndarray[Any, Any], Any]:
        """bool [rows], bytes are in the row; the paths, null where there is none."""
        name, kind, count = self._source.columns.media, self._audio_kind, len(self._file)
        no_paths = pa.nulls(count, pa.large_string())
        if is_bytes(kind) or holds_numbers(kind):
            return self._file.has_values(name), no_paths
        if is_text(kind):
            return np.zeros(count, bool), Columns(self._file.columns([name]), self._manifest.path).strings(
                name, nullable=True
            )
        children = {field.name for field in kind}
        inside = self._file.has_values(f"{name}.bytes") if "bytes" in children else np.zeros(count, bool)
        if "path" not in children:
            return inside, no_paths
        paths = Columns(self._file.columns([f"{name}.path"]), self._manifest.path)
        return inside, paths.strings("path", nullable=True)

    def _numbers(self, files: NamedFiles, inside: Any, paths: Any) -> tuple[Any, dict[int, str]]:
        """The file of each row; why a row has none, by row."""
        numbers = np.full(len(self._file), self._number, np.int32)
        problems: dict[int, str] = {}
        outside = np.flatnonzero(~inside)
        for row, written in zip(outside.tolist(), paths.take(pa.array(outside)).to_pylist(), strict=True):
            nothing = "is null" if holds_numbers(self._audio_kind) else "has neither bytes nor a path"
            problem = nothing if written is None else usable_name(written)
            if problem:
                problems[row] = f"{self._manifest.path}, row {row + 1}: column {self._source.columns.media} {problem}"
            else:
                numbers[row] = files.number(written, manifest=self._manifest)
        return numbers, problems

    def _taken(self) -> set[str]:
        columns = self._source.columns
        text = columns.text if columns.labels is None else columns.labels
        return {text, columns.language, "prompt", *self._id_names(), *self._durations()}

    def _durations(self) -> tuple[str, ...]:
        """Features say themselves how long they are."""
        return DURATIONS if self._source.columns.features is None else ()

    def _text(self, columns: Columns) -> Any:
        labels = self._source.columns.labels
        return columns.strings(self._source.columns.text, nullable=True) if labels is None else columns.ids(labels)

    def _id_names(self) -> tuple[str, ...]:
        named = self._source.columns.id
        return IDS if named is None else (named,)

    def _plain_columns(self) -> pa.Table:
        wanted = self._taken()
        return self._file.columns(
            [name for name in self._names if name in wanted and name != self._source.columns.media]
        )

    def _ids(self, columns: Columns, paths: Any) -> tuple[Any, Any]:
        derived = joined(path_stem(self._manifest.path.name), "/", pa.array(np.arange(len(self._file))))
        named = member_stems(paths)
        derived = pc.coalesce(pc.if_else(pc.equal(named, ""), pa.scalar(None, pa.large_string()), named), derived)
        name = next((name for name in self._id_names() if name in columns.table.column_names), None)
        if name is None:
            return derived, None
        if pa.types.is_integer(columns.table[name].type):
            given = pc.cast(columns.table[name], pa.large_string())
        else:
            given = columns.strings(name, nullable=True)
        return pc.coalesce(given, derived), pc.is_valid(given)

    def _language(self, columns: Columns) -> Any:
        name = self._source.columns.language
        if name not in columns.table.column_names or not pa.types.is_integer(columns.table[name].type):
            return columns.strings(name, nullable=True)
        from datasets import ClassLabel, Features

        feature = Features.from_arrow_schema(self._file.schema)[name]
        if not isinstance(feature, ClassLabel):
            raise columns.wrong(name, f"is {columns.table[name].type}, wanted string or a ClassLabel")
        codes = pc.cast(columns.table[name], pa.int64())
        known = pc.and_(pc.greater_equal(codes, 0), pc.less(codes, len(feature.names)))
        return pa.array(feature.names, pa.large_string()).take(pc.if_else(known, codes, pa.scalar(None, pa.int64())))


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one manifest file; `path` names it in messages. unused: the names of those that were not read."""

    table: pa.Table
    path: Path
    unused: frozenset[str] = frozenset()

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
        kind = column.type
        if not (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
            or pa.types.is_null(kind)
        ):
            raise self.wrong(name, f"is {kind}, wanted seconds as a number")
        return pc.fill_null(pc.cast(column, pa.float64(), safe=False), float("nan"))

    def ids(self, name: str) -> pa.ChunkedArray:
        """Returns a column of lists of integers as large_string: the numbers in decimal, parted by spaces."""
        column = self.table[name]
        if not is_list(column.type) or not pa.types.is_integer(column.type.value_type):
            raise self.wrong(name, f"is {column.type}, wanted lists of token ids")
        column = pc.cast(column, pa.large_list(column.type.value_type))
        column = pc.cast(column, pa.large_list(pa.large_string()))
        return pc.binary_join(column, pa.scalar(" ", pa.large_string()))

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


def require_columns(path: Path, names: Sequence[str], required: Sequence[str]) -> None:
    """Raises ManifestError where a table does not have all the required columns."""
    missing = [name for name in required if name not in names]
    if missing:
        raise ManifestError(
            f"{path}: no column {', '.join(missing)}; it has {', '.join(names) or 'none'}; wanted "
            f"{', '.join(required)}",
            code="FB202",
        )


def first(mask: Any) -> int:
    """Returns the position of the first true value."""
    return int(np.argmax(np.asarray(mask)))


def locate_hf(task: LocateTask) -> Located:
    """Returns the durations of a task's rows: from the header of the bytes in the row, or of the file that it names."""
    inside = pc.equal(task.rows["file"], task.group)
    rows = task.rows.filter(inside)
    durations = rows["duration_s"].to_numpy().copy()
    failures = Failures()
    unknown = np.flatnonzero(np.isnan(durations))
    file = HfFile(Path(task.paths[task.group])) if len(unknown) else None
    for position in unknown.tolist():
        assert file is not None
        try:
            durations[position] = _duration_s(file, rows["offset"][position].as_py(), task.column)
        except DecodeError as err:
            sample_id = rows["sample_id"][position].as_py()
            failures.add(rows["row"][position].as_py(), sample_id, *no_duration(task.name, sample_id, err))
    own = located(task.with_rows(rows), {"duration_s": pa.array(durations)}, failures)
    if len(rows) == len(task.rows):
        return own
    named = locate_loose(task.with_rows(task.rows.filter(pc.invert(inside))))
    return Located(
        rows=pa.concat_tables([own.rows, named.rows]).sort_by("row"),
        failed=pa.concat_tables([own.failed, named.failed]),
        absent=named.absent,
    )


def _duration_s(file: HfFile, row: int, column: str) -> float:
    data = file.encoded(row, column) or b""
    if holds_numbers(file.schema.field(column).type):
        return num_valid(matrix_of(data)) * HOP_S
    return duration_of(_reader(data), len(data))


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, count: data[start : start + count]


KIND = SpeechKind(list=list_hf, locate=locate_hf)
