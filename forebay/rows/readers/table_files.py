"""Tables: `kind = "table"` in any form, `kind = "hf"` of the `datasets` library, `kind = "ljspeech"`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.audio_facts import duration_of, fill_durations, locate_files, located
from forebay.rows.kept_columns import concatenated, no_column, require_columns
from forebay.rows.manifest import SPAN, Manifest, Record, Unused, joined, require_rows, row_table, without_rows
from forebay.rows.meanings.recordings import SPANS, spans_of
from forebay.rows.named_files import (
    NamedFiles,
    manifest_files,
    may_be_unusable,
    path_stem,
    require_folder,
    usable_name,
)
from forebay.rows.reader import (
    DURATIONS,
    Failures,
    FilePiece,
    Located,
    LocateTask,
    RecordingLister,
    RowReader,
    Sink,
    id_names,
    member_stems,
)
from forebay.rows.readers.arrow_files import (
    DEFAULTS,
    HfFile,
    TypedColumns,
    class_names,
    data_files,
    holds_media,
    holds_numbers,
    is_bytes,
    is_text,
)
from forebay.rows.readers.csv_tables import TextTable, WantedColumns, read_csv, read_json_lines
from forebay.rows.readers.json_lines import decoded
from forebay.rows.readers.table_records import (
    file_runs,
    form_of,
    line_runs,
    piece_lines,
    read_table,
    read_typed,
    table_runs,
)
from forebay.rows.segments import named_segments
from forebay.steps.audio.given import HOP_S, matrix_of, num_valid
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import folders_in, names_in, place_of
from forebay.store.source_files import SourceFile

AUDIO_FOLDER = "wavs"
_EXTENSIONS = (".wav", ".flac")
_BOUNDS = ("start", "end", "channel")
_LOOKED_AT = 8
"""Recordings that are looked for where none is where the table says."""


class TableRows:
    """The rows of one table."""

    def __init__(
        self,
        manifest: SourceFile,
        number: int,
        source: SourceConfig,
        table: HfFile | TextTable,
        *,
        durations: tuple[str, ...] = (),
    ) -> None:
        """number: of the file. durations: columns that hold durations where `source.columns` names none.

        Raises ManifestError for columns that are missing or of other types, ConfigError for a missing one of
        `source.keep_columns`.
        """
        self._manifest, self._number = manifest, number
        self._source, self._columns = source, source.columns
        self._table, self.problems = table, table.problems
        self._names: list[str] = table.schema.names
        named = self._columns.duration
        self._durations = () if self._columns.features is not None else durations if named is None else (named,)
        self._taken = taken_columns(source, durations=self._durations)
        self._audio_kind = self._checked_audio_kind()
        require_columns(source.keep_columns, self._names, where=str(manifest.path))

    @property
    def unused(self) -> set[str]:
        """The columns that nothing takes."""
        return set(self._names) - self._taken

    def rows(self, files: NamedFiles, start: int) -> tuple[pa.Table, pa.Table]:
        """Returns the rows, numbered from `start`, and those that cannot be used."""
        inside, paths = self._audio()
        count = len(self._table)
        numbers, problems = self._numbers(files, inside, paths)
        table = row_table(
            {
                "row": pa.array(np.arange(start, start + count)),
                "group": pa.array(np.full(count, self._number, np.int32)),
                "file": pa.array(numbers),
                "member": pc.fill_null(paths, ""),
                "offset": pa.array(np.where(inside, np.arange(count), 0)),
                **self._values(paths),
            },
            num_rows=count,
            kept=self._kept(),
        )
        bad, failures = sorted(problems), Failures()
        for row, sample_id in zip(bad, table["sample_id"].take(pa.array(bad, pa.int64())).to_pylist(), strict=True):
            failures.add(start + row, sample_id, *problems[row])
        return without_rows(table, bad), failures.table()

    def paths(self) -> Any:
        """Returns the paths of the audio column, null where a row has none."""
        return self._audio()[1]

    def values(self) -> tuple[dict[str, Any], dict[str, pa.ChunkedArray]]:
        """Returns what the table says of its rows beside the places of the audio, and the columns that are kept."""
        return self._values(self.paths()), self._kept()

    def _values(self, paths: Any) -> dict[str, Any]:
        columns = self._typed([n for n in self._names if n in self._taken and n != self._columns.media])
        ids, explicit = self._ids(columns, paths)
        segments = columns.segments(self._columns, self._durations)
        ids = named_segments(ids, explicit, segments)
        spans = [] if segments else [name for name in self._names if name in SPANS and self._names.count(name) == 1]
        text, labels = self._columns.text, self._columns.labels
        return {
            "sample_id": ids,
            "explicit_id": explicit,
            "duration_s": next((c for n in self._durations if (c := columns.seconds(n)) is not None), None),
            "language": self._language(columns),
            "prompt": columns.strings("prompt", nullable=True),
            "text": columns.strings(text, nullable=True) if labels is None else columns.ids(labels),
            **({} if self._columns.features is not None or not spans else spans_of(self._table.columns(spans))),
            **{SPAN + name: column for name, column in segments.items()},
        }

    def _typed(self, names: list[str]) -> TypedColumns:
        return TypedColumns(self._table.columns(names), self._manifest.path)

    def _kept(self) -> dict[str, pa.ChunkedArray]:
        return {name: self._table.part(name) for name in self._source.keep_columns}

    def _checked_audio_kind(self) -> Any:
        named = self._columns
        name, is_given = named.media, named.features is not None
        for setting in ("features" if is_given else "audio", "text", "language", "id", "duration", "labels", *_BOUNDS):
            column, is_needed = getattr(named, setting), setting in ("audio", "features")
            if column not in self._names and (is_needed or column != getattr(DEFAULTS, setting)):
                where = str(self._manifest.path)
                raise ManifestError(no_column(column, f"columns.{setting}", self._names, where=where), code="FB202")
        kind = self._table.schema.field(name).type
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

    def _audio(self) -> tuple[Array, Any]:
        """bool [rows], bytes are in the row; the paths, null where there is none."""
        name, kind, count = self._columns.media, self._audio_kind, len(self._table)
        no_paths = pa.nulls(count, pa.large_string())
        if is_bytes(kind) or holds_numbers(kind):
            return self._table.has_values(name), no_paths
        if is_text(kind):
            return np.zeros(count, bool), self._typed([name]).strings(name, nullable=True)
        children = {field.name for field in kind}
        inside = self._table.has_values(f"{name}.bytes") if "bytes" in children else np.zeros(count, bool)
        if "path" not in children:
            return inside, no_paths
        return inside, self._typed([f"{name}.path"]).strings("path", nullable=True)

    def _numbers(self, files: NamedFiles, inside: Array, paths: Any) -> tuple[Array, dict[int, tuple[str, str]]]:
        """The file of each row; why a row cannot be used, by row."""
        numbers = np.full(len(self._table), self._number, np.int32)
        problems = dict(self.problems)
        reason = "missing_file" if self._columns.features is None else "missing_features"
        nothing = "is null" if holds_numbers(self._audio_kind) else "has neither bytes nor a path"
        home, is_named = Path(self._source.media_dir or self._manifest.path), ~inside
        is_named[[*problems]] = False
        paths = paths.combine_chunks() if isinstance(paths, pa.ChunkedArray) else paths
        doubtful = np.flatnonzero(is_named & may_be_unusable(paths))
        for row, written in zip(doubtful.tolist(), paths.take(pa.array(doubtful)).to_pylist(), strict=True):
            if problem := nothing if written is None else usable_name(written, home):
                where = f"{self._manifest.path}, row {row + 1}: column {self._columns.media} {problem}"
                problems[row] = (reason, where)
        is_named[[*problems]] = False
        numbers[is_named] = files.numbers(paths.filter(pa.array(is_named)), manifest=self._manifest)
        return numbers, problems

    def _ids(self, columns: TypedColumns, paths: Any) -> tuple[Any, Any]:
        derived = member_stems(paths)
        if pc.any(pc.equal(pc.fill_null(derived, ""), "")).as_py():
            numbered = joined(path_stem(self._manifest.path.name), "/", pa.array(np.arange(len(self._table))))
            derived = pc.if_else(pc.fill_null(pc.not_equal(derived, ""), fill_value=False), derived, numbered)
        _, given = columns.given_ids(id_names(self._columns))
        return (derived, None) if given is None else (pc.coalesce(given, derived), pc.is_valid(given))

    def _language(self, columns: TypedColumns) -> Any:
        name = self._columns.language
        if name not in columns.table.column_names or not pa.types.is_integer(columns.table[name].type):
            return columns.strings(name, nullable=True)
        names = class_names(self._table.schema, name)
        if names is None:
            raise columns.wrong(name, f"is {columns.table[name].type}, wanted string or a ClassLabel")
        codes = pc.cast(columns.table[name], pa.int64())
        known = pc.and_(pc.greater_equal(codes, 0), pc.less(codes, len(names)))
        return pa.array(names, pa.large_string()).take(pc.if_else(known, codes, pa.scalar(None, pa.int64())))


def taken_columns(source: SourceConfig, *, durations: tuple[str, ...] = ()) -> frozenset[str]:
    """Returns the names of all columns that a table is asked for, as far as it has them."""
    columns = source.columns
    text = columns.text if columns.labels is None else columns.labels
    named = durations if columns.duration is None else (columns.duration,)
    segments = (name for name in (columns.start, columns.end, columns.channel) if name is not None)
    others = (*id_names(columns), *named, *segments, *source.keep_columns)
    return frozenset((columns.media, text, columns.language, "prompt", *others))


def locate_rows(task: LocateTask) -> Located:
    """Returns the durations of a task's rows: from the header of the bytes in the row, or of the file that it names."""
    inside = pc.equal(task.rows["file"], task.group)
    own = replace(task, rows=task.rows.filter(inside))
    unknown = np.flatnonzero(np.isnan(own.rows["duration_s"].to_numpy()))
    file = HfFile(Path(task.paths[task.group])) if len(unknown) else None

    def duration_s(position: int) -> float:
        assert file is not None
        data = file.encoded(own.rows["offset"][position].as_py(), task.column) or b""
        if holds_numbers(file.schema.field(task.column).type):
            return num_valid(matrix_of(data)) * HOP_S
        return duration_of(lambda start, count: data[start : start + count], len(data))

    failures = Failures()
    durations = fill_durations(own, unknown, duration_s, failures)
    found = located(own, {"duration_s": pa.array(durations)}, failures)
    if len(own.rows) == len(task.rows):
        return found
    named = locate_files(replace(task, rows=task.rows.filter(pc.invert(inside))))
    return Located(
        rows=pa.concat_tables([found.rows, named.rows]).sort_by("row"),
        failed=pa.concat_tables([found.failed, named.failed]),
        absent=named.absent,
    )


