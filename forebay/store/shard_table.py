"""The shard table of a field group: one fixed-size record a shard, kept as .npy so that opening parses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.store.layout import Array
from forebay.store.shard import ShardEntry, Span


def table_dtype(num_fields: int) -> np.dtype[Any]:
    """Returns the record of one shard; digests and keys as raw bytes."""
    return np.dtype(
        [
            ("key", "V32"),
            ("xxh3_128", "V16"),
            ("size_bytes", "<i8"),
            ("rows", "<i8"),
            ("hash_offset", "<i8"),
            ("spans", "<i8", (num_fields, 3)),
        ]
    )


def to_table(entries: Sequence[ShardEntry], num_fields: int) -> Array:
    """Returns the table of these shards."""
    table = np.zeros(len(entries), table_dtype(num_fields))
    for record, entry in zip(table, entries, strict=True):
        record["key"] = np.void(bytes.fromhex(entry.key))
        record["xxh3_128"] = np.void(bytes.fromhex(entry.xxh3_128))
        record["size_bytes"], record["rows"], record["hash_offset"] = entry.size_bytes, entry.rows, entry.hash_offset
        record["spans"] = entry.spans
    return table


def entry_of(table: Array, index: int) -> ShardEntry:
    """Returns the entry of one shard."""
    record = table[index]
    return ShardEntry(
        key=record["key"].tobytes().hex(),
        xxh3_128=record["xxh3_128"].tobytes().hex(),
        size_bytes=int(record["size_bytes"]),
        rows=int(record["rows"]),
        hash_offset=int(record["hash_offset"]),
        spans=_spans(record["spans"].tolist()),
    )


def shard_name(group: str, index: int) -> str:
    """Returns the path of a shard inside its cache."""
    return f"{group}/{index:05d}.tdz"


def entry_to_json(entry: ShardEntry) -> dict[str, Any]:
    """Returns the entry as kept in the receipt of a shard that is not sealed yet."""
    return {
        "key": entry.key,
        "size_bytes": entry.size_bytes,
        "xxh3_128": entry.xxh3_128,
        "rows": entry.rows,
        "hash_offset": entry.hash_offset,
        "spans": [list(span) for span in entry.spans],
    }


def entry_from_json(document: dict[str, Any]) -> ShardEntry:
    """Returns the entry of a receipt. Raises KeyError, TypeError or ValueError where it is not one."""
    return ShardEntry(
        key=str(document["key"]),
        size_bytes=int(document["size_bytes"]),
        xxh3_128=str(document["xxh3_128"]),
        rows=int(document["rows"]),
        hash_offset=int(document["hash_offset"]),
        spans=_spans(document["spans"]),
    )


def _spans(rows: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    return tuple((int(values), int(count), int(offsets)) for values, count, offsets in rows)
