"""Hugging Face datasets: its Arrow file, memory-mapped, rows in the arrow format."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.interface import Sample, Workload

NAME = "HF datasets (Arrow)"
REQUIRES = ("datasets",)


def write(folder: Path, workload: Workload) -> None:
    datasets: Any = importlib.import_module("datasets")
    value_type = datasets.Value(workload.values.dtype.name)
    features = datasets.Features({"values": datasets.List(value_type), "ids": datasets.List(datasets.Value("int32"))})
    writer_module: Any = importlib.import_module("datasets.arrow_writer")
    path = folder / "samples.arrow"
    with writer_module.ArrowWriter(path=str(path), features=features, writer_batch_size=64) as writer:
        for sample in _rows(workload):
            writer.write(sample)
        writer.finalize()


def _rows(workload: Workload) -> Iterator[dict[str, Any]]:
    for index in range(len(workload)):
        sample = workload[index]
        yield {"values": sample["values"].reshape(-1), "ids": sample["ids"]}


class _Reader:
    def __init__(self, folder: Path, workload: Workload) -> None:
        datasets: Any = importlib.import_module("datasets")
        # The numpy format would make float32 of float16 and int64 of int32.
        self._dataset = datasets.Dataset.from_file(str(folder / "samples.arrow")).with_format("arrow")
        self._width = workload.width

    def read(self, index: int) -> Sample:
        row = self._dataset[index]
        values, ids = (row.column(name).chunk(0).flatten().to_numpy() for name in ("values", "ids"))
        return {"values": values.reshape(-1, self._width), "ids": ids}


def open_reader(folder: Path, workload: Workload) -> _Reader:
    return _Reader(folder, workload)
