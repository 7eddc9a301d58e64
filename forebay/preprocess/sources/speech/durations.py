"""Durations from headers, for the rows whose manifest gives none; files of their own are looked for as well."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from forebay.errors import DecodeError
from forebay.preprocess.sources.media import is_gone, opened
from forebay.preprocess.sources.speech.task import Failures, Located, LocateTask, located
from forebay.preprocess.speech.containers import one_stream
from forebay.preprocess.speech.headers import MAX_WHOLE_BYTES, header_info


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
    Raises DecodeError where it gives none: `empty_file`, `truncated_audio` or `chained_audio` where that is why, else
    `unknown_duration`.
    """
    if not size:  # the reason that decoding gives where the manifest says a duration
        raise DecodeError("empty_file", "the file is empty (0 bytes); write or list it again")
    info = header_info(read, size)
    if info is not None and info.num_samples > 0 and info.sample_rate_hz > 0:
        return float(info.duration_s)
    _, problem = one_stream(read(0, size)) if size <= MAX_WHOLE_BYTES else (b"", None)
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
    columns = [task.rows[name].to_pylist() for name in ("row", "sample_id", "file")]
    for position, (row, sample_id, file) in enumerate(zip(*columns, strict=True)):
        path = task.paths[file]
        try:
            durations[position] = _looked_at(path, durations[position])
        except OSError as err:
            if not is_gone(err):
                raise
            absent[file] = f"{path} cannot be opened: {err.strerror}; correct the manifest or add the file"
        except DecodeError as err:
            failures.add(row, sample_id, *no_duration(path, sample_id, err))
        if file in absent:
            failures.add(row, sample_id, "missing_file", absent[file])
    return located(task, {"duration_s": pa.array(durations)}, failures, absent=sorted(absent))


def _looked_at(path: str, known_s: float) -> float:
    """Returns the duration of a whole file; one that is known costs a look whether the file can be opened."""
    with opened(path) as descriptor:
        if not np.isnan(known_s):
            return float(known_s)
        return header_duration_s(descriptor, offset=0, size=os.fstat(descriptor).st_size)
