"""Tables: `kind = "table"` in any form, `kind = "hf"` of the `datasets` library, `kind = "ljspeech"`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.kept_columns import concatenated
from forebay.rows.manifest import Manifest, Unused, require_rows
from forebay.rows.meanings.recording_pieces import SPANS
from forebay.rows.named_files import NamedFiles, manifest_files, require_folder
from forebay.rows.reader import DURATIONS, FilePiece, RecordingLister, RowReader, Sink
from forebay.rows.readers.arrow_files import HfFile, data_files
from forebay.rows.readers.csv_tables import TextTable, WantedColumns, read_csv, read_json_lines
from forebay.rows.readers.json_lines import decoded
from forebay.rows.readers.jsonl import line_runs, piece_lines
from forebay.rows.readers.table_records import file_runs, form_of, read_table, read_typed, table_runs
from forebay.rows.readers.table_rows import TableRows, locate_rows, taken_columns
from forebay.rows.record import Record
from forebay.store.remote.raw.raw_sources import folders_in, names_in, place_of
from forebay.store.source_files import SourceFile

AUDIO_FOLDER = "wavs"
_EXTENSIONS = (".wav", ".flac")
_LOOKED_AT = 8
"""Recordings that are looked for where none is where the table says."""


def list_table(source: SourceConfig) -> Manifest:
    """Returns the rows of tables, by their names CSV, TSV, parquet, JSON lines or arrow (its file or its stream form).

    The audio column holds paths, relative to `source.audio_dir` or else to the table; of parquet and arrow also bytes,
    or both, as in `hf`. Text, language, id, duration and kept columns by `[source.columns]`; those left at their
    default may be missing. Without an id the path without extension is it, else `<file>/<row>`. Durations are those of
    the column that is named, or of the headers. Other columns are counted by name. Rows that cannot be used:
    `missing_file`, `bad_row` (another number of columns, no object), `bad_text` (no UTF-8), `repeated_field`.
    Raises ManifestError for a file that is no such table, for missing columns, and where all recordings lie in a folder
    that nothing names; ConfigError for a missing column of
    `source.keep_columns`.
    """
    manifests = manifest_files(source)
    require_folder(source)
    files = NamedFiles(manifests, source)
    listed = _listed((open_rows(manifest, number, source) for number, manifest in enumerate(manifests)), files)
    _require_place(source, files)
    return listed


def _listed(tables: Iterable[TableRows], files: NamedFiles) -> Manifest:
    """Returns the rows of some tables that follow each other."""
    manifests, unused, start = [*files.files], Unused(), 0
    parts, rejected = [], []
    for table in tables:
        rows, failed = table.rows(files, start)
        unused.add(table.unused, rows=len(rows) + len(failed))
        start += len(rows) + len(failed)
        parts.append(rows)
        rejected.append(failed)
    require_rows(start, manifests)
    return Manifest(
        files=tuple(files.files), rows=concatenated(parts), rejected=pa.concat_tables(rejected), unused=unused.counts
    )


def _require_place(source: SourceConfig, files: NamedFiles) -> None:
    """Raises ManifestError where the recordings lie in one of the folders beside the table, which no setting names."""
    named = [file for file in files.files if not file.listed][:_LOOKED_AT]
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
    numbers = () if source.columns.duration is None else (source.columns.duration,)
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
    spaces. Text and language by `source.columns.text` and `source.columns.language` (null where those
    are left at their default and missing), a ClassLabel language by its name. Optional: `sample_id` or `id`,
    `duration_s` or `duration`, `prompt`; other columns are counted by name. An id left out is the path without
    extension, else `<file>/<row>`. Raises MissingExtraError without the `datasets` library, ManifestError for missing
    columns and other types.
    """
    manifests = manifest_files(source)
    found = data_files(source, manifests)
    opened = (TableRows(file, number, source, HfFile(file.path), durations=DURATIONS) for number, file in found)
    return _listed(opened, NamedFiles(manifests, source))


def read_ljspeech(piece: FilePiece, rows: Sink) -> None:
    """Gives the rows of `metadata.csv`: `id|text|normalised text`, audio in `wavs/{id}.wav` or `.flac` beside it.

    The normalised text is taken where there is one, else the text. Quotation marks are text.
    Raises ManifestError, with the line, for other numbers of columns and empty ids, and where there is no `wavs/`.
    """
    path = Path(piece.path)
    present = _audio_names(path)
    for (number, _), line in piece_lines(piece):
        sample_id, text = _ljspeech_fields(decoded(line, path, number), f"{path}, line {number}")
        name = next((n for e in _EXTENSIONS if (n := sample_id + e) in present), sample_id + _EXTENSIONS[0])
        record = Record({"audio": f"{AUDIO_FOLDER}/{name}", "text": text})
        rows.take(record, where=f"{path}, line {number}", stem=sample_id, number=number)


def _ljspeech_fields(line: str, where: str) -> tuple[str, str]:
    fields = line.split("|")
    if len(fields) not in (2, 3):
        raise ManifestError(
            f"{where}: {len(fields)} columns, wanted id|text|normalised text; correct the manifest", code="FB203"
        )
    sample_id, text = fields[0].strip(), fields[-1] if fields[-1].strip() else fields[1]
    if not sample_id or "\0" in sample_id:
        raise ManifestError(
            f"{where}: column id is {sample_id!r}, wanted the name of a file in {AUDIO_FOLDER}/", code="FB203"
        )
    return sample_id, text


def _audio_names(metadata: Path) -> set[str]:
    folder = metadata.parent / AUDIO_FOLDER
    try:
        return names_in(folder)
    except OSError as err:
        raise ManifestError(f"{metadata}: cannot read folder {folder}: {err.strerror}; wanted the audio there") from err


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
