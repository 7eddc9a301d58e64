"""Rows of recordings: what a record says of one, its duration by its header, and rows that are of a piece of theirs.

A recording is read whole, so the text of a piece would be of another sound. What a table says of pieces stands beside
the rows of a listing, in columns of seconds, until durations are known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import Reads, SourceConfig
from forebay.errors import DecodeError, ManifestError, SampleError
from forebay.rows.kept_columns import parts_of_rows, require_values, values_in
from forebay.rows.manifest import (
    SPAN,
    WHOLE_FILE,
    Kind,
    Manifest,
    Unused,
    columns_of,
    rejections,
    require_rows,
    row_table,
    storable,
)
from forebay.rows.media_reader import is_gone, opened
from forebay.rows.named_files import NamedFiles, manifest_files, path_stem, usable_name
from forebay.rows.reader import DURATIONS, IDS, Failures, Located, LocateTask, Piece, Record, Sink
from forebay.rows.readers.json_lines import JsonError, seconds_of, string_of
from forebay.rows.readers.tar_members import UnreadableTar
from forebay.store.layout import Array
from forebay.store.remote.raw.sources import look_up, place_of, shown, source_stat
from forebay.store.sound_containers import one_stream, unread
from forebay.store.sound_headers import MAX_WHOLE_BYTES, header_info, parsed_header
from forebay.store.source_files import SourceFile

_TYPES = {
    "row": pa.int64(),
    "group": pa.int32(),
    "sample_id": pa.large_string(),
    "explicit_id": pa.bool_(),
    "file": pa.int32(),
    "duration_s": pa.float64(),
    **dict.fromkeys(("language", "prompt", "text"), pa.large_string()),
}
_TAKEN = frozenset({"audio", "text", "language", "prompt", *IDS, *DURATIONS})


@dataclass(slots=True)
class RecordingSink:
    """The recordings that records name, of all files of a source.

    A record has `audio`, a name relative to the manifest, `text` (null where there is none, and taken as it is, with
    `language English<asr_text>` in front or not), and may have `language`, `prompt`, `sample_id` or `id`, `duration_s`
    or `duration`. An id left out is `audio` without its extension. Other fields are counted by name.
    """

    source: SourceConfig
    manifests: Sequence[SourceFile]
    reads: Reads = "recordings"
    unused: Unused = field(default_factory=Unused)
    classes: tuple[str, ...] | None = None
    is_absent: bool = False
    count: int = 0
    failures: Failures = field(default_factory=Failures)
    _group: int = 0
    _files: NamedFiles = field(init=False)
    _taken: frozenset[str] = field(init=False)
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _kept: list[tuple[Any, ...]] = field(default_factory=list)
    _spans: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._files = NamedFiles(self.manifests, self.source)
        self._taken = _TAKEN.union(self.source.keep_columns)

    def read(self, read: Callable[[Piece, Sink], None]) -> Manifest:
        """Returns the recordings of all files. Raises ManifestError for a record that is none."""
        for group, file in enumerate(self.manifests):
            self._group, path = group, str(file.path)
            read(Piece(source=self.source, reads=self.reads, group=group, name=path, path=path), self)
        require_rows(self.count, self.manifests)
        columns = columns_of(self._rows, _TYPES)
        bounds = span_columns(self._spans, sorted({name for row in self._spans for name in row}))
        columns |= {SPAN + name: column for name, column in bounds.items()}
        kept = parts_of_rows(self._kept, self.source.keep_columns)
        table = row_table(columns, num_rows=len(self._rows), kept=kept)
        require_values(table, self.unused.counts, where=", ".join(self.source.manifests))
        files, rejected = tuple(self._files.files), self.failures.table()
        return Manifest(files=files, rows=table, rejected=rejected, unused=self.unused.counts)

    def take(
        self, record: Record | Callable[[], Record], *, where: str, stem: str | None = None, number: int = 0
    ) -> None:
        """Takes a row. Raises ManifestError for one that is no recording; one with a reason of its own fails."""
        try:
            self._add(record() if callable(record) else record, stem)
        except (SampleError, JsonError) as err:
            message = f"{where}: {err}; correct the manifest"
            if err.reason is None:
                raise ManifestError(message, code="FB203") from err
            name = storable(path_stem(self.manifests[self._group].name))
            self.reject(stem or f"{name}/{number}", err.reason, message)
            return
        self.count += 1

    def reject(self, sample_id: str | None, reason: str, message: str, *, kind: Kind = "failed") -> None:
        """Takes a row that cannot be used."""
        self.failures.add(self.count, sample_id or str(self.count), reason, message, kind=kind)
        self.count += 1

    def _add(self, record: Record, stem: str | None) -> None:
        fields, group = record.fields, self._group
        self.unused.add_of(fields, self._taken)
        audio = string_of(fields, ("audio",), required=True) or ""
        if problem := usable_name(audio):
            raise JsonError(f"field audio {problem}")
        given, *texts = _texts_of(fields)
        seconds = seconds_of(fields, DURATIONS)
        to_keep = values_in(fields if record.kept is None else record.kept, self.source.keep_columns)
        file = self._files.number(audio, manifest=self.manifests[group])
        self._kept.append(to_keep)
        self._spans.append({name: fields[name] for name in fields.keys() & BOUNDS})
        sample_id = given or stem or path_stem(audio)
        self._rows.append((self.count, group, sample_id, given is not None, file, seconds, *texts))


def _texts_of(fields: dict[str, Any]) -> tuple[str | None, ...]:
    """Returns id, language, prompt and text of a record. Raises JsonError for one without the field `text`."""
    if "text" not in fields:
        raise JsonError("has no field text, wanted a string or null")
    given = string_of(fields, IDS)
    if given == "":
        raise JsonError(f"field {IDS[0]} is empty, wanted an id")
    return given, *(string_of(fields, (name,)) for name in ("language", "prompt", "text"))


def list_records(source: SourceConfig, read: Callable[[Piece, Sink], None]) -> Manifest:
    """Returns the recordings that the records of a source name; see `RecordingSink`."""
    return RecordingSink(source, manifest_files(source)).read(read)


def located(task: LocateTask, columns: dict[str, Any], failures: Failures, *, absent: Sequence[int] = ()) -> Located:
    """Returns the columns of a task's rows, without the rows that failed."""
    table = pa.table({"row": task.rows["row"], **columns})
    if failures.found:
        bad = np.isin(task.rows["row"].to_numpy(), [row for row, *_ in failures.found])
        table = table.filter(pa.array(~bad))
    return Located(rows=table, failed=failures.table(), absent=tuple(absent))