def list_table(source: SourceConfig) -> Manifest:
    """Returns the rows of tables, by their names CSV, TSV, parquet, JSON lines or arrow (its file or its stream form).

    The audio column holds paths, relative to `source.audio_dir` or else to the table; of parquet and arrow also bytes,
    or both, as in `hf`. Without an id the path without extension is it, else `<file>/<row>`. Durations are those of the
    column that is named, or of the headers. Rows that cannot be used: `missing_file`, `bad_row` (another number of
    columns, no object), `bad_text` (no UTF-8), `repeated_field`. Raises ManifestError for a file that is no such table,
    for missing columns, and where all recordings lie in a folder that nothing names.
    """
    manifests = manifest_files(source)
    require_folder(source)
    files = NamedFiles(manifests, source)
    listed = listed_tables((open_rows(manifest, number, source) for number, manifest in enumerate(manifests)), files)
    _require_place(source, files)
    return listed


def listed_tables(tables: Iterable[TableRows], files: NamedFiles) -> Manifest:
    """Returns the rows of some tables that follow each other."""
    manifests, unused, start = files.files, Unused(), 0
    parts, rejected = [], []
    for table in tables:
        rows, failed = table.rows(files, start)
        unused.add(table.unused, rows=len(rows) + len(failed))
        start += len(rows) + len(failed)
        parts.append(rows)
        rejected.append(failed)
    require_rows(start, manifests)
    return Manifest(
        files=files.files, rows=concatenated(parts), rejected=pa.concat_tables(rejected), unused=unused.counts
    )


