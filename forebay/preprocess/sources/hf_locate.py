"""Durations of `hf` rows whose columns give none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.preprocess.sources.headers import duration_of, unknown_duration
from forebay.preprocess.sources.hf_file import HfFile
from forebay.preprocess.sources.loose import locate_loose
from forebay.preprocess.sources.task import Failures, Located, LocateTask, located


def locate_hf(task: LocateTask) -> Located:
    """Returns the durations of a task's rows: from the header of the bytes in the row, or of the file that it names."""
    inside = pc.equal(task.rows["file"], task.group)
    rows = task.rows.filter(inside)
    durations = rows["duration_s"].to_numpy().copy()
    failures = Failures()
    unknown = np.flatnonzero(np.isnan(durations))
    file = HfFile(Path(task.paths[task.group])) if len(unknown) else None
    for position in unknown.tolist():
        assert file is not None
        data = file.audio(rows["offset"][position].as_py(), task.audio_column) or b""
        durations[position] = duration_of(_reader(data), len(data))
        if math.isnan(durations[position]):
            sample_id = rows["sample_id"][position].as_py()
            failures.add(
                rows["row"][position].as_py(), sample_id, *unknown_duration(task.name, sample_id, size=len(data))
            )
    own = located(task.with_rows(rows), {"duration_s": pa.array(durations)}, failures)
    if len(rows) == len(task.rows):
        return own
    named = locate_loose(task.with_rows(task.rows.filter(pc.invert(inside))))
    return Located(
        rows=pa.concat_tables([own.rows, named.rows]).sort_by("row"),
        failed=pa.concat_tables([own.failed, named.failed]),
        absent=named.absent,
    )


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, count: data[start : start + count]
