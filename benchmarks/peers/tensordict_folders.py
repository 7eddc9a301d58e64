"""One memory-mapped TensorDict folder a sample, stacked lazily: what `TensorDict.save` of a ragged list makes."""

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


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(folder)
