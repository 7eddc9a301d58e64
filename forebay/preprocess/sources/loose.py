"""Audio files of their own (`jsonl`, `ljspeech`): whether they are there, and how long they are."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

from forebay.preprocess.sources.headers import header_duration_s, is_gone, opened, unknown_duration
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
        size = -1
        try:
            durations[position], size = _looked_at(path, durations[position])
        except OSError as err:
            if not is_gone(err):
                raise
            absent[file] = f"{path} cannot be opened: {err.strerror}; correct the manifest or add the file"
        if file in absent:
            failures.add(row, sample_id, "missing_file", absent[file])
        elif np.isnan(durations[position]):
            failures.add(row, sample_id, *unknown_duration(path, sample_id, size=size))
    return located(task, {"duration_s": pa.array(durations)}, failures, absent=sorted(absent))


def _looked_at(path: str, known_s: float) -> tuple[float, int]:
    """Duration and bytes of a whole file; a duration that is known costs a look whether the file can be opened."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        return (float(known_s) if not np.isnan(known_s) else header_duration_s(descriptor, offset=0, size=size)), size
