"""Where shards begin and end, and what each is named by. Pure: rows in, shard keys out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from forebay.rows.kept_columns import column_of, fields_of
from forebay.store.layout import Array, Group

NO_TEXT = "no_text"
"""Why a row without a text is left out, where its kind of source needs one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One shard of one group: its items, or rows of the listing, [start, stop), and its key. The unit of work."""

    group: Group
    index: int
    start: int
    stop: int
    key: str

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self.stop - self.start


def cut_rows(groups: Array, *, rows_per_shard: int) -> Iterator[tuple[int, int]]:
    """Yields [start, stop) of every shard: up to `rows_per_shard` consecutive rows of one source file.

    groups: int [rows], the file that each row is cut by (its tar; the manifest, where media are files of their own).
    """
    borders = (np.flatnonzero(np.diff(groups)) + 1).tolist()
    for start, stop in zip([0, *borders], [*borders, len(groups)], strict=True):
        yield from ((a, min(a + rows_per_shard, stop)) for a in range(start, stop, rows_per_shard))


def kept_document(rows: pa.Table) -> dict[str, Any]:
    """Returns what the key of a text shard says of the kept columns of its rows; nothing where there is none."""
    if not (kept := fields_of(rows)):
        return {}
    values = pa.table({field.name: column_of(rows, field.name) for field in kept})
    return {"columns": [[field.name, field.dtype] for field in kept], "column_values": columns_digest(values)}


def columns_digest(rows: pa.Table, files: Array | None = None) -> str:
    """Returns the xxh3-128 of the values alone: arrow's own bytes depend on slicing and chunking."""
    state = xxhash.xxh3_128(np.ascontiguousarray([] if files is None else files, np.int64).tobytes())
    for name in rows.column_names:
        column = rows[name].combine_chunks()
        state.update(f"{name}:{len(column)}\0".encode())
        state.update(np.packbits(column.is_null().to_numpy(zero_copy_only=False)).tobytes())
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            kind = np.int64 if pa.types.is_integer(column.type) else np.float64
            column = column.fill_null(0) if column.null_count else column
            state.update(np.ascontiguousarray(column.to_numpy(), kind).tobytes())
            continue
        # Neither call is free for a column that needs it not, and there are six columns a shard.
        binary = column if column.type == pa.large_string() else column.cast(pa.large_string())
        binary = binary.fill_null("") if binary.null_count else binary
        offsets = np.frombuffer(binary.buffers()[1], np.int64)[binary.offset : binary.offset + len(binary) + 1]
        state.update(np.diff(offsets).tobytes())
        data = binary.buffers()[2]
        state.update(memoryview(data)[offsets[0] : offsets[-1]] if data is not None else b"")
    return state.hexdigest()