def all_failed(task: LocateTask, tar: UnreadableTar) -> Located:
    """Returns a task's rows as failed, all because their tar cannot be read."""
    rows = task.rows
    failed = rejections(rows["row"], rows["sample_id"], kind="failed", reason=tar.reason, message=tar.message)
    empty = rows.select(["row"]).slice(0, 0)
    return Located(rows=empty, failed=failed, absent=(task.group,) if tar.absent else ())


def header_duration_s(descriptor: int, *, offset: int, size: int) -> float:
    """Returns the duration that the header of an encoded clip gives; raises as `duration_of` does.

    The clip is `size` bytes at `offset` of the file.
    """
    return duration_of(
        lambda start, count: os.pread(descriptor, max(0, min(count, size - start)), offset + start), size
    )


def duration_of(read: Callable[[int, int], bytes], size: int) -> float:
    """Returns the duration that the header of an encoded clip gives.

    read: (offset in the clip, number of bytes) -> bytes, fewer only at its end. size: of the clip in bytes.
    Raises DecodeError where it gives none: `empty_file`, `empty_audio`, `format`, `truncated_audio` or `chained_audio`
    where that is why, else `unknown_duration`.
    """
    if not size:  # the reason that decoding gives where the manifest says a duration
        raise DecodeError("empty_file", "the file is empty (0 bytes); write or list it again")
    info = header_info(read, size)
    if info is not None and info.num_samples > 0 and info.sample_rate_hz > 0:
        return float(info.duration_s)
    claim = parsed_header(read, size)
    if claim is not None and not claim.num_samples and claim.format != "flac":  # a stream of FLAC may not know it
        raise DecodeError("empty_audio", "its header says 0 samples; write the recording again, or remove it")
    problem = one_stream(read(0, size))[1] if size <= MAX_WHOLE_BYTES else unread(read(0, 16))
    raise DecodeError(
        *(problem or ("unknown_duration", "neither manifest nor header gives a duration; mend or remove it"))
    )


def no_duration(name: str, sample_id: str, err: DecodeError) -> tuple[str, str]:
    """Returns reason and message for a clip that nothing gives a duration for. name: of its file."""
    return err.reason, f"{name}: sample {sample_id}: {err}"


def fill_durations(
    task: LocateTask, positions: Array, duration_of_row: Callable[[int], float], failures: Failures
) -> Array:
    """Returns the durations of a task's rows, those at some positions made known; rows that have none have failed."""
    durations: Array = task.rows["duration_s"].to_numpy().copy()
    for position in positions.tolist():
        try:
            durations[position] = duration_of_row(position)
        except DecodeError as err:
            sample_id = task.rows["sample_id"][position].as_py()
            failures.add(task.rows["row"][position].as_py(), sample_id, *no_duration(task.name, sample_id, err))
    return durations


