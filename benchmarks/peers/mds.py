"""MosaicML Streaming: MDS shards read from a local folder.

`import streaming` imports torchvision and every cloud's client for classes that are not used here. torchvision does not
load beside a CPU build of torch. If it is absent, an empty module takes its place.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from benchmarks.peers.interface import Sample, Workload

NAME = "MosaicML Streaming (MDS)"
REQUIRES = ("streaming",)
_STAND_INS = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")


def _streaming() -> Any:
    if "streaming" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("streaming")
    for name in _STAND_INS:
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.VisionDataset = module.to_tensor = object
        sys.modules[name] = module
    try:
        return importlib.import_module("streaming")
    finally:
        for name in _STAND_INS:  # others ask whether it is installed
            del sys.modules[name]


def write(folder: Path, workload: Workload) -> None:
    streaming = _streaming()
    columns = {"values": f"ndarray:{workload.values.dtype.name}", "ids": "ndarray:int32"}
    with streaming.MDSWriter(out=str(folder), columns=columns) as writer:
        for index in range(len(workload)):
            writer.write(dict(workload[index]))


class _Reader:
    def __init__(self, folder: Path) -> None:
        streaming = _streaming()
        self._dataset = streaming.LocalDataset(local=str(folder))

    def read(self, index: int) -> Sample:
        sample: Sample = self._dataset[index]
        return sample


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(folder)
