"""zarr v3: flat sharded arrays, uncompressed, with the offsets beside them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.interface import Array, Sample, Workload

NAME = "zarr v3 sharded"
REQUIRES = ("zarr",)
_CHUNK_BYTES = 128 * 1024
_CHUNKS_PER_SHARD = 512


def write(folder: Path, workload: Workload) -> None:
    zarr: Any = importlib.import_module("zarr")
    root = zarr.open_group(str(folder / "samples.zarr"), mode="w", zarr_format=3)
    for name, flat in (("values", workload.values), ("ids", workload.ids)):
        rows = max(1, _CHUNK_BYTES // (flat.itemsize * int(np.prod(flat.shape[1:]))))
        array = root.create_array(
            name,
            shape=flat.shape,
            dtype=flat.dtype,
            chunks=(rows, *flat.shape[1:]),
            shards=(rows * _CHUNKS_PER_SHARD, *flat.shape[1:]),
            compressors=None,
        )
        array[:] = flat
    for name, offsets in (("offsets", workload.offsets), ("id_offsets", workload.id_offsets)):
        root.create_array(name, data=offsets)


class _Reader:
    def __init__(self, folder: Path) -> None:
        zarr: Any = importlib.import_module("zarr")
        root = zarr.open_group(str(folder / "samples.zarr"), mode="r")
        self._values, self._ids = root["values"], root["ids"]
        self._offsets: Array = root["offsets"][:]
        self._id_offsets: Array = root["id_offsets"][:]

    def read(self, index: int) -> Sample:
        return {
            "values": self._values[int(self._offsets[index]) : int(self._offsets[index + 1])],
            "ids": self._ids[int(self._id_offsets[index]) : int(self._id_offsets[index + 1])],
        }


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(folder)
