"""Audio files of their own (`jsonl`, `ljspeech`): whether they are there, and how long they are."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

from forebay.errors import DecodeError
from forebay.preprocess.sources.headers import header_duration_s, is_gone, no_duration, opened
from forebay.preprocess.sources.task import Failures, Located, LocateTask, located


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
