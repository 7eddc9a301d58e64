"""One file of values by digest: an arrow IPC file, written once, never changed, mapped, and named by its own hash.

Its columns are `high` and `low`, the halves of the digests as uint64 in ascending order, and `value`, bytes. Its
metadata say what the values belong to. A file whose hash is not its name is damaged: it costs the work that it saved,
and nothing else.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from forebay.store.files import write_bytes
from forebay.store.held import open_own
from forebay.store.layout import Array, Ints

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2
SUFFIX = ".texts"


class DamagedSegmentError(ValueError):
    """A file is not the segment that was written. It never leaves the store: such a file is passed over."""


class OtherSegmentError(ValueError):
    """A file is a segment of another version or of other values: it is passed over, and left as it is."""


class Segment:
    """A segment, mapped. Threads and forked children may share it."""

    def __init__(self, path: Path, owner: bytes) -> None:
        """Maps a file, and reads all of it once. owner: what the values belong to.

        Raises DamagedSegmentError, OtherSegmentError, and OSError where it cannot be opened.
        """
        self.path = path
        with open(path, "rb", buffering=0, opener=open_own) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not status.st_size:
                raise DamagedSegmentError(f"it has {status.st_size} bytes")
            data = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
        if xxhash.xxh3_128_hexdigest(data) != path.name.removesuffix(SUFFIX):
            raise DamagedSegmentError("its hash is not its name")
        self.size_bytes, self.is_mine = status.st_size, os.geteuid() in (0, status.st_uid)
        self.table = _table(data, owner)
        self._high, self._low = (self.table[name].to_numpy() for name in ("high", "low"))
        value = self.table["value"].chunk(0)
        _, offsets, values = value.buffers()
        self._offsets: Ints = np.frombuffer(offsets, np.int64)[value.offset :]
        self._values = memoryview(values or b"")

    def find(self, digests: Array, wanted: Ints, found: list[bytes | None]) -> Ints:
        """Fills `found` where this segment has the value of a digest; returns the part of `wanted` that it has not.

        digests: uint64 [n, 2]. wanted: indices of digests, which are indices of `found`.
        """
        places = self._places(digests[wanted])
        if places is None:
            return wanted
        has = places >= 0
        starts, stops = self._offsets[places[has]].tolist(), self._offsets[places[has] + 1].tolist()
        for index, start, stop in zip(wanted[has].tolist(), starts, stops, strict=True):
            found[index] = bytes(self._values[start:stop])
        return wanted[~has]

    def _places(self, digests: Array) -> Ints | None:
        """Returns where digests stand among the sorted ones, int64 [n], -1 where they do not; None where none does."""
        high, low, last = digests[:, 0], digests[:, 1], len(self._high) - 1
        at = np.searchsorted(self._high, high)
        near = np.minimum(at, last)
        is_high = self._high[near] == high
        if not is_high.any():  # the usual end for a text of another segment, soon
            return None
        while True:
            is_here = is_high & (self._low[near] == low)
            if not (goes_on := is_high & ~is_here).any():  # digests of one upper half stand side by side
                return np.where(is_here, near, -1)
            at[goes_on] += 1
            near = np.minimum(at, last)
            is_high = (at <= last) & (self._high[near] == high)


def count_of(file: int) -> int:
    """Returns how many values an open file has, by its frame alone. Raises ValueError for what is no segment."""
    import pyarrow as pa

    with pa.PythonFile(os.fdopen(os.dup(file), "rb"), "r") as opened, pa.ipc.open_file(opened) as reader:
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))


def write_segment(folder: Path, owner: bytes, tables: Sequence[pa.Table]) -> str:
    """Writes a segment of tables of values by digest, each digest once, the first one counts; returns its name.

    Raises OSError.
    """
    import pyarrow as pa

    table = pa.concat_tables(tables)
    high, low = (table[name].to_numpy() for name in ("high", "low"))
    order = np.lexsort((low, high))  # stable
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
    sink = pa.BufferOutputStream()
    batch = table.take(order[is_first]).combine_chunks().replace_schema_metadata(_mark(owner))
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_table(batch, max_chunksize=len(batch))
    data = sink.getvalue()
    name = f"{xxhash.xxh3_128_hexdigest(data)}{SUFFIX}"
    write_bytes(folder / name, data)
    return name


def table_of(digests: Array, values: Sequence[bytes]) -> pa.Table:
    """Returns values by digest as a table. digests: uint64 [n, 2]."""
    import pyarrow as pa

    halves = {name: pa.array(digests[:, number]) for number, name in enumerate(("high", "low"))}
    return pa.table({**halves, "value": pa.array(values, pa.large_binary())})


def _mark(owner: bytes) -> dict[str, str]:
    return {"forebay": f"texts {VERSION}", "owner": owner.hex()}


def _table(data: mmap.mmap, owner: bytes) -> pa.Table:
    """Returns the one batch of a file whose bytes are those that were written."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    found = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    for name, wanted in _mark(owner).items():
        if found.get(name) != wanted:
            raise OtherSegmentError(f"its {name} is {found.get(name)!r}, this forebay reads {wanted!r} there")
    return table
