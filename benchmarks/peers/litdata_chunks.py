"""LitData: binary chunks, read by index from a local folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.peers.interface import Sample, Workload

NAME = "LitData"
REQUIRES = ("litdata",)


def write(folder: Path, workload: Workload) -> None:
    writer_module: Any = importlib.import_module("litdata.streaming.writer")
    # The writer that `litdata.optimize` runs in its workers, without the workers.
    writer = writer_module.BinaryWriter(cache_dir=str(folder), chunk_bytes="64MB")
    for index in range(len(workload)):
        writer[index] = {name: array.copy() for name, array in workload[index].items()}
    writer.done()
    writer.merge()


class _Reader:
    def __init__(self, folder: Path) -> None:
        litdata: Any = importlib.import_module("litdata")
        self._dataset = litdata.StreamingDataset(str(folder))

    def read(self, index: int) -> Sample:
        sample: Sample = self._dataset[index]
        return sample


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(folder)
