"""Lists of clips in tars: `kind = "tar"`, parquet, and `kind = "filelist"`, TSV; only what they list is eligible."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.audio_facts import all_failed, fill_durations, header_duration_s, located
from forebay.rows.kept_columns import concatenated, part_of, require_columns
from forebay.rows.manifest import (
    SPAN,
    UNLOCATED,
    Manifest,
    MediaPlace,
    Unused,
    constant,
    grouped,
    require_rows,
    row_table,
)
from forebay.rows.meanings.recordings import spans_of
from forebay.rows.media_reader import opened
from forebay.rows.named_files import NamedFiles, manifest_files, usable_name
from forebay.rows.reader import (
    NOT_FOUND,
    Failures,
    FilePiece,
    Located,
    LocateTask,
    RecordingLister,
    RowReader,
    UnreadableTar,
    find_rows,
    member_stems,
    missing_reason,
)
from forebay.rows.readers.arrow_files import HfFile, TypedColumns, first
from forebay.rows.readers.json_lines import decoded
from forebay.rows.readers.table_records import ItemColumn, file_runs, read_typed
from forebay.rows.readers.tar_clips import locate_filelist
from forebay.rows.segments import BOUNDS, named_segments
from forebay.store.remote.raw.raw_sources import at_hand
from forebay.store.source_files import SourceFile

REQUIRED = ("tar_path", "tar_member_name", "transcript", "language", "duration_s")
OPTIONAL = ("prompt", "sample_id")
COLUMNS = ("shard path", "sample id", "language", "duration in seconds")


def list_tar(source: SourceConfig) -> Manifest:
    """Returns the rows of parquet manifests, media not looked up yet.

    Columns: `tar_path` (relative to the manifest), `tar_member_name`, `transcript`, `language`, `duration_s` (null:
    read from the header), optional `prompt` and `sample_id`; others are counted by name. An id left out is the member's
    name without its extension. Raises ManifestError for missing columns, other types and nulls in the first two.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    unused = Unused()
    tables = [_read(manifest, files, unused, source=source) for manifest in manifests]
    rows = grouped(concatenated(tables))
    require_rows(len(rows), manifests)
    return Manifest(files=files.files, rows=rows, unused=unused.counts)


def locate_tar(task: LocateTask) -> Located:
    """Returns offset, size and duration of a task's rows; what the tar does not have has failed."""
    index = task.tar_index()
    if isinstance(index, UnreadableTar):
        return all_failed(task, index)
    found = find_rows(task.rows["member"].combine_chunks(), index)
    is_there, at = found != NOT_FOUND, np.maximum(found, 0)
    offsets, sizes = (values[at] if len(values) else at for values in (index.offsets, index.sizes))
    failures = Failures()
    for position in np.flatnonzero(~is_there).tolist():
        row, sample_id, member = (task.rows[name][position].as_py() for name in ("row", "sample_id", "member"))
        failures.add(row, sample_id, *missing_reason(index, member, task.name))
    unknown = np.flatnonzero(np.isnan(task.rows["duration_s"].to_numpy()) & is_there)
    with opened(index.path) if len(unknown) else contextlib.nullcontext(-1) as descriptor:

        def duration_s(position: int) -> float:
            return header_duration_s(descriptor, offset=int(offsets[position]), size=int(sizes[position]))

        durations = fill_durations(task, unknown, duration_s, failures)
    columns = {"offset": offsets, "size": sizes, "duration_s": durations}
    return located(task, {name: pa.array(values) for name, values in columns.items()}, failures)


