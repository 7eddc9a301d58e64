"""Columns of a foreign table, checked and brought to the types of the common form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ManifestError
from forebay.rows.readers.arrow_files import is_list, is_text


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one manifest file; `path` names it in messages. unused: the names of those that were not read."""

    table: pa.Table
    path: Path
    unused: frozenset[str] = frozenset()

    def strings(self, name: str, *, nullable: bool) -> pa.ChunkedArray | None:
        """Returns a column as large_string, None if it is missing. Raises ManifestError for other types, bad UTF-8."""
        column = self._column(name)
        if column is None:
            return None
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (is_text(kind) or (pa.types.is_null(kind) and nullable)):
            raise self.wrong(name, f"is {column.type}, wanted string")
        if not nullable and column.null_count:
            raise self.wrong(name, "is null, wanted a string", row=first(pc.is_null(column)))
        try:
            column = pc.cast(column, pa.large_string())
            column.validate(full=True)
        except pa.ArrowInvalid as err:
            raise self.wrong(name, f"is not UTF-8 text: {err}") from err
        return column

    def seconds(self, name: str) -> pa.ChunkedArray | None:
        """Returns a column of durations as float64 with NaN for null, None where it is missing.

        Any integer, float or decimal type is taken; other types raise ManifestError.
        """
        column = self._column(name)
        if column is None:
            return None
        kind = column.type
        if not (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
            or pa.types.is_null(kind)
        ):
            raise self.wrong(name, f"is {kind}, wanted seconds as a number")
        return pc.fill_null(pc.cast(column, pa.float64(), safe=False), float("nan"))

    def ids(self, name: str) -> pa.ChunkedArray:
        """Returns a column of lists of integers as large_string: the numbers in decimal, parted by spaces."""
        column = self.table[name]
        if not is_list(column.type) or not pa.types.is_integer(column.type.value_type):
            raise self.wrong(name, f"is {column.type}, wanted lists of token ids")
        column = pc.cast(column, pa.large_list(column.type.value_type))
        column = pc.cast(column, pa.large_list(pa.large_string()))
        return pc.binary_join(column, pa.scalar(" ", pa.large_string()))

    def wrong(self, name: str, problem: str, *, row: int | None = None) -> ManifestError:
        """Returns the error that names file, column and, counted from 1, row."""
        where = f"{self.path}, row {row + 1}" if row is not None else f"{self.path}"
        return ManifestError(f"{where}: column {name} {problem}; correct the manifest", code="FB203")

    def _column(self, name: str) -> pa.ChunkedArray | None:
        if name not in self.table.column_names:
            return None
        if self.table.column_names.count(name) > 1:
            raise self.wrong(name, "occurs more than once, wanted it once")
        return self.table[name]


def require_columns(path: Path, names: Sequence[str], required: Sequence[str]) -> None:
    """Raises ManifestError where a table does not have all the required columns."""
    missing = [name for name in required if name not in names]
    if missing:
        raise ManifestError(
            f"{path}: no column {', '.join(missing)}; it has {', '.join(names) or 'none'}; wanted "
            f"{', '.join(required)}",
            code="FB202",
        )


def first(mask: Any) -> int:
    """Returns the position of the first true value."""
    return int(np.argmax(np.asarray(mask)))
