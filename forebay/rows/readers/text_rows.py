"""The rows of a listing of texts, gathered as columns from lines and from tables; and which of them are wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceColumns, SourceConfig, row_slice
from forebay.rows.kept_columns import concatenated, parts_of_rows, require_values
from forebay.rows.manifest import Unused, row_table
from forebay.rows.reader import Failures
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile

BAD_TEXT, TOO_LARGE = "bad_text", "too_large"
"""Reasons of texts that cannot be used."""
_DEFAULTS = SourceColumns()


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

    def add_columns(self, columns: dict[str, Any], *, group: int, kept: dict[str, Any] | None = None) -> None:
        """Adds rows by column: `row`, `sample_id`, `text`, and what is known beside them."""
        count = len(columns["row"])
        numbers, seconds = pa.array(np.full(count, group, np.int32)), pa.array(np.zeros(count))
        alike = {"group": numbers, "file": numbers, "duration_s": seconds}
        self._tables.append(row_table({**alike, **columns}, num_rows=count, kept=kept))
        self.num_taken += count

    def note_all(self, ids: Any) -> None:
        """Notes a column of ids as `note` does."""
        if self.source.max_samples is not None:
            for sample_id in ids.to_pylist():
                self.note(sample_id)

    def note(self, sample_id: str) -> None:
        """Counts the id of a row among those that `is_enough` counts. Each row that is added is noted once."""
        if self.source.max_samples is not None and sample_id not in self._excluded:
            self._num_repeated += sample_id in self._ids
            self._ids.add(sample_id)

    def fail(self, row: int, sample_id: str, reason: str, message: str) -> None:
        """Notes a row that cannot be used, at its place among the rows."""
        self.failures.add(row, sample_id, reason, message)
        self.num_taken += 1

    def table(self) -> pa.Table:
        """Returns all rows as a table of ROW_SCHEMA."""
        empty = row_table({}, num_rows=0, kept=parts_of_rows([], self.source.keep_columns))
        table = concatenated(self._tables or [empty])
        require_values(table, self.unused.counts, where=", ".join(self.source.manifests))
        return table


@dataclass(frozen=True, slots=True)
class LineFile:
    """One manifest of lines. group: its number. stem: what ids that no line gives begin with."""

    manifest: SourceFile
    group: int
    stem: str
    rows: TextRows

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.manifest.path

    def fail(self, row: int, number: int, reason: str, problem: str) -> None:
        """Notes a line that costs its sample."""
        message = f"{self.path}, line {number}: {problem}; correct the manifest"
        self.rows.fail(row, f"{self.stem}/{number}", reason, message)


def named_columns(source: SourceConfig) -> dict[str, str]:
    """Returns the columns that a config names, by what they hold."""
    names = {name: getattr(source.columns, name) for name in ("text", "language", "id", "prompt")}
    return {name: value for name, value in names.items() if value != getattr(_DEFAULTS, name)}