def locate_files(task: LocateTask) -> Located:
    """Returns the durations of a task's rows; a file that cannot be opened fails its rows as `missing_file`.

    A file that cannot be read for a reason of the machine (EIO, ENOMEM, ...) raises OSError.
    """
    failures = Failures()
    durations = task.rows["duration_s"].to_numpy().copy()
    absent: dict[int, str] = {}
    look_up([Path(path) for path in task.paths.values()])
    columns = [task.rows[name].to_pylist() for name in ("row", "sample_id", "file")]
    for position, (row, sample_id, file) in enumerate(zip(*columns, strict=True)):
        path = task.paths[file]
        try:
            durations[position] = _looked_at(path, durations[position])
        except OSError as err:
            if not is_gone(err):
                raise
            absent[file] = f"{shown(path)} cannot be opened: {err.strerror}; correct the manifest or add the file"
        except DecodeError as err:
            failures.add(row, sample_id, *no_duration(shown(path), sample_id, err))
        if file in absent:
            failures.add(row, sample_id, "missing_file", absent[file])
    return located(task, {"duration_s": pa.array(durations)}, failures, absent=sorted(absent))


def _looked_at(path: str, known_s: float) -> float:
    """Returns the duration of a whole file; one that is known costs a look whether the file can be opened.

    Whether an object of a store is there is known without opening it.
    """
    if place_of(path) is not None and not np.isnan(known_s):
        source_stat(path)
        return float(known_s)
    with opened(path) as descriptor:
        if not np.isnan(known_s):
            return float(known_s)
        return header_duration_s(descriptor, offset=0, size=os.fstat(descriptor).st_size)


logger = logging.getLogger(__name__)

_STARTS = ("start", "start_s", "start_time", "begin", "begin_s", "begin_time", "onset", "offset")
_ENDS = ("end", "end_s", "end_time")
_LENGTHS = ["duration_s", "duration"]
BOUNDS = frozenset(form for name in _STARTS + _ENDS for form in (name, name.capitalize(), name.upper()))
"""Columns that say where in its recording a row begins or ends."""
SPANS = BOUNDS | frozenset(_LENGTHS)
_LEAST_S, _SHARE = 0.5, 0.05
"""Without `source.duration_tolerance`: the larger of these seconds and this share of the stated duration."""
SEVERAL = f"{SPAN}several texts"
_ADVICE = (
    "a recording is read whole, so a row would have the text of a piece; cut the recordings (ffmpeg -i IN -ss START "
    "-to END OUT) and list the pieces, or rename the column where it is no time of the recording"
)


def allowed_s(tolerance_s: float | None, seconds: Array) -> Array:
    """Returns by how much durations may differ. tolerance_s: `source.duration_tolerance`."""
    return np.maximum(_LEAST_S, _SHARE * seconds) if tolerance_s is None else np.full(len(seconds), tolerance_s)


def spans_of(table: pa.Table) -> dict[str, pa.Array]:
    """Returns the columns of a table that tell of pieces, as a listing's rows have them."""
    names = [name for name in table.column_names if name in SPANS and table.column_names.count(name) == 1]
    return {SPAN + name: _seconds(table[name]) for name in names}


def span_columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, pa.ChunkedArray]:
    """Returns fields of JSON objects as columns of seconds."""
    return {n: pa.chunked_array([[_number(row.get(n)) for row in rows]], pa.float64()) for n in names}


def _seconds(column: Any) -> Any:
    try:
        seconds = pc.cast(column, pa.float64(), safe=False)
    except pa.ArrowException:
        seconds = pa.array([_number(value) for value in column.to_pylist()], pa.float64())
    return pc.if_else(pc.is_finite(seconds), seconds, pa.scalar(None, pa.float64()))


def _number(value: Any) -> float | None:
    """Returns seconds, of `1:02.5` too; None where a value is no time."""
    try:
        parts = str(value).replace(",", ".").split(":")
        return float(sum(float(part) * 60**place for place, part in enumerate(reversed(parts))))
    except (ValueError, OverflowError):
        return None


