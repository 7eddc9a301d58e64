"""The interface of every format in a benchmark: write these samples below a folder, and read them back by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Sample = Mapping[str, Array]
"""`values` [n, width] and `ids` int32 [m]."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Samples that every format keeps.

    values: [total, width], those of all samples end to end. offsets: int64 [num_samples + 1], where each sample begins.
    ids, id_offsets: the same for token ids, int32 [total_ids]. rows_per_shard: for formats that take a number.
    """

    name: str
    values: Array
    offsets: Array
    ids: Array
    id_offsets: Array
    rows_per_shard: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        return {
            "values": self.values[self.offsets[index] : self.offsets[index + 1]],
            "ids": self.ids[self.id_offsets[index] : self.id_offsets[index + 1]],
        }

    @property
    def width(self) -> int:
        """Columns of `values`."""
        return int(self.values.shape[1])

    @property
    def payload_bytes(self) -> int:
        """Bytes of all values and ids."""
        return self.values.nbytes + self.ids.nbytes


class Reader(Protocol):
    """A written workload, opened; picklable or usable after a fork, as a DataLoader's workers need it."""

    def read(self, index: int) -> Sample:
        """Returns one sample; views of a mapping where the format can give them."""
        ...


class Peer(Protocol):
    """A module of this package."""

    NAME: str
    REQUIRES: Sequence[str]
    """Packages (import names) without which it is named as not installed."""

    def write(self, folder: Path, workload: Workload) -> None:
        """Writes all samples below an empty folder; the benchmark fsyncs what is there when it returns."""
        ...

    def open_reader(self, folder: Path, workload: Workload) -> Reader:
        """Opens what `write` wrote. workload: for its shape only."""
        ...
