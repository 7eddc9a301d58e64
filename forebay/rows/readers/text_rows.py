"""The rows of a listing of texts, gathered as columns; which of them are wanted; and those of a parquet file."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig, row_slice
from forebay.errors import ConfigError, ManifestError
from forebay.rows.kept_columns import concatenated, no_column, part_of, parts_of_rows, require_columns, require_values
from forebay.rows.manifest import Unused, joined, row_table
from forebay.rows.reader import Failures, id_names
from forebay.rows.readers.arrow_files import DEFAULTS, HfFile, TypedColumns, damaged, first, is_text
from forebay.rows.readers.json_lines import BAD_TEXT
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile


def problem_of(data: bytes, max_bytes: int) -> tuple[str, str] | None:
    """Returns reason and message of what costs a sample: too many bytes, or none that are UTF-8; None for a text."""
    if len(data) > max_bytes:
        return "too_large", f"has more than {max_bytes} bytes, which is source.max_sample_bytes"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as err:
        return BAD_TEXT, f"is not UTF-8: {err}"
    return None


def good_texts(texts: pa.ChunkedArray, max_bytes: int, refuse: Callable[[int, str, str], None]) -> Array:
    """Returns bool [rows], which bytes are texts. refuse: told the place of each other, and reason and message."""
    is_good = np.ones(len(texts), bool)
    if not pc.any(pc.greater(pc.binary_length(texts), max_bytes)).as_py():
        try:
            pc.cast(texts, pa.large_string()).validate(full=True)
        except pa.ArrowInvalid:
            pass
        else:
            return is_good
    for at, data in enumerate(texts.to_pylist()):
        if (problem := problem_of(data or b"", max_bytes)) is not None:
            is_good[at] = False
            refuse(at, *problem)
    return is_good


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows that `source.rows` leaves: from `start` on, before `stop` if that is not None, every `step`th."""

    start: int = 0
    stop: int | None = None
    step: int = 1

    @classmethod
    def of(cls, rows: str, num_rows: int) -> WantedRows:
        """Returns what a slice selects of so many rows."""
        start, stop, step = row_slice(rows).indices(num_rows)
        return cls(start, max(start, stop), step)

    @classmethod
    def early(cls, rows: str | None) -> WantedRows | None:
        """Returns the rows that `source.rows` selects of any number; None where that depends on their number."""
        selected = slice(None) if rows is None else row_slice(rows)
        start, stop = selected.start or 0, selected.stop
        return None if start < 0 or (stop or 0) < 0 else cls(start, stop, selected.step or 1)

    def next_from(self, row: int) -> int | None:
        """Returns the first row that is wanted from a row on, None where there is none."""
        found = self.start + max(0, -(-(row - self.start) // self.step)) * self.step
        return None if self.stop is not None and found >= self.stop else found

    def among(self, first: int, count: int) -> Array:
        """Returns which of `count` rows from `first` on are wanted: int64, positions among them."""
        rows = np.arange(first, first + count)
        if self == WantedRows():
            return rows - first
        is_in = (rows >= self.start) & ((rows - self.start) % self.step == 0)
        return np.flatnonzero(is_in if self.stop is None else is_in & (rows < self.stop))


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
    def named_columns(self) -> dict[str, str]:
        """The columns that a config names, by what they hold."""
        names = {name: getattr(self.source.columns, name) for name in ("text", "language", "id", "prompt")}
        return {name: value for name, value in names.items() if value != getattr(DEFAULTS, name)}

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


def list_parquet(file: LineFile, wanted: WantedRows) -> None:
    """Adds the rows of a parquet file that are wanted. Row groups without one of them are not read.

    Raises ConfigError for a column that the config names and the file does not have, ManifestError for a file or a
    column of another form.
    """
    rows, base = file.rows, file.rows.count
    table = HfFile(file.path)
    columns = _columns(table.schema, file.path, rows)
    unused = [name for name in table.schema.names if name not in columns]
    starts = table.part_starts()
    try:
        for part, (start, stop) in enumerate(itertools.pairwise(starts)):
            rows.count = base + start
            if len(wanted.among(rows.count, stop - start)):
                for batch in table.batches(range(part, part + 1), columns, batch_rows=4096):
                    chosen = wanted.among(rows.count, len(batch))
                    rows.unused.add(unused, rows=len(chosen))
                    if len(chosen):
                        _Batch(file, pa.table(batch).take(pa.array(chosen)), rows.count + chosen, base).add()
                    rows.count += len(batch)
                    if rows.is_enough:
                        return
            rows.count = base + stop
            if wanted.next_from(rows.count) is None:
                return
    except (OSError, pa.ArrowException) as err:
        raise damaged(str(file.path), err) from err


def _columns(schema: pa.Schema, path: Path, rows: TextRows) -> list[str]:
    """Returns the columns that are read: those of texts, ids, languages and prompts, and those that are kept."""
    names, source, own = schema.names, rows.source, rows.source.columns
    for setting, name in {"text": own.text, **rows.named_columns}.items():
        if name not in names:
            raise ConfigError(no_column(name, f"columns.{setting}", names, where=str(path)), code="FB202")
    require_columns(source.keep_columns, names, where=str(path))
    if source.languages is not None and source.columns.language not in names:
        raise ManifestError(
            f"{path} has no column {source.columns.language}, and source.languages is {list(source.languages)}; leave "
            "source.languages out, or name the column in source.columns.language",
            code="FB202",
        )
    ids = next(((name,) for name in id_names(own) if name in names), ())
    wanted = dict.fromkeys((own.text, own.language, own.prompt or "prompt", *ids, *source.keep_columns))
    return [name for name in wanted if name in names]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of a parquet file. rows: int64, their numbers in the listing. base: that of the file's first row."""

    file: LineFile
    table: pa.Table
    rows: Array
    base: int

    def add(self) -> None:
        """Adds the rows; one whose text is too long or no UTF-8 costs itself."""
        source = self.file.rows.source
        is_good = good_texts(self._binary(source.columns.text), source.max_sample_bytes, self._refuse)
        good = pa.array(is_good)
        columns = {name: column.filter(good) for name, column in self._strings(is_good).items()}
        kept = {
            name: part_of(self.table[name], name, where=str(self.file.path)).filter(good)
            for name in source.keep_columns
        }
        self.file.rows.add_columns(columns, group=self.file.group, kept=kept)
        self.file.rows.note_all(columns["sample_id"])

    def _strings(self, is_good: Array) -> dict[str, Any]:
        named, columns = self.file.rows.source.columns, TypedColumns(self.table, self.file.path)
        texts = pc.if_else(pa.array(is_good), self._binary(named.text), pa.scalar(None, pa.large_binary()))
        derived = joined(f"{self.file.stem}/", pa.array(self.rows - self.base + 1))
        given = self._given_ids(columns)
        found = {
            "row": pa.array(self.rows),
            "sample_id": derived if given is None else pc.coalesce(given, derived),
            "explicit_id": None if given is None else pc.is_valid(given),
            "language": columns.strings(named.language, nullable=True),
            "prompt": columns.strings(named.prompt or "prompt", nullable=True),
            "text": pc.cast(texts, pa.large_string()),
        }
        return {name: column for name, column in found.items() if column is not None}

    def _given_ids(self, columns: TypedColumns) -> Any:
        name, given = columns.given_ids(id_names(self.file.rows.source.columns))
        if given is not None and pc.any(is_empty := pc.fill_null(pc.equal(given, ""), fill_value=False)).as_py():
            raise columns.wrong(name, "is empty, wanted an id", row=int(self.rows[first(is_empty)] - self.base))
        return given

    def _binary(self, name: str) -> pa.ChunkedArray:
        """Returns the texts as bytes: what a file says is text need not be."""
        column = self.table[name]
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (is_text(kind) or pa.types.is_null(kind)):
            raise TypedColumns(self.table, self.file.path).wrong(name, f"is {column.type}, wanted string")
        column = pc.cast(column, kind) if pa.types.is_dictionary(column.type) else column
        narrow = pc.cast(column, pa.binary() if pa.types.is_string(kind) else pa.large_binary())
        return pc.cast(narrow, pa.large_binary())

    def _refuse(self, at: int, reason: str, problem: str) -> None:
        number = int(self.rows[at]) - self.base + 1
        column = self.file.rows.source.columns.text
        message = f"{self.file.path}, row {number}: column {column} {problem}; correct the manifest"
        self.file.rows.fail(int(self.rows[at]), f"{self.file.stem}/{number}", reason, message)