def refuse_differing(rows: pa.Table, name_of: Callable[[int, str], str]) -> pa.Table:
    """Returns the rows with those marked whose recording has rows of other texts, which one warning counts.

    name_of: (file, member) -> what a recording is called. Raises ManifestError for rows of one recording that are of
    other pieces of it.
    """
    first = _first_of_recording(rows)
    again = first != np.arange(len(rows))
    for name, values in _columns(rows, BOUNDS) if again.any() else ():
        if (other := np.flatnonzero(again & (values != values[first]) & ~np.isnan(values))).size:
            row, before = (rows.slice(at, 1).to_pylist()[0] for at in (other[0], first[other[0]]))
            raise ManifestError(
                f"{name_of(row['file'], row['member'])}: rows of one recording differ in column {name}: "
                f"{before[SPAN + name]} (sample {before['sample_id']}), {row[SPAN + name]} (sample "
                f"{row['sample_id']}); {_ADVICE}",
                code="FB131",
            )
    differs = pc.not_equal(rows["text"], rows["text"].take(pa.array(first))) if again.any() else None
    if differs is None or not pc.any(differs).as_py():
        return rows
    recordings = np.unique(first[np.asarray(pc.fill_null(differs, fill_value=False))])
    several = np.isin(first, recordings)
    logger.warning(
        "%d recordings have several rows with different texts, %d rows: each row is of its whole recording",
        *(len(recordings), int(several.sum())),
    )
    return rows.append_column(SEVERAL, pa.array(several))


def to_judge(rows: pa.Table) -> Array:
    """Returns bool [rows], whether the duration of a row's recording tells if the row is of a piece of it."""
    start, end, _ = _bounds(rows)
    return ~np.isnan(start) | ~np.isnan(end)


def refuse_uncovered(
    rows: pa.Table, seconds: Array, tolerance_s: float | None, name_of: Callable[[int, str], str]
) -> None:
    """Raises ManifestError for a row that does not cover its recording. seconds: of the recordings, NaN: not known."""
    start, end, is_cut = _bounds(rows)
    allowed = allowed_s(tolerance_s, seconds)
    begins = np.isnan(start) | (start <= np.where(np.isnan(seconds), _LEAST_S, allowed))
    ends = np.isnan(end) | np.isnan(seconds) | (np.abs(end - seconds) <= allowed)
    bad = np.flatnonzero(~(begins & ends) & ~(is_cut & (np.abs(end - start - seconds) <= allowed)))
    if not bad.size:
        return
    row, at = rows.slice(bad[0], 1).to_pylist()[0], bad[0]
    names = [name for name, values in _columns(rows, SPANS) if not np.isnan(values[at])] or ["duration"]
    said = (
        f"{name_of(row['file'], row['member'])}: sample {row['sample_id']} is from {np.nan_to_num(start[at]):.2f} s"
        f"{'' if np.isnan(end[at]) else f' to {end[at]:.2f} s'} by column {', '.join(names)}, and its recording has "
        f"{seconds[at]:.2f} s; {_ADVICE}"
    )
    if BOUNDS.intersection(names):
        raise ManifestError(said, code="FB131")
    raise ManifestError(said, code="FB132")


def _bounds(rows: pa.Table) -> tuple[Array, Array, Array]:
    """Returns start and end of rows, NaN where there is none, and bool [rows], whether columns have both of them.

    A start and an end as far apart as the recording is long are those of a piece that was cut out already.
    """
    start, end, length = (_first_of(rows, kind) for kind in (_STARTS, _ENDS, tuple(_LENGTHS)))
    stated = rows["stated_s"].to_numpy().astype(np.float64)
    length = np.where(np.isnan(length), stated, length)
    several = np.asarray(pc.fill_null(rows[SEVERAL], fill_value=False)) if SEVERAL in rows.column_names else False
    by_length = np.where(np.isnan(start) & several, length, start + length)
    return start, np.where(np.isnan(end), by_length, end), ~np.isnan(start) & ~np.isnan(end)


def _first_of(rows: pa.Table, names: tuple[str, ...]) -> Array:
    found = np.full(len(rows), np.nan)
    for _, values in _columns(rows, names):
        found = np.where(np.isnan(found), values, found)
    return found


def _columns(rows: pa.Table, among: Container[str]) -> Iterator[tuple[str, Array]]:
    for name in (each.removeprefix(SPAN) for each in rows.column_names if each.startswith(SPAN) and each != SEVERAL):
        if name.lower() in among:
            yield name, np.asarray(pc.fill_null(rows[SPAN + name], float("nan")).to_numpy())


def _first_of_recording(rows: pa.Table) -> Array:
    """Returns the position of the first row of the same recording, for every row."""
    file = rows["file"].to_numpy().astype(np.int64)
    own = np.arange(len(rows))
    if (np.diff(file) > 0).all():
        return own
    member = rows["member"].combine_chunks().dictionary_encode()
    key = file * (1 + len(member.dictionary)) + member.indices.to_numpy()
    # Sound in the row of a data file is of that row alone.
    inside = (file == rows["group"].to_numpy()) & (rows["size"].to_numpy() == WHOLE_FILE)
    _, first, inverse = np.unique(np.where(inside, -1 - own, key), return_index=True, return_inverse=True)
    return np.asarray(first[inverse])
