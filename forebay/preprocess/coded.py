"""Columns of few different strings, a number a row: of millions of rows they are no Python objects."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from forebay.store.layout import Array
from forebay.store.shard import Shard


@dataclass(frozen=True, slots=True)
class Coded:
    """A column of strings: `names[codes[i]]` is that of row i, `names[0]` is empty. codes: int32 [rows]."""

    names: tuple[str, ...]
    codes: Array

    def counts(self, chosen: Array | None = None, weights: Array | None = None) -> Array:
        """Returns how many rows have each name, or the sum of their weights. chosen: bool [rows], those that count."""
        rows = slice(None) if chosen is None else chosen
        return np.bincount(self.codes[rows], None if weights is None else weights[rows], len(self.names))


@dataclass(slots=True)
class Coder:
    """Numbers for strings, in order of first appearance in all shards that it is asked about; 0 is the empty string."""

    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    def number(self, name: str) -> int:
        """Returns the number of a string."""
        return self._numbers.setdefault(name, len(self._numbers))

    def column(self, shard: Shard, name: str) -> Array:
        """Returns the numbers of a shard's string field, int32 [rows], after checking its CRC-32."""
        values, offsets = shard.column(name)
        rows = len(offsets) - 1
        if not len(values):
            return np.zeros(rows, np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        encoded = pa.Array.from_buffers(pa.large_binary(), rows, buffers).dictionary_encode()
        texts = (data.decode("utf-8", "surrogateescape") for data in encoded.dictionary.to_pylist())
        numbers: Array = np.array([self.number(text) for text in texts], np.int32)
        return np.asarray(numbers[encoded.indices.to_numpy()])

    def coded(self, codes: Array) -> Coded:
        """Returns a column of numbers that were given here."""
        return Coded(tuple(self._numbers), codes)
