"""The cost of a batch from a cache, beside calling the extractor or the image processor for it."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import soundfile as sf
import soxr
import torch
from PIL import Image

from benchmarks.report import ratio, timed
from forebay.steps.batch import collate
from forebay.steps.form import BatchForm
from forebay.store.layout import Array, FieldSpec
from forebay.store.shard import Shard, shard_fields, write_shard

ROOT = Path(__file__).parents[2]
_NUM = 2
"""Clips and images that are timed."""

_RATE_HZ = 16_000
"""Of the demo's recordings."""


def recordings(rate_hz: int) -> list[Array]:
    """Returns the first clips of the demo as float32 at this rate."""
    manifest = ROOT / "demo" / "speech" / "train.parquet"
    found = []
    for row in pq.read_table(manifest).to_pylist()[:_NUM]:
        with tarfile.open(manifest.parent / row["tar_path"]) as tar:
            member = tar.extractfile(row["tar_member_name"])
            assert member is not None
            samples, found_hz = sf.read(io.BytesIO(member.read()), dtype="float32")
        assert found_hz == _RATE_HZ
        found.append(soxr.resample(samples, _RATE_HZ, rate_hz).astype(np.float32))
    return found


def pictures() -> list[Image.Image]:
    """Returns the first photos of the demo, decoded."""
    return [Image.open(path).convert("RGB") for path in sorted((ROOT / "demo" / "vision" / "photos").iterdir())[:_NUM]]


def cpu_times(form: BatchForm, units: Sequence[Mapping[str, Array]], call: Callable[[], Any], *, rounds: int) -> float:
    """Returns how many times the CPU of our batch the class's own call takes: the median of the rounds' ratios.

    Our side reads each sample of a shard file, checks its checksum, and makes one batch, in memory that is used again
    as a loader's ring does. Arrays that stand in no batch together are batches of one. units: of each clip or image its
    arrays. call: makes the class's own values.
    """
    with tempfile.TemporaryDirectory() as place:
        shard = _written(form, units, Path(place) / "shard")
        allocate, together = Reused(), _stand_together(form, units)

        def read() -> None:
            found = []
            for index in range(len(units)):
                row = shard.row(index)
                shard.check_row(index, [*row.values()])
                found.append({name: (array,) for name, array in form.arrays(row).items()})
            if together:
                collate(form, found, dtype=torch.float32, allocate=allocate)
            else:
                for sample in found:
                    collate(form, [sample], dtype=torch.float32, allocate=allocate)

        read()
        return ratio(*zip(*((timed(call).cpu_s, timed(read).cpu_s) for _ in range(rounds)), strict=True))


def _stand_together(form: BatchForm, units: Sequence[Mapping[str, Array]]) -> bool:
    pads = all(field.pad is not None for field in form.stored)
    return pads or all(len({unit[field.name].shape for unit in units}) == 1 for field in form.stored)


def _written(form: BatchForm, units: Sequence[Mapping[str, Array]], path: Path) -> Shard:
    specs = shard_fields((*form.specs(), FieldSpec(name="sample_id", dtype="str", role="table")), "")
    rows = [
        {
            "sample_id": str(index),
            **{name: part for field in form.stored for name, part in field.stored(unit[field.name]).items()},
        }
        for index, unit in enumerate(units)
    ]
    return Shard(path, write_shard(path, specs, rows, key="models"), specs)


class Reused:
    """Tensors by name and shape, made once: what a loader's ring does for batches of one form."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor of this name, shape and dtype."""
        key = (name, shape, dtype)
        if key not in self._kept:
            self._kept[key] = torch.empty(shape, dtype=dtype)
        return self._kept[key]
