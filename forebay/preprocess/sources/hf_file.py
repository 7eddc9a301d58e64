"""One data file of an `hf` source: parquet, or the arrow stream that `save_to_disk` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.errors import ManifestError

Array = np.ndarray[Any, Any]


class HfFile:
    """Rows of one file, the audio bytes among them read by row; nothing is decoded, nothing is copied to a cache."""

    def __init__(self, path: Path) -> None:
        """Opens a file. Raises ManifestError where it is neither parquet nor an arrow stream."""
        self.path = path
        self._parquet: pq.ParquetFile | None = None
        self._parts: list[pa.RecordBatch] = []
        try:
            if path.suffix == ".parquet":
                self._parquet = pq.ParquetFile(path)
                metadata = self._parquet.metadata
                counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                self.schema = self._parquet.schema_arrow
            else:
                with pa.memory_map(str(path)) as file:
                    reader = pa.ipc.open_stream(file)
                    self.schema, self._parts = reader.schema, list(reader)
                counts = [len(part) for part in self._parts]
        except (OSError, UnicodeDecodeError, pa.ArrowException) as err:  # UnicodeDecodeError: of a damaged column name
            raise ManifestError(f"{path} is neither parquet nor an arrow stream: {err}; name a data file") from err
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._last: tuple[int, pa.Table] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def columns(self, names: list[str]) -> pa.Table:
        """Returns whole columns by name; `audio.path` is a field of a struct, returned as column `path`."""
        if self._parquet is not None:
            table = self._parquet.read(columns=names)
        else:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
            table = pa.Table.from_batches(self._parts, self.schema).select(tops)
        arrays, labels = [], []
        for name in names:
            top, _, child = name.partition(".")
            arrays.append(pc.struct_field(table[top], child) if child else table[top])
            labels.append(child or top)
        return pa.table(dict(zip(labels, arrays, strict=True)))

    def has_values(self, name: str) -> Array:
        """Returns bool [rows], whether a column has a value; parquet's statistics answer without reading it, mostly."""
        if self._parquet is None:
            return np.asarray(pc.is_valid(self.columns([name])[name.rpartition(".")[2]]).to_numpy())
        masks = [self._group_has_values(i, name) for i in range(self._parquet.metadata.num_row_groups)]
        return np.concatenate([np.zeros(0, bool), *masks])

    def audio(self, row: int, column: str) -> bytes | None:
        """Returns the encoded bytes that a row holds, None where it holds none."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        if self._last is None or self._last[0] != part:
            self._last = (part, self._part(part, column))
        value = self._last[1][column][row - int(self._starts[part])].as_py()
        return value.get("bytes") if isinstance(value, dict) else value

    def _part(self, part: int, column: str) -> pa.Table:
        if self._parquet is not None:
            return self._parquet.read_row_group(part, columns=[column])
        return pa.Table.from_batches([self._parts[part]], self.schema)

    def _group_has_values(self, group: int, name: str) -> Array:
        assert self._parquet is not None
        metadata = self._parquet.metadata.row_group(group)
        for i in range(metadata.num_columns):
            column = metadata.column(i)
            if column.path_in_schema == name and column.statistics is not None and column.statistics.has_null_count:
                nulls = column.statistics.null_count
                if nulls in (0, metadata.num_rows):
                    return np.full(metadata.num_rows, nulls == 0)
        values = self._parquet.read_row_group(group, columns=[name])
        top, _, child = name.partition(".")
        column = pc.struct_field(values[top], child) if child else values[top]
        return np.asarray(pc.is_valid(column).to_numpy())