def _require_place(source: SourceConfig, files: NamedFiles) -> None:
    """Raises ManifestError where the recordings lie in one of the folders beside the table, which no setting names."""
    listed = files.files
    named = [listed[int(number)] for number in np.flatnonzero(~listed.is_listed)[:_LOOKED_AT]]
    if source.audio_dir is not None or not named or place_of(named[0].path) is not None:
        return
    if any(file.path.exists() for file in named):
        return
    folder = files.files[0].path.parent
    for beside in folders_in(folder):
        if all((beside / os.path.relpath(file.path, folder)).exists() for file in named):
            raise ManifestError(
                f"{files.files[0].path} names {named[0].name!r}, which is not beside it but in {beside}; set "
                f'source.audio_dir = "{beside}"',
                code="FB201",
            )


def open_rows(manifest: SourceFile, number: int, source: SourceConfig) -> TableRows:
    """Returns the rows of one table. number: of the file. Raises ManifestError for a file that is none."""
    columns = source.columns
    numbers = tuple(n for n in (columns.duration, columns.start, columns.end, columns.channel) if n is not None)
    wanted = WantedColumns(taken_columns(source), source.columns.media, numbers, SPANS)
    table: HfFile | TextTable
    if (form := form_of(manifest.path)) == "typed":
        table = HfFile(manifest.path)
    elif form == "text":
        table = read_csv(manifest.path, wanted)
    else:
        table = read_json_lines(manifest.path, wanted, kept=source.keep_columns)
    return TableRows(manifest, number, source, table)


