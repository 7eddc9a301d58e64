"""Columns of the row table beside a batch, which no model would take among its fields."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.errors import ConfigError
from forebay.store.layout import Array
from forebay.store.source import SampleSource, parts_of

_ID = "sample_id"
"""Asked for by sample: of all samples the ids would be most of a row table."""


class BatchColumns:
    """Values of some columns by sample. A column is read once, as a whole; threads share it."""

    def __init__(self, source: SampleSource, names: Sequence[str]) -> None:
        """Reads the columns. Raises ConfigError, with the nearest name and all of them, for one that no source has.

        Where only some of several sources have a column, it is None for the samples of the others.
        """
        self._source, self._names = source, tuple(names)
        self._parts = parts_of(source)
        _require_names(names, [name for part in self._parts for name in part.column_names])
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._columns = {name: [_read(part, name) for part in self._parts] for name in names if name != _ID}

    def of(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Returns the columns of some samples, by name, in their order."""
        wanted = np.asarray(indices, np.int64)
        return {name: self._values(name, wanted) for name in self._names}

    def _values(self, name: str, indices: Array) -> list[Any]:
        if name == _ID:
            return [self._source.sample_id(index) for index in indices.tolist()]
        columns = self._columns[name]
        if len(columns) == 1:
            return _taken(columns[0], indices)
        found: list[Any] = [None] * len(indices)
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            inside = indices[places] - (self._ends[number] - len(self._parts[number]))
            for place, value in zip(places.tolist(), _taken(columns[number], inside), strict=True):
                found[place] = value
        return found


def _read(part: SampleSource, name: str) -> Any:
    return part.table([name])[name].combine_chunks() if name in part.column_names else None


def _taken(column: Any, indices: Array) -> list[Any]:
    if column is None:
        return [None] * len(indices)
    values: list[Any] = column.take(pa.array(indices)).to_pylist()
    return values


def _require_names(names: Sequence[str], known: Sequence[str]) -> None:
    if isinstance(names, str):
        raise ConfigError(f'with_columns is the text {names!r}, wanted names: with_columns=("{names}",)')
    there = list(dict.fromkeys(known))
    for name in names:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"with_columns: no column {name!r}{hint}; there are {', '.join(there)}; to have more, set "
                "source.keep_columns and run: forebay preprocess CONFIG",
                code="FB202",
            )
