"""ArrayRecord, which grain reads: one uncompressed record a sample, with the number of ids, the ids and the values."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.interface import Sample, Workload

NAME = "ArrayRecord (grain)"
REQUIRES = ("array_record",)
_FILE = "samples.array_record"


def write(folder: Path, workload: Workload) -> None:
    module: Any = importlib.import_module("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(folder / _FILE), "group_size:1,uncompressed")
    for index in range(len(workload)):
        sample = workload[index]
        writer.write(np.int32(len(sample["ids"])).tobytes() + sample["ids"].tobytes() + sample["values"].tobytes())
    writer.close()


class _Reader:
    def __init__(self, folder: Path, workload: Workload) -> None:
        source: Any = importlib.import_module("array_record.python.array_record_data_source")
        self._records = source.ArrayRecordDataSource([str(folder / _FILE)])
        self._dtype, self._width = workload.values.dtype, workload.width

    def read(self, index: int) -> Sample:
        record = self._records[index]
        count = int(np.frombuffer(record, np.int32, 1)[0])
        values = np.frombuffer(record, self._dtype, offset=4 + 4 * count)
        return {"values": values.reshape(-1, self._width), "ids": np.frombuffer(record, np.int32, count, 4)}


def open_reader(folder: Path, workload: Workload) -> _Reader:
    return _Reader(folder, workload)
