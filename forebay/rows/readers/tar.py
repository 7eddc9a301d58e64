"""`kind = "tar"`: parquet manifests over tars."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.kept_columns import concatenated, part_of
from forebay.rows.kept_columns import require_columns as require_kept
from forebay.rows.manifest import UNLOCATED, Manifest, Unused, constant, grouped, require_rows, row_table
from forebay.rows.media_reader import opened
from forebay.rows.named_files import NamedFiles, manifest_files, usable_name
from forebay.rows.reader import Failures, Located, LocateTask, Reader, RecordingLister
from forebay.rows.readers.tar_members import (
    NOT_FOUND,
    UnreadableTar,
    find_rows,
    member_stems,
    missing_reason,
    name_array,
    take_or_zero,
    without_dot,
)
from forebay.rows.readers.typed_columns import Columns, first, require_columns
from forebay.rows.recording_pieces import BOUNDS, spans_of
from forebay.rows.recording_rows import all_failed, fill_durations, header_duration_s, located
from forebay.store.remote.raw.sources import at_hand
from forebay.store.source_files import SourceFile
from forebay.tar.members import TarIndex

REQUIRED = ("tar_path", "tar_member_name", "transcript", "language", "duration_s")

OPTIONAL = ("prompt", "sample_id")


def list_tar(source: SourceConfig) -> Manifest:
    """Returns the rows of parquet manifests, media not looked up yet.

    Columns: `tar_path` (relative to the manifest), `tar_member_name`, `transcript`, `language`, `duration_s` (null:
    read from the header), optional `prompt` and `sample_id`; others are counted by name. An id left out is the member's
    name without its extension. Raises ManifestError for missing columns, other types and nulls in the first two.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    unused = Unused()
    tables = [_read(manifest, files, unused, keep=source.keep_columns) for manifest in manifests]
    rows = grouped(concatenated(tables))
    require_rows(len(rows), manifests)
    return Manifest(files=tuple(files.files), rows=rows, unused=unused.counts)


def locate_tar(task: LocateTask) -> Located:
    """Returns offset, size and duration of a task's rows; what the tar does not have has failed."""
    index = task.tar_index()
    if isinstance(index, UnreadableTar):
        return all_failed(task, index)
    members = task.rows["member"].combine_chunks()
    found = find_rows(members, name_array(index))
    failures = Failures()
    fail_missing(task, index, found, members=members, failures=failures)
    unknown = np.flatnonzero(np.isnan(task.rows["duration_s"].to_numpy()) & (found != NOT_FOUND))
    with opened(index.path) if len(unknown) else contextlib.nullcontext(-1) as descriptor:

        def duration_s(position: int) -> float:
            row = found[position]
            return header_duration_s(descriptor, offset=int(index.offsets[row]), size=int(index.sizes[row]))

        durations = fill_durations(task, unknown, duration_s, failures)
    columns = {
        "offset": pa.array(take_or_zero(index.offsets, found)),
        "size": pa.array(take_or_zero(index.sizes, found)),
        "duration_s": pa.array(durations),
    }
    return located(task, columns, failures)


def fail_missing(task: LocateTask, index: TarIndex, found: Any, *, members: Any, failures: Failures) -> None:
    """Adds the rows whose member was not found to `failures`, with the reason that the tar's index gives."""
    for position in np.flatnonzero(found == NOT_FOUND).tolist():
        sample_id = task.rows["sample_id"][position].as_py()
        reason, message = missing_reason(index, members[position].as_py(), task.name)
        failures.add(task.rows["row"][position].as_py(), sample_id, reason, message)


def read_columns(path: Path, required: Sequence[str], optional: Sequence[str], keep: Sequence[str] = ()) -> Columns:
    """Returns the named columns of a parquet file. keep: those of `source.keep_columns`.

    Raises ManifestError where it cannot be read or a required column is missing, ConfigError where a kept one is.
    """
    try:
        with at_hand(path) as local, pq.ParquetFile(local) as file:
            names = file.schema_arrow.names
            require_columns(path, names, required)
            require_kept(keep, names, where=str(path))
            wanted = {*required, *optional, *keep}
            return Columns(file.read(columns=[n for n in names if n in wanted]), path, frozenset(names) - wanted)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as err:  # UnicodeDecodeError: of a damaged column name
        raise ManifestError(f"{path} cannot be read as parquet: {err}; name a parquet manifest", code="FB205") from err


def _read(manifest: SourceFile, files: NamedFiles, unused: Unused, *, keep: Sequence[str]) -> pa.Table:
    columns = read_columns(manifest.path, REQUIRED, (*OPTIONAL, *BOUNDS), keep)
    spans = spans_of(columns.table.drop_columns("duration_s"))
    unused.add(columns.unused | BOUNDS.intersection(columns.table.column_names) - {*keep}, rows=len(columns.table))
    members = without_dot(columns.strings("tar_member_name", nullable=False))
    ids, explicit = _sample_ids(columns, members)
    numbers = _tar_numbers(columns, manifest, files)
    count = len(columns.table)
    return row_table(
        {
            "sample_id": ids,
            "explicit_id": explicit,
            "group": numbers,
            "file": numbers,
            "member": members,
            "size": constant(UNLOCATED, count, pa.int64()),
            "duration_s": columns.seconds("duration_s"),
            "language": columns.strings("language", nullable=True),
            "prompt": columns.strings("prompt", nullable=True),
            "text": columns.strings("transcript", nullable=True),
            **spans,
        },
        num_rows=count,
        kept={name: part_of(columns.table[name], name, where=str(manifest.path)) for name in keep},
    )


def _sample_ids(columns: Columns, members: Any) -> tuple[Any, Any]:
    given = columns.strings("sample_id", nullable=True)
    if given is None:
        return member_stems(members), None
    empty = pc.fill_null(pc.equal(given, ""), fill_value=False)
    if pc.any(empty).as_py():
        raise columns.wrong("sample_id", "is empty, wanted an id or null", row=first(empty))
    if not given.null_count:
        return given, pc.is_valid(given)
    return pc.coalesce(given, member_stems(members)), pc.is_valid(given)


def _tar_numbers(columns: Columns, manifest: SourceFile, files: NamedFiles) -> Any:
    paths = columns.strings("tar_path", nullable=False)
    assert paths is not None
    encoded = paths.combine_chunks().dictionary_encode()
    numbers = []
    for code, written in enumerate(encoded.dictionary.to_pylist()):
        problem = usable_name(written)
        if problem:
            raise columns.wrong("tar_path", problem, row=first(pc.equal(encoded.indices, code)))
        numbers.append(files.number(written, manifest=manifest))
    return pa.array(np.asarray(numbers, np.int32)[encoded.indices.to_numpy()])


READER = Reader(recordings=RecordingLister(list=list_tar, locate=locate_tar, in_tars=True))
