"""What a kind of recordings is: it lists rows, and finds the media and durations of one source file a task."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig
from forebay.errors import DecodeError
from forebay.rows.manifest import REJECTED_SCHEMA, Manifest, reduced, rejections, storable, table_of
from forebay.rows.media_reader import is_gone, opened
from forebay.rows.readers.tar_members import UnreadableTar, tar_index
from forebay.store.remote.raw.sources import is_hash_known, look_up, place_of, shown, source_stat
from forebay.store.sound_containers import one_stream, unread
from forebay.store.sound_headers import MAX_WHOLE_BYTES, header_info, parsed_header
from forebay.tar.index import has_index
from forebay.tar.members import TarIndex

IDS, DURATIONS = ("sample_id", "id"), ("duration_s", "duration")
"""Fields and columns that hold ids and durations, the first of them that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechKind:
    """How sources of one kind are read.

    list: the rows that the manifests name. locate: what the files of a task tell of its rows. has_index: `list` takes
    the cache root too, under which it keeps an index. in_tars: clips are members of tars. lists_tars: the manifests
    name tars alone, and only `locate` knows their rows.
    """

    list: Callable[..., Manifest]
    locate: Callable[[LocateTask], Located]
    has_index: bool = False
    in_tars: bool = False
    lists_tars: bool = False

    def listed(self, source: SourceConfig, *, cache_root: Path | None) -> Manifest:
        """Returns the rows that the manifests name. cache_root: None where no index may be kept."""
        return self.list(source, cache_root) if self.has_index else self.list(source)

    def reads(self, task: LocateTask, *, is_hashed: bool) -> Sequence[str]:
        """Returns the files that a task opens: a tar unless its index alone will do, clips of unknown duration.

        is_hashed: and a tar whose hash the node does not know: it is needed soon.
        """
        unknown = task.rows.filter(pc.is_nan(task.rows["duration_s"]))
        if self.in_tars:
            path = task.paths[task.group]
            is_enough = not self.lists_tars and not len(unknown) and has_index(path, cache_root=task.cache_root)
            return [path] if not is_enough or (is_hashed and not is_hash_known(path)) else []
        return [task.paths[number] for number in pc.unique(unknown["file"]).to_pylist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateTask:
    """The rows of one source file, or a run of rows whose media are files of their own.

    group: its number. name: of the source file. paths: by `file` number, the files to open. rows: columns of ROW_SCHEMA
    that a kind asks for; empty where only the tar tells the rows. column: that holds the audio of an `hf` source. keep:
    the fields of `source.keep_columns`, sorted.
    """

    group: int
    name: str
    paths: dict[int, str]
    rows: pa.Table
    cache_root: str
    column: str = ""
    keep: tuple[str, ...] = ()

    def with_rows(self, rows: pa.Table) -> LocateTask:
        """Returns the task for other rows."""
        return replace(self, rows=rows)

    def tar_index(self) -> TarIndex | UnreadableTar:
        """Returns the index of the task's tar, or why there is none."""
        return tar_index(self.paths[self.group], cache_root=self.cache_root)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What a task found. rows: `row` and the columns that are known now, of the rows that are left. failed: the others.

    absent: numbers of files that cannot be opened. unused: rows by field of their JSON that nothing takes.
    """

    rows: pa.Table
    failed: pa.Table
    absent: tuple[int, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Failures:
    """The rows of a task that cannot be used, gathered one by one: values of REJECTED_SCHEMA."""

    found: list[tuple[int, str, str, str, str]] = field(default_factory=list)

    def add(self, row: int, sample_id: str, reason: str, message: str, *, kind: str = "failed") -> None:
        """Notes one row."""
        self.found.append((row, storable(sample_id), kind, reason, storable(message)))

    def table(self) -> pa.Table:
        """Returns them as a table of REJECTED_SCHEMA."""
        return table_of(self.found, REJECTED_SCHEMA)


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


def locate_loose(task: LocateTask) -> Located:
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
