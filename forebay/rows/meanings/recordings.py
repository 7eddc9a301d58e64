"""Rows of recordings: what a record says of one, and its duration by its header."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import Reads, SourceConfig
from forebay.errors import DecodeError, ManifestError, SampleError
from forebay.rows.kept_columns import parts_of_rows, require_values, values_in
from forebay.rows.manifest import (
    SPAN,
    Kind,
    Manifest,
    Unused,
    columns_of,
    rejections,
    require_rows,
    row_table,
    storable,
)
from forebay.rows.meanings.recording_pieces import BOUNDS, span_columns
from forebay.rows.media_reader import is_gone, opened
from forebay.rows.named_files import NamedFiles, manifest_files, path_stem
from forebay.rows.reader import DURATIONS, IDS, Failures, FilePiece, Located, LocateTask, MediaPlace, Record, Sink
from forebay.rows.readers.json_lines import JsonError, seconds_of, string_of
from forebay.rows.readers.tar_members import UnreadableTar
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import look_up, place_of, shown, source_stat
from forebay.store.sound_containers import one_stream, unread
from forebay.store.sound_headers import MAX_WHOLE_BYTES, header_info, parsed_header
from forebay.store.source_files import SourceFile

_TYPES = {
    "row": pa.int64(),
    "group": pa.int32(),
    "sample_id": pa.large_string(),
    "explicit_id": pa.bool_(),
    "file": pa.int32(),
    **dict.fromkeys(("offset", "size"), pa.int64()),
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

    def read(self, read: Callable[[FilePiece, Sink], None]) -> Manifest:
        """Returns the recordings of all files. Raises ManifestError for a record that is none."""
        for group, file in enumerate(self.manifests):
            self._group, path = group, str(file.path)
            read(FilePiece(source=self.source, reads=self.reads, group=group, name=path, path=path), self)
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
            self.count += 1
        except (SampleError, JsonError) as err:
            name = storable(path_stem(self.manifests[self._group].name))
            self.refuse(err, where, stem or f"{name}/{number}")

    def refuse(self, err: SampleError | JsonError, where: str, sample_id: str) -> None:
        """Rejects a row for a reason of its own. Raises ManifestError for what has none."""
        message = f"{where}: {err}; correct the manifest"
        if err.reason is None:
            raise ManifestError(message, code="FB203") from err
        self.reject(sample_id, err.reason, message)

    def reject(self, sample_id: str | None, reason: str, message: str, *, kind: Kind = "failed") -> None:
        """Takes a row that cannot be used."""
        self.failures.add(self.count, sample_id or str(self.count), reason, message, kind=kind)
        self.count += 1

    def _add(self, record: Record, stem: str | None) -> None:
        fields, group = record.fields, self._group
        self.unused.add_of(fields, self._taken)
        place = self._place_of(record)
        given, *texts = _texts_of(fields)
        seconds = seconds_of(fields, DURATIONS)
        to_keep = values_in(fields if record.kept is None else record.kept, self.source.keep_columns)
        file = self._files.number(place.path or "", manifest=self.manifests[group])
        self._kept.append(to_keep)
        self._spans.append({name: fields[name] for name in fields.keys() & BOUNDS})
        sample_id = given or stem or path_stem(place.path or "")
        numbers = (file, place.offset, place.size)
        self._rows.append((self.count, group, sample_id, given is not None, *numbers, seconds, *texts))

    def _place_of(self, record: Record) -> MediaPlace:
        """Returns the place of a recording. Raises JsonError where its record names none."""
        for place in record.media or ():
            if isinstance(place, MediaPlace):
                return place
        audio = string_of(record.fields, ("audio",), required=True) or ""
        if problem := self._files.problem(audio, manifest=self.manifests[self._group]):
            raise JsonError(f"field audio {problem}", reason="missing_file")
        return MediaPlace(audio)


def _texts_of(fields: dict[str, Any]) -> tuple[str | None, ...]:
    """Returns id, language, prompt and text of a record. Raises JsonError for one without the field `text`."""
    if "text" not in fields:
        raise JsonError("has no field text, wanted a string or null")
    given = string_of(fields, IDS)
    if given == "":
        raise JsonError(f"field {IDS[0]} is empty, wanted an id")
    return given, *(string_of(fields, (name,)) for name in ("language", "prompt", "text"))


def list_records(source: SourceConfig, read: Callable[[FilePiece, Sink], None]) -> Manifest:
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
