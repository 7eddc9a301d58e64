"""WebDataset tars, written by its TarWriter and read by index with wids."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.interface import Sample, Workload

NAME = "WebDataset + wids"
REQUIRES = ("webdataset", "wids")


def write(folder: Path, workload: Workload) -> None:
    webdataset: Any = importlib.import_module("webdataset")
    shards = []
    for number, start in enumerate(range(0, len(workload), workload.rows_per_shard)):
        stop = min(start + workload.rows_per_shard, len(workload))
        name = f"{number:05d}.tar"
        with webdataset.TarWriter(str(folder / name)) as writer:
            for index in range(start, stop):
                sample = workload[index]
                writer.write({"__key__": f"{index:06d}", "values.npy": sample["values"], "ids.npy": sample["ids"]})
        shards.append({"url": str(folder / name), "nsamples": stop - start})
    (folder / "index.json").write_text(
        json.dumps({"wids_version": 1, "name": workload.name, "shardlist": shards}), encoding="utf-8"
    )


class _Reader:
    def __init__(self, folder: Path) -> None:
        wids: Any = importlib.import_module("wids")
        self._dataset = wids.ShardListDataset(
            str(folder / "index.json"), transformations=[], lru_size=64, keep=True, cache_dir=str(folder)
        )

    def read(self, index: int) -> Sample:
        sample = self._dataset[index]
        return {name: _array(sample[f".{name}.npy"]) for name in ("values", "ids")}


def _array(file: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.load(io.BytesIO(file.read()), allow_pickle=False)
    return found


def open_reader(folder: Path, workload: Workload) -> _Reader:  # noqa: ARG001
    return _Reader(folder)
