"""Texts in a column of a parquet file, read row group by row group."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig
from forebay.errors import ConfigError, ManifestError, TextError
from forebay.rows.kept_columns import part_of, require_columns
from forebay.rows.manifest import joined
from forebay.rows.reader import IDS
from forebay.rows.readers.arrow_files import HfFile, damaged, is_text
from forebay.rows.readers.text_lines import require_text
from forebay.rows.readers.text_rows import LineFile, Wanted, named_columns
from forebay.rows.readers.typed_columns import Columns
from forebay.store.layout import Array

ENDING = ".parquet"
_BATCH_ROWS = 4096


def list_parquet(file: LineFile, wanted: Wanted) -> None:
    """Adds the rows of a parquet file that are wanted. Row groups without one of them are not read.

    Raises ConfigError for a column that the config names and the file does not have, ManifestError for a file or a
    column of another form.
    """
    rows, base = file.rows, file.rows.count
    table = HfFile(file.path)
    columns = _columns(table.schema, file.path, rows.source)
    unused = [name for name in table.schema.names if name not in columns]
    starts = table.part_starts()
    try:
        for part, (start, stop) in enumerate(itertools.pairwise(starts)):
            rows.count = base + start
            if len(wanted.among(rows.count, stop - start)):
                for batch in table.batches(range(part, part + 1), columns, batch_rows=_BATCH_ROWS):
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


def num_rows(path: Path) -> int:
    """Returns how many rows a parquet file has."""
    return len(HfFile(path))


def _columns(schema: pa.Schema, path: Path, source: SourceConfig) -> list[str]:
    """Returns the columns that are read: those of texts, ids, languages and prompts, and those that are kept."""
    names = schema.names
    for setting, name in {"text": source.columns.text, **named_columns(source)}.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"{path}: no column {name} (source.columns.{setting}); it has {', '.join(names) or 'none'}"
                f"{f'; did you mean {near[0]}?' if near else ''}",
                code="FB202",
            )
    require_columns(source.keep_columns, names, where=str(path))
    if source.languages is not None and source.columns.language not in names:
        raise ManifestError(
            f"{path} has no column {source.columns.language}, and source.languages is {list(source.languages)}; leave "
            "source.languages out, or name the column in source.columns.language",
            code="FB202",
        )
    own = source.columns
    ids = next(((name,) for name in (IDS if own.id is None else (own.id,)) if name in names), ())
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
        is_good = self._is_good(source.columns.text, source.max_sample_bytes)
        good = pa.array(is_good)
        columns = {name: column.filter(good) for name, column in self._strings(is_good).items()}
        kept = {
            name: part_of(self.table[name], name, where=str(self.file.path)).filter(good)
            for name in source.keep_columns
        }
        self.file.rows.add_columns(columns, group=self.file.group, kept=kept)
        self.file.rows.note_all(columns["sample_id"])

    def _strings(self, is_good: Array) -> dict[str, Any]:
        named, columns = self.file.rows.source.columns, Columns(self.table, self.file.path)
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

    def _given_ids(self, columns: Columns) -> Any:
        named = self.file.rows.source.columns.id
        name = next((n for n in (IDS if named is None else (named,)) if n in self.table.column_names), None)
        if name is None:
            return None
        if pa.types.is_integer(self.table[name].type):
            return pc.cast(self.table[name], pa.large_string())
        given = columns.strings(name, nullable=True)
        if pc.any(pc.equal(given, "")).as_py():
            raise columns.wrong(name, "is empty, wanted an id", row=self._row_of(pc.equal(given, "")))
        return given

    def _row_of(self, mask: Any) -> int:
        return int(self.rows[int(np.argmax(np.asarray(pc.fill_null(mask, fill_value=False))))] - self.base)

    def _binary(self, name: str) -> pa.ChunkedArray:
        """Returns the texts as bytes: what a file says is text need not be."""
        column = self.table[name]
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (is_text(kind) or pa.types.is_null(kind)):
            raise Columns(self.table, self.file.path).wrong(name, f"is {column.type}, wanted string")
        column = pc.cast(column, kind) if pa.types.is_dictionary(column.type) else column
        narrow = pc.cast(column, pa.binary() if pa.types.is_string(kind) else pa.large_binary())
        return pc.cast(narrow, pa.large_binary())

    def _is_good(self, name: str, max_bytes: int) -> Array:
        texts = self._binary(name)
        is_good = np.ones(len(texts), bool)
        is_long = pc.any(pc.greater(pc.binary_length(texts), max_bytes)).as_py()
        if not is_long and _are_texts(texts):
            return is_good
        for at, data in enumerate(texts.to_pylist()):
            try:
                require_text(data or b"", max_bytes)
            except TextError as err:
                is_good[at] = False
                number = int(self.rows[at]) - self.base + 1
                message = f"{self.file.path}, row {number}: column {name} {err}; correct the manifest"
                self.file.rows.fail(int(self.rows[at]), f"{self.file.stem}/{number}", err.reason, message)
        return is_good


def _are_texts(texts: pa.ChunkedArray) -> bool:
    """Whether all are UTF-8."""
    for chunk in texts.chunks:
        try:
            chunk.cast(pa.large_string()).validate(full=True)
        except pa.ArrowInvalid:
            return False
    return True
