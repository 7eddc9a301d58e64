"""The rows of a listing of texts, gathered as columns from lines and from tables; and which of them are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceConfig, row_slice
from forebay.preprocess.sources.kept import concatenated, parts_of_rows, require_values
from forebay.preprocess.sources.rows import Unused, row_table
from forebay.preprocess.sources.speech.locate import Failures
from forebay.store.layout import Array

BAD_TEXT, TOO_LARGE = "bad_text", "too_large"
"""Reasons of texts that cannot be used."""
NO_NUL = "holds a NUL character, wanted text"

_BLOCK_ROWS = 1 << 15
"""Rows that are Python objects at once; the others are columns, which hold little more than the texts."""

_TYPES = {
    "row": pa.int64(),
    "group": pa.int32(),
    "file": pa.int32(),
    "sample_id": pa.large_string(),
    "explicit_id": pa.bool_(),
    "duration_s": pa.float64(),
    **dict.fromkeys(("language", "prompt", "text"), pa.large_string()),
}


class Line(NamedTuple):
    """What a line says. kept: the values of `source.keep_columns`."""

    sample_id: str | None
    language: str | None
    prompt: str | None
    text: str | None
    kept: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows that `source.rows` leaves: from `start` on, before `stop` if that is not None, every `step`th."""

    start: int = 0
    stop: int | None = None
    step: int = 1

    @classmethod
    def of(cls, rows: str, num_rows: int) -> Wanted:
        """Returns what a slice selects of so many rows."""
        start, stop, step = row_slice(rows).indices(num_rows)
        return cls(start, max(start, stop), step)

    def next_from(self, row: int) -> int | None:
        """Returns the first row that is wanted from a row on, None where there is none."""
        behind = max(0, -(-(row - self.start) // self.step))
        found = self.start + behind * self.step
        return None if self.stop is not None and found >= self.stop else found

    def among(self, first: int, count: int) -> Array:
        """Returns which of `count` rows from `first` on are wanted: int64, positions among them."""
        rows = np.arange(first, first + count)
        if self == Wanted():
            return rows - first
        is_in = (rows >= self.start) & ((rows - self.start) % self.step == 0)
        return np.flatnonzero(is_in if self.stop is None else is_in & (rows < self.stop))


def wanted_early(rows: str | None) -> Wanted | None:
    """Returns the rows that `source.rows` selects of any number; None where that depends on their number."""
    selected = slice(None) if rows is None else row_slice(rows)
    start, stop = selected.start or 0, selected.stop
    if start < 0 or (stop is not None and stop < 0):
        return None
    return Wanted(start, stop, selected.step or 1)


@dataclass(slots=True)
class TextRows:
    """The rows of a listing, counted through all of its files, as columns.

    count: rows that were passed so far, wanted or not. num_taken: those that were taken, usable or not.
    """

    source: SourceConfig
    count: int = 0
    num_taken: int = 0
    failures: Failures = field(default_factory=Failures)
    unused: Unused = field(default_factory=Unused)
    _block: list[tuple[Any, ...]] = field(default_factory=list)
    _kept: list[tuple[Any, ...]] = field(default_factory=list)
    _tables: list[pa.Table] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)
    _num_repeated: int = 0
    _excluded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._excluded = frozenset(self.source.exclude)

    @property
    def is_enough(self) -> bool:
        """Whether the first `max_samples` rows that the filters leave are among those that were added.

        A repeated id fails, or becomes another one that a later row may have: each counts as a row that is lost.
        """
        limit = self.source.max_samples
        return limit is not None and self.source.languages is None and len(self._ids) >= limit + self._num_repeated

    def add(self, row: int, group: int, derived_id: str, line: Line) -> None:
        """Adds the row of a line. derived_id: its id where the line gives none."""
        given, *texts, kept = line
        sample_id = given or derived_id
        self._block.append((row, group, group, sample_id, given is not None, 0.0, *texts))
        self._kept.append(kept)
        self.num_taken += 1
        self._note([sample_id])
        if len(self._block) == _BLOCK_ROWS:
            self._flush()

    def add_columns(self, columns: dict[str, Any], *, group: int, kept: dict[str, Any] | None = None) -> None:
        """Adds rows by column: `row`, `sample_id`, `text`, and what is known beside them."""
        self._flush()
        count = len(columns["row"])
        alike = {"group": np.full(count, group), "file": np.full(count, group), "duration_s": np.zeros(count)}
        typed = {name: pa.array(values, _TYPES[name]) for name, values in alike.items()}
        self._tables.append(row_table({**typed, **columns}, num_rows=count, kept=kept))
        self.num_taken += count
        if self.source.max_samples is not None:
            self._note(columns["sample_id"].to_pylist())

    def fail(self, row: int, sample_id: str, reason: str, message: str) -> None:
        """Notes a row that cannot be used, at its place among the rows."""
        self.failures.add(row, sample_id, reason, message)
        self.num_taken += 1

    def table(self) -> pa.Table:
        """Returns all rows as a table of ROW_SCHEMA."""
        self._flush(is_last=True)
        table = concatenated(self._tables)
        require_values(table, self.unused.counts, where=", ".join(self.source.manifests))
        return table

    def _note(self, ids: Sequence[str]) -> None:
        if self.source.max_samples is not None:
            for sample_id in ids:
                if sample_id not in self._excluded:
                    self._num_repeated += sample_id in self._ids
                    self._ids.add(sample_id)

    def _flush(self, *, is_last: bool = False) -> None:
        if not self._block and not (is_last and not self._tables):
            return
        values: Sequence[Any] = list(zip(*self._block, strict=True)) or [()] * len(_TYPES)
        columns = {name: pa.array(c, kind) for c, (name, kind) in zip(values, _TYPES.items(), strict=True)}
        kept = parts_of_rows(self._kept, self.source.keep_columns)
        self._tables.append(row_table(columns, num_rows=len(self._block), kept=kept))
        self._block, self._kept = [], []
