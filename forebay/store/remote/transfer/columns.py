"""What a store tells of all samples of a cache at once, so that a run begins without asking every shard for it.

A plan needs the digest of the samples' ids, a run's log their languages and sources. In a cache these stand shard by
shard, the ids beside the recordings: a node that begins would download everything first. A push puts them beside the
cache as one object, which is no file of the cache: without it, or where it is damaged, the shards are asked.
"""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from forebay.errors import RemoteError, RemoteMissingError
from forebay.store.layout import Array
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.node import Wanted

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

NAME = "columns.bin"
"""Beside metadata.json, in a store and in its mirror: a checksum and a parquet file."""

MAX_VALUES = 1 << 16
"""Different values of a column that is told; ids and texts have more."""

_CHECKSUM_BYTES = 16
_ABOUT = b"forebay"


@dataclass(frozen=True, kw_only=True)
class ToldColumns:
    """ids_digest: of the samples' ids in their order. table: a row a sample, of text columns with few values."""

    ids_digest: str
    table: pa.Table

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of a column, sorted, and which one each sample has; None: it is not told."""
        if name not in self.table.column_names:
            return None
        column = self.table.column(name).combine_chunks().dictionary_encode()
        names, codes = column.dictionary.to_pylist(), column.indices.to_numpy()
        order = sorted(range(len(names)), key=names.__getitem__)
        moved = np.zeros(len(names), np.int32)
        moved[order] = np.arange(len(order))
        return [names[code] for code in order], moved[codes]


def dump_columns(key: str, ids_digest: str, columns: dict[str, tuple[list[str], Array]]) -> bytes:
    """Returns the object of a cache. columns: as `categories` gives them; those of many values are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(values, pa.string()))
        for name, (values, codes) in columns.items()
        if len(values) <= MAX_VALUES
    }
    about = json.dumps({"key": key, "ids_digest": ids_digest}).encode("ascii")
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays).replace_schema_metadata({_ABOUT: about}), buffer, compression="zstd")
    body = buffer.getvalue()
    return xxhash.xxh3_128_digest(body) + body


def parse_columns(data: bytes, *, key: str, num_samples: int) -> ToldColumns:
    """Returns what an object tells of the cache of a key. Raises ValueError where it is damaged or of another one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    body = data[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_CHECKSUM_BYTES]:
        raise ValueError("its checksum is another one than that of its bytes")
    try:
        table = pq.read_table(io.BytesIO(body))
        about = json.loads((table.schema.metadata or {})[_ABOUT])
        found, ids_digest = str(about["key"]), str(about["ids_digest"])
    except (pa.ArrowException, LookupError, TypeError) as err:
        raise ValueError(f"it is not what a push writes: {err!r}") from err
    if found != key or (table.num_columns and table.num_rows != num_samples):
        raise ValueError(f"it is of {table.num_rows} samples of the cache {found}, wanted {num_samples} of {key}")
    return ToldColumns(ids_digest=ids_digest, table=table)


def told_columns(mirror: Mirror, *, key: str, num_samples: int) -> ToldColumns | None:
    """Returns what the store tells of a cache, which this node then keeps; None where it tells nothing."""
    path = mirror.folder / NAME
    try:
        data = path.read_bytes() if path.is_file() else mirror.bucket.read(NAME)
        told = parse_columns(data, key=key, num_samples=num_samples)
    except RemoteMissingError:
        return None
    except (RemoteError, ValueError) as err:
        logger.warning("%s/%s is left out, and every shard is asked instead: %s", mirror.url, NAME, err)
        path.unlink(missing_ok=True)
        return None
    mirror.node.keep(path, Wanted(name=NAME, size_bytes=len(data), is_kept=True), data)
    return told
