"""An Arrow IPC file of list columns, mapped and read without a copy: what a careful user writes in an afternoon."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.peers.interface import Sample, Workload

NAME = "Arrow, zero-copy by hand"
REQUIRES = ("pyarrow",)
_FILE = "samples.arrow"


def write(folder: Path, workload: Workload) -> None:
    rows, count = workload.rows_per_shard, len(workload)
    schema = pa.schema(
        [("values", pa.large_list(pa.from_numpy_dtype(workload.values.dtype))), ("ids", pa.large_list(pa.int32()))]
    )
    with pa.OSFile(str(folder / _FILE), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            writer.write_batch(pa.record_batch(_columns(workload, start, stop), schema=schema))


def _columns(workload: Workload, start: int, stop: int) -> list[pa.Array]:
    columns = []
    for flat, offsets, width in (
        (workload.values, workload.offsets, workload.width),
        (workload.ids, workload.id_offsets, 1),
    ):
        part = offsets[start : stop + 1]
        values = pa.array(flat[part[0] : part[-1]].reshape(-1))
        columns.append(pa.LargeListArray.from_arrays(pa.array((part - part[0]) * width), values))
    return columns


class _Reader:
    def __init__(self, folder: Path, workload: Workload) -> None:
        self._path, self._width, self._rows = folder / _FILE, workload.width, workload.rows_per_shard
        with pa.memory_map(str(self._path)) as source:
            reader = pa.ipc.open_file(source)
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]

    def read(self, index: int) -> Sample:
        batch = self._batches[index // self._rows]
        row = index % self._rows
        values = batch.column(0)[row].values.to_numpy(zero_copy_only=True)
        ids = batch.column(1)[row].values.to_numpy(zero_copy_only=True)
        return {"values": values.reshape(-1, self._width), "ids": np.asarray(ids)}


def open_reader(folder: Path, workload: Workload) -> _Reader:
    return _Reader(folder, workload)