def list_hf(source: SourceConfig) -> Manifest:
    """Returns the rows of `hf` data files: their place is a row number, or a file where the column holds only paths.

    The audio column is `Audio()`: bytes, path or both (paths relative to the data file), or plain binary or strings; it
    is never decoded here. With `source.columns.features` it is not looked at: that column holds the features, matrices
    of floats. With `source.columns.labels` the text of a row is the ids in that column, in decimal and parted by
    spaces. A ClassLabel language is its name. An id left out is the path without extension, else `<file>/<row>`. Raises
    MissingExtraError without the `datasets` library, ManifestError for missing columns and other types.
    """
    manifests = manifest_files(source)
    found = data_files(source, manifests)
    opened = (TableRows(file, number, source, HfFile(file.path), durations=DURATIONS) for number, file in found)
    return listed_tables(opened, NamedFiles(manifests, source))


def read_ljspeech(piece: FilePiece, rows: Sink) -> None:
    """Gives the rows of `metadata.csv`: `id|text|normalised text`, audio in `wavs/{id}.wav` or `.flac` beside it.

    The normalised text is taken where there is one, else the text. Quotation marks are text.
    Raises ManifestError, with the line, for other numbers of columns and empty ids, and where there is no `wavs/`.
    """
    path = Path(piece.path)
    folder = path.parent / AUDIO_FOLDER
    try:
        present = names_in(folder)
    except OSError as err:
        raise ManifestError(f"{path}: cannot read folder {folder}: {err.strerror}; wanted the audio there") from err
    for (number, *_), line in piece_lines(piece):
        fields, where = decoded(line, path, number).split("|"), f"{path}, line {number}"
        if len(fields) not in (2, 3):
            said = f"{len(fields)} columns, wanted id|text|normalised text; correct the manifest"
            raise ManifestError(f"{where}: {said}", code="FB203")
        sample_id, text = fields[0].strip(), fields[-1] if fields[-1].strip() else fields[1]
        if not sample_id or "\0" in sample_id:
            said = f"column id is {sample_id!r}, wanted the name of a file in {AUDIO_FOLDER}/"
            raise ManifestError(f"{where}: {said}", code="FB203")
        name = next((n for e in _EXTENSIONS if (n := sample_id + e) in present), sample_id + _EXTENSIONS[0])
        record = Record({"audio": f"{AUDIO_FOLDER}/{name}", "text": text})
        rows.take(record, where=where, stem=sample_id, number=number)


READER = RowReader(
    read=read_table, runs=table_runs, recordings=RecordingLister(list=list_table, locate=locate_rows), holds_media=True
)
HF_READER = RowReader(
    read=read_typed,
    runs=file_runs,
    files=data_files,
    recordings=RecordingLister(list=list_hf, locate=locate_rows),
    holds_media=True,
)
LJSPEECH_READER = RowReader(read=read_ljspeech, runs=line_runs)