def _read(manifest: SourceFile, files: NamedFiles, unused: Unused, *, source: SourceConfig) -> pa.Table:
    keep, named = source.keep_columns, source.columns
    bounds = [name for name in (named.start, named.end, named.channel) if name is not None]
    path, wanted = manifest.path, {*REQUIRED, *OPTIONAL, *BOUNDS, *bounds, *keep}
    try:
        with at_hand(path) as local, pq.ParquetFile(local) as file:
            names = file.schema_arrow.names
            _require_columns(path, names, (*REQUIRED, *bounds))
            require_columns(keep, names, where=str(path))
            columns = TypedColumns(file.read(columns=[name for name in names if name in wanted]), path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as err:  # UnicodeDecodeError: of a damaged column name
        raise ManifestError(f"{path} cannot be read as parquet: {err}; name a parquet manifest", code="FB205") from err
    segments = columns.segments(named, ("duration_s",))
    spans = {SPAN + name: column for name, column in segments.items()}
    spans = spans or spans_of(columns.table.drop_columns("duration_s"))
    unused.add({*names} - wanted | BOUNDS.intersection(names) - {*keep, *bounds}, rows=len(columns.table))
    members = columns.strings("tar_member_name", nullable=False)
    if pc.any(pc.starts_with(members, "./")).as_py():  # a tar's index keeps names without it
        members = pc.replace_substring_regex(members, r"^\./", "")
    ids, explicit = _sample_ids(columns, members)
    ids = named_segments(ids, explicit, segments)
    paths, count = columns.strings("tar_path", nullable=False), len(columns.table)
    numbers = _tar_numbers(
        paths, manifest, files, lambda problem, rows: columns.wrong("tar_path", problem, row=first(rows))
    )
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


def _sample_ids(columns: TypedColumns, members: Any) -> tuple[Any, Any]:
    given = columns.strings("sample_id", nullable=True)
    if given is None:
        return member_stems(members), None
    empty = pc.fill_null(pc.equal(given, ""), fill_value=False)
    if pc.any(empty).as_py():
        raise columns.wrong("sample_id", "is empty, wanted an id or null", row=first(empty))
    return pc.coalesce(given, member_stems(members)) if given.null_count else given, pc.is_valid(given)


def _tar_numbers(
    paths: Any, manifest: SourceFile, files: NamedFiles, wrong: Callable[[str, Any], ManifestError]
) -> pa.Array:
    """Returns the tar of every row, by its number. wrong: (problem, bool [rows]) -> the error for what is no name."""
    paths = paths.combine_chunks()
    encoded = paths.dictionary_encode()
    for code, written in enumerate(encoded.dictionary.to_pylist()):
        if (problem := usable_name(written)) is not None:
            raise wrong(problem, pc.equal(encoded.indices, code))
    return pa.array(files.numbers(paths, manifest=manifest))


def _require_columns(path: Path, names: Sequence[str], required: Sequence[str]) -> None:
    """Raises ManifestError where a table does not have all the required columns."""
    missing = [name for name in required if name not in names]
    if missing:
        raise ManifestError(
            f"{path}: no column {', '.join(missing)}; it has {', '.join(names) or 'none'}; wanted "
            f"{', '.join(required)}",
            code="FB202",
        )


class _TarColumns(ItemColumn):
    """The columns that name members of tars: `tar_path`, and `tar_member_name`, a member or a list of them."""

    names = leaves = REQUIRED[:2]

    def __init__(self, file: HfFile, piece: FilePiece) -> None:
        _require_columns(Path(piece.path), file.schema.names, self.names)

    def places(self, batch: pa.RecordBatch, first: int, runs: list[int]) -> Iterator[Sequence[MediaPlace | str | None]]:  # noqa: ARG002
        """Yields the images of each row, not looked up yet; None for a null."""
        for tar, given in zip(*(batch[name].to_pylist() for name in self.names), strict=True):
            members = given if isinstance(given, list) else [given]
            named = [None if name is None else str(name).removeprefix("./") for name in members]
            yield [None if None in (tar, name) else MediaPlace(tar, name or "", size=UNLOCATED) for name in named]


READER = RowReader(
    read=functools.partial(read_typed, media=_TarColumns),
    runs=file_runs,
    recordings=RecordingLister(list=list_tar, locate=locate_tar, in_tars=True),
)


def list_filelist(source: SourceConfig) -> Manifest:
    """Returns the rows of TSV files without header, media not looked up yet.

    Columns: shard path (relative to the file), sample id (the member's name without extension), language, duration in
    seconds; the last two may be empty. Nothing is quoted; blank lines are passed over.
    Raises ManifestError, with the line, for other numbers of columns and durations that are no number.
    """
    manifests = manifest_files(source)
    files = NamedFiles(manifests, source)
    rows = grouped(pa.concat_tables([_read_list(manifest, files) for manifest in manifests]))
    require_rows(len(rows), manifests)
    return Manifest(files=files.files, rows=rows)


def _read_list(manifest: SourceFile, files: NamedFiles) -> pa.Table:
    names = [*"abcd"]
    kinds = dict.fromkeys(names, pa.large_string())
    try:
        with at_hand(manifest.path) as local:
            table = pc_csv.read_csv(
                local,
                # One thread: several would split the lines among themselves in another order than they stand in.
                read_options=pc_csv.ReadOptions(column_names=names, use_threads=False),
                parse_options=pc_csv.ParseOptions(delimiter="\t", quote_char=False, escape_char=False),
                convert_options=pc_csv.ConvertOptions(column_types=kinds, strings_can_be_null=False),
            )
        durations = pc.cast(pc.if_else(pc.equal(table["d"], ""), "nan", table["d"]), pa.float64())
    except OSError as err:
        raise ManifestError(
            f"cannot read manifest {manifest.path}: {err}; check the path and its permissions", code="FB201"
        ) from err
    except pa.ArrowInvalid as err:
        raise _first_problem(manifest, err) from err
    if pc.any(pc.equal(table["b"], "")).as_py():
        raise _first_problem(manifest, None)
    numbers = _tar_numbers(table["a"], manifest, files, lambda *_: _first_problem(manifest, None))
    return row_table(
        {
            "sample_id": table["b"],
            "member": table["b"],  # as it is written: the id may yet become another, to be unique
            "group": numbers,
            "file": numbers,
            "size": constant(UNLOCATED, len(table), pa.int64()),
            "duration_s": durations,
            "language": table["c"],
        },
        num_rows=len(table),
    )


def _first_problem(manifest: SourceFile, err: Exception | None) -> ManifestError:
    """Returns what is wrong and where: looked for line by line, which the fast way cannot tell."""
    with at_hand(manifest.path) as local:
        data = local.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(re.split(rb"\r\n|\n|\r", data), 1):
        problem = _line_problem(decoded(line, manifest.path, number)) if line else None
        if problem:
            return ManifestError(f"{manifest.path}, line {number}: {problem}; correct the manifest", code="FB203")
    return ManifestError(
        f"{manifest.path}: {err or 'no rows'}; wanted tab-separated {', '.join(COLUMNS)}", code="FB203"
    )


def _line_problem(line: str) -> str | None:
    fields = line.split("\t")
    if len(fields) != len(COLUMNS):
        return f"{len(fields)} columns, wanted {len(COLUMNS)}: {', '.join(COLUMNS)}, separated by tabs"
    if problem := usable_name(fields[0]):
        return f"column {COLUMNS[0]} {problem}"
    if not fields[1]:
        return f"column {COLUMNS[1]} is empty, wanted the member's name without extension"
    try:
        if fields[3]:
            pc.cast(pa.scalar(fields[3]), pa.float64())
    except pa.ArrowInvalid:
        return f"column {COLUMNS[3]} is {fields[3]!r}, wanted a number (the file has no header line)"
    return None


FILELIST_READER = RowReader(recordings=RecordingLister(list=list_filelist, locate=locate_filelist, in_tars=True))
