"""The texts of a folder's recordings from a table: which row means which recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig
from forebay.errors import ManifestError
from forebay.rows.manifest import SPAN, Unused, row_table
from forebay.rows.named_files import path_stem
from forebay.rows.reader import Failures
from forebay.rows.readers.tables import open_rows
from forebay.rows.recording_pieces import SEVERAL, refuse_differing
from forebay.store.layout import Array
from forebay.store.source_files import SourceFile

_NO_ROW = -1


def read_texts(
    source: SourceConfig, files: Sequence[SourceFile], names: Sequence[str], failures: Failures, unused: Unused
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the columns of `source.texts`, and those that are kept, by recording; null where no row means one.

    names: of the recordings, relative to their folder. Rows that mean no recording, or one that an earlier row means,
    have failed, behind the recordings. Raises ManifestError where a row may mean several recordings.
    """
    number = next(n for n, file in enumerate(files) if file.path == Path(source.texts or ""))
    table = open_rows(files[number], number, source)
    columns, kept = table.values()
    paths = table.paths().to_pylist()
    unused.add(table.unused, rows=len(paths))
    matched = _Matched(names, files[number].path, len(paths))
    for row, (written, sample_id) in enumerate(zip(paths, columns["sample_id"].to_pylist(), strict=True)):
        if (problem := table.problems.get(row) or matched.problem(row, written)) is not None:
            failures.add(len(names) + row, sample_id, *problem)
    meant = matched.meant != _NO_ROW
    spans = {name: column for name, column in columns.items() if name.startswith(SPAN)}
    rows = {"file": pa.array(matched.meant), "sample_id": columns["sample_id"], "text": columns["text"], **spans}
    of_table = row_table(rows, num_rows=len(paths)).filter(pa.array(meant))
    of_table = refuse_differing(of_table, lambda recording, _: f"{files[number].path}: {names[recording]}")
    if SEVERAL in of_table.column_names:
        columns[SEVERAL] = pa.array(np.isin(np.arange(len(paths)), of_table["row"].filter(of_table[SEVERAL])))
    places = pa.array(matched.rows, mask=matched.rows == _NO_ROW)
    found = {name: column.take(places) for name, column in columns.items() if column is not None}
    if (given_s := found.get("duration_s")) is not None:
        found["duration_s"] = pc.fill_null(given_s, float("nan"))
    stems = pa.array([path_stem(name) for name in names], pa.large_string())
    explicit = found.pop("explicit_id", None)
    if explicit is None:
        del found["sample_id"]
    else:
        found["explicit_id"] = pc.fill_null(explicit, fill_value=False)
        found["sample_id"] = pc.if_else(found["explicit_id"], found["sample_id"], stems)
    return found, {name: column.take(places) for name, column in kept.items()}


class _Matched:
    """The row of every recording. rows: int64 [recordings], `_NO_ROW` where there is none. meant: the other way."""

    def __init__(self, names: Sequence[str], table: Path, num_rows: int) -> None:
        self._names, self._table = names, table
        self.meant: Array = np.full(num_rows, _NO_ROW, np.int64)
        self.rows: Array = np.full(len(names), _NO_ROW, np.int64)
        self._known: list[dict[str, list[int]]] = [{}, {}, {}, {}]
        for number, name in enumerate(names):
            for known, form in zip(self._known, _forms(name), strict=True):
                known.setdefault(form, []).append(number)

    def problem(self, row: int, written: str | None) -> tuple[str, str] | None:
        """Returns why a row gives no recording its text, as reason and message; None where it does."""
        where = f"{self._table}, row {row + 1}"
        if not written:
            return "missing_file", f"{where}: it names no recording; correct the row"
        name = written.removeprefix("./")
        # A path goes before the bare name of a file, and a name with its extension before one without.
        found = next((numbers for known in self._known if (numbers := known.get(name)) is not None), None)
        if found is None:
            return "missing_file", f"{where}: no recording is {written!r}; correct the row or add the file"
        if len(found) > 1:
            one, other = (self._names[number] for number in found[:2])
            raise ManifestError(
                f"{where}: {written!r} may be {one!r} or {other!r}; write the path below source.manifest in the table",
                code="FB203",
            )
        self.meant[row] = found[0]
        if self.rows[found[0]] != _NO_ROW:
            first = int(self.rows[found[0]]) + 1
            return "repeated_row", f"{where}: row {first} is of the same recording, {written!r}; keep one of them"
        self.rows[found[0]] = row
        return None


def _forms(name: str) -> Iterator[str]:
    """Yields how a table may call a recording: path, path without extension, file name, file name without extension."""
    bare = name.rpartition("/")[2]
    yield from (name, path_stem(name), bare, path_stem(bare))
