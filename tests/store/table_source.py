"""A source of which only the row table matters, for tests of filters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.store.layout import Constants, FieldSpec, sorted_categories
from forebay.store.row_table import strings_digest
from forebay.store.source import SampleSource

TYPES = {"sample_id": pa.large_string(), "language": pa.large_string(), "speaker": pa.int64(), "snr": pa.float64()}


class TableSource(SampleSource):
    """Samples whose value is their number in `rows`."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, key: str = "ab" * 32, is_sealed: bool = True) -> None:
        names = [name for name in TYPES if all(name in row for row in rows)]
        self.rows = pa.table({name: pa.array([row[name] for row in rows], TYPES[name]) for name in names})
        self.key, self.recipe_key = key, "cd" * 32
        self.constants = Constants({})
        self.fields: Mapping[str, FieldSpec] = {"value": FieldSpec(name="value", dtype="int64")}
        self.lengths = {"num_tokens": np.arange(len(rows), dtype=np.int32) % 7}
        self.is_sealed = is_sealed

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def sample_id(self, index: int) -> str:
        return str(self.rows["sample_id"][index].as_py())

    def read(self, index: int) -> Mapping[str, Any]:
        return {"value": np.array([index % len(self)], np.int64)}

    def ids_digest(self) -> str:
        return strings_digest(self.rows["sample_id"])

    @property
    def slots(self) -> Any:
        return np.arange(len(self), dtype=np.int64) if self.is_sealed else None

    def categories(self, name: str) -> Any:
        if name not in self.rows.column_names:
            return None
        column = self.rows[name].combine_chunks().dictionary_encode()
        return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())

    @property
    def column_names(self) -> list[str]:
        return list(self.rows.column_names)

    def table(self, names: Collection[str] | None = None) -> pa.Table:
        return self.rows if names is None else self.rows.select(list(names))
