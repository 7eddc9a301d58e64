"""One memory-mapped TensorDict folder a sample, stacked lazily: what `TensorDict.save` of a ragged list makes.

The stack holds two mappings a sample open. From some 16,000 samples on that is more than a process may have
(`vm.max_map_count`). In the second row a sample's folder is therefore opened when it is read.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.interface import Sample, Workload

NAME = "TensorDict folder per sample"
REQUIRES = ("tensordict",)


def write(folder: Path, workload: Workload) -> None:
    tensordict: Any = importlib.import_module("tensordict")
    samples = [
        tensordict.TensorDict({name: torch.from_numpy(array.copy()) for name, array in workload[index].items()})
        for index in range(len(workload))
    ]
    tensordict.LazyStackedTensorDict(*samples, stack_dim=0).memmap(folder / "samples")


class _Reader:
    def __init__(self, folder: Path) -> None:
        tensordict: Any = importlib.import_module("tensordict")
        self._samples = tensordict.LazyStackedTensorDict.load_memmap(folder / "samples")

    def read(self, index: int) -> Sample:
        sample = self._samples[index]
        return {"values": sample["values"].numpy(), "ids": sample["ids"].numpy()}


class _OpenedEachTime:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "samples"

    def read(self, index: int) -> Sample:
        tensordict: Any = importlib.import_module("tensordict")
        sample = tensordict.TensorDict.load_memmap(self._folder / str(index))
        return {"values": sample["values"].numpy(), "ids": sample["ids"].numpy()}


def open_each_time(folder: Path, workload: Workload) -> _OpenedEachTime:  # noqa: ARG001
    return _OpenedEachTime(folder)


OTHER_READERS = {"TensorDict folder per sample, opened at each read": open_each_time}


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(folder)
