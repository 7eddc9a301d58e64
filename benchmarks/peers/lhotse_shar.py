"""lhotse Shar's array tars. Shar streams and cannot read by index, so its rows come in the order of writing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.interface import Sample, Workload

NAME = "lhotse Shar"
REQUIRES = ("lhotse",)
SEQUENTIAL = True
_FIELDS = ("values", "ids")


def write(folder: Path, workload: Workload) -> None:
    shar: Any = importlib.import_module("lhotse.shar.writers.array")
    array: Any = importlib.import_module("lhotse.array")
    for name in _FIELDS:
        with shar.ArrayTarWriter(str(folder / f"{name}.%06d.tar"), shard_size=workload.rows_per_shard) as writer:
            for index in range(len(workload)):
                value = workload[index][name]
                manifest = array.Array("memory_npy", "", "", list(value.shape))
                writer.write(f"{index:06d}", value, manifest)


class _Reader:
    """Reads forward from sample 0, and again from there whenever sample 0 is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._streams: list[Iterator[Any]] = []
        self._next = 0

    def read(self, index: int) -> Sample:
        if index == 0:
            self._streams, self._next = [self._stream(name) for name in _FIELDS], 0
        if index != self._next:
            raise ValueError(f"Shar streams: sample {self._next} is next, {index} was asked for")
        self._next += 1
        return {name: next(stream).load() for name, stream in zip(_FIELDS, self._streams, strict=True)}

    def _stream(self, name: str) -> Iterator[Any]:
        tar: Any = importlib.import_module("lhotse.shar.readers.tar")
        for path in sorted(self._folder.glob(f"{name}.*.tar")):
            for manifest, _ in tar.TarIterator(str(path)):
                yield manifest


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(folder)
