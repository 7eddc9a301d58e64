"""The second stage of a listing of recordings: how long they are, by their headers, and where in a tar they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.errors import DecodeError, SampleError
from forebay.rows.manifest import UNLOCATED, WHOLE_FILE, rejections
from forebay.rows.media_reader import is_gone, opened
from forebay.rows.reader import Failures, Located, LocateTask, UnreadableTar, missing_reason, tar_index
from forebay.store.layout import Array
from forebay.store.remote.raw.raw_sources import look_up, place_of, shown, source_stat
from forebay.store.sound_containers import MAX_WHOLE_BYTES, AudioInfo, header_info, one_stream, parsed_header, unread
from forebay.tar.header import TarIndex


def located(task: LocateTask, columns: dict[str, Any], failures: Failures, *, absent: Sequence[int] = ()) -> Located:
    """Returns the columns of a task's rows, without the rows that failed."""
    table = pa.table({"row": task.rows["row"], **columns})
    if failures.found:
        bad = np.isin(task.rows["row"].to_numpy(), [row for row, *_ in failures.found])
        table = table.filter(pa.array(~bad))
    return Located(rows=table, failed=failures.table(), absent=tuple(absent))


def as_listed(task: LocateTask) -> Located:
    """Returns the rows as they are: there is nothing to find."""
    return located(task, {}, Failures())


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
    return float(told_info(read, size).duration_s)


def told_info(read: Callable[[int, int], bytes], size: int) -> AudioInfo:
    """Returns what the header of an encoded clip says; see `duration_of`."""
    if not size:  # the reason that decoding gives where the manifest says a duration
        raise DecodeError("empty_file", "the file is empty (0 bytes); write or list it again")
    info = header_info(read, size)
    if info is not None and info.num_samples > 0 and info.sample_rate_hz > 0:
        return info
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

    Rows whose members of tars are not looked up yet have their places too. A file that cannot be read for a reason of
    the machine (EIO, ENOMEM, ...) raises OSError.
    """
    failures, tars = Failures(), NamedMembers(task.cache_root)
    durations, offsets, sizes = (task.rows[name].to_numpy().copy() for name in ("duration_s", "offset", "size"))
    absent: dict[int, str] = {}
    paths = task.paths
    look_up(paths.values())
    columns = [task.rows[name].to_pylist() for name in ("row", "sample_id", "file", "member")]
    for position, (row, sample_id, file, member) in enumerate(zip(*columns, strict=True)):
        path = paths[file]
        try:
            if sizes[position] == UNLOCATED:
                offsets[position], sizes[position] = tars.located(path, member, name=shown(path))
            place = int(offsets[position]), int(sizes[position])
            durations[position] = _looked_at(path, *place, known_s=durations[position])
        except OSError as err:
            if not is_gone(err):
                raise
            absent[file] = f"{shown(path)} cannot be opened: {err.strerror}; correct the manifest or add the file"
        except DecodeError as err:
            failures.add(row, sample_id, *no_duration(shown(path), sample_id, err))
        except SampleError as err:
            failures.add(row, sample_id, err.reason, str(err))
        if file in absent:
            failures.add(row, sample_id, "missing_file", absent[file])
    found = {"duration_s": durations}
    if (task.rows["size"].to_numpy() == UNLOCATED).any():
        found |= {"offset": offsets, "size": sizes}
    return located(task, {name: pa.array(values) for name, values in found.items()}, failures, absent=sorted(absent))


def _looked_at(path: str, offset: int, size: int, *, known_s: float) -> float:
    """Returns the duration of a clip; one that is known costs a look whether the file can be opened.

    Whether an object of a store is there is known without opening it.
    """
    if place_of(path) is not None and not np.isnan(known_s):
        source_stat(path)
        return float(known_s)
    with opened(path) as descriptor:
        if not np.isnan(known_s):
            return float(known_s)
        size = os.fstat(descriptor).st_size if size == WHOLE_FILE else size
        return header_duration_s(descriptor, offset=offset, size=size)


@dataclass(frozen=True, slots=True)
class NamedMembers:
    """Members of tars that are only known by name. The index of each tar is loaded once."""

    cache_root: str
    _indexes: dict[str, TarIndex | UnreadableTar] = field(default_factory=dict)

    def located(self, path: str, member: str, *, name: str) -> tuple[int, int]:
        """Returns offset and size of a member. name: of the tar. Raises SampleError where none can be read."""
        if (index := self._indexes.get(path)) is None:
            index = self._indexes[path] = tar_index(path, cache_root=self.cache_root)
        if isinstance(index, UnreadableTar):
            raise SampleError("missing_file" if index.absent else index.reason, index.message)
        if (row := index.find(member)) is None:
            raise SampleError(*missing_reason(index, member, name))
        return int(index.offsets[row]), int(index.sizes[row])
