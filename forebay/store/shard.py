"""One shard: many samples of one field group in one `.tdz` file, written once and read through one mapping.

Members: `values/<field>` (all samples' values concatenated), `offsets/<field>` int64 [rows + 1] into it, and
`sample_hash` int64 [rows] (xxh3-64 of a row's tensor fields). A row that failed or was left out keeps its place with no
values and a reason in the table field `failure`, so that the shards of both groups have the same rows.

The shard table of a group has one fixed-size record a shard, kept as .npy so that opening a cache parses nothing.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.errors import CacheCorruptError, CacheError, ForebayError
from forebay.store.held import AnyFile, HeldFile, open_own
from forebay.store.layout import NULL_TEXT, Array, FieldSpec, Group
from forebay.store.shared_disk import is_gone
from forebay.store.tdz import END_SIGNATURE, END_SIZE, LOCAL_SIGNATURE, Parts, crc32, stored_checksums, write_tdz

Span = tuple[int, int, int]
TensorColumns = tuple[tuple[str, Array, memoryview], ...]
"""Name of every tensor field, its values of all rows, int64 offsets of the rows into these values."""
_STREAMED_BYTES = 16 * 1024
"""Rows of a field that are as large as this on average are written one by one."""
OUT_OF_HANDLES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the machine says when there are no more descriptors or mappings to be had."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard of the table. spans: of a field, byte offset of values, number along axis 0, byte offset of offsets."""

    key: str
    size_bytes: int
    xxh3_128: str
    rows: int
    hash_offset: int
    spans: tuple[Span, ...]


def failure_field(group: Group) -> FieldSpec:
    """Returns the table field that every group ends with: why a row has no values, empty where it has them."""
    return FieldSpec(name="failure", dtype="str", group=group, role="table")


def shard_fields(fields: Sequence[FieldSpec], group: Group) -> tuple[FieldSpec, ...]:
    """Returns the fields of a group's shards, in the order of the shard table."""
    return (*(field for field in fields if field.group == group), failure_field(group))


def sample_hash(values: Sequence[Array]) -> int:
    """Returns the xxh3-64 of a row's tensor fields in their order, each hashed with the hash before it as the seed.

    Chaining by seed keeps the boundaries between fields: a value cannot move from one field to the next unseen.
    """
    state = 0
    for value in values:
        state = xxhash.xxh3_64_intdigest(value.data, state)
    return state - (1 << 64) if state >= 1 << 63 else state


class Columns:
    """The rows of a shard that is to be written, by field: of many small rows no mapping stays in memory."""

    def __init__(self, fields: Sequence[FieldSpec]) -> None:
        """fields: of one group, as `shard_fields` gives them."""
        self.fields = tuple(fields)
        self.by_name: dict[str, list[Any]] = {field.name: [] for field in fields}
        self._appends = [(name, column.append) for name, column in self.by_name.items()]
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(self, row: Mapping[str, Any] | str) -> None:
        """Adds a row.

        row: values by field name (arrays [n, *shape]; str or number for table fields), or the reason why there are
        none. Table values may be kept beside a reason: `{"failure": reason, ...}`.
        """
        values = {"failure": row} if isinstance(row, str) else row
        self._num_rows += 1
        for name, append in self._appends:
            append(values.get(name))


def write_shard(
    path: Path, fields: Sequence[FieldSpec], rows: Iterable[Mapping[str, Any] | str], *, key: str
) -> ShardEntry:
    """Writes a shard of rows, see `Columns`, complete or absent."""
    columns = Columns(fields)
    for row in rows:
        columns.add(row)
    return write_columns(path, columns, key=key)


def write_columns(path: Path, rows: Columns, *, key: str) -> ShardEntry:
    """Writes a shard, complete or absent."""
    tensors: list[list[Array]] = []
    members: dict[str, Array | Parts] = {}
    offsets: dict[str, Array] = {}
    for field in rows.fields:
        column = rows.by_name[field.name]
        if field.dtype == "str" and field.role == "table":
            members[f"values/{field.name}"], lengths = _joined(field, column)
        else:
            arrays = _as_arrays(field, column)
            members[f"values/{field.name}"], lengths = _column_of(arrays, field), [len(array) for array in arrays]
            tensors += [arrays] if field.role == "tensor" else []
        offsets[f"offsets/{field.name}"] = np.cumsum([0, *lengths], dtype=np.int64)
    members |= offsets
    hashes = np.zeros(len(rows), np.int64)
    if tensors:
        hashes[:] = [sample_hash(row) for row in zip(*tensors, strict=True)]
    members["sample_hash"] = hashes
    written = write_tdz(path, members)
    spans = tuple(
        (
            written.offsets[f"values/{field.name}"],
            len(members[f"values/{field.name}"]),
            written.offsets[f"offsets/{field.name}"],
        )
        for field in rows.fields
    )
    return ShardEntry(key, written.size_bytes, written.xxh3_128, len(rows), written.offsets["sample_hash"], spans)


def _column_of(parts: list[Array], field: FieldSpec) -> Array | Parts:
    """All rows' values: as they lie, where putting them together would cost more than a write of each."""
    if sum(part.nbytes for part in parts) >= _STREAMED_BYTES * len(parts) > 0:
        return Parts(parts)
    return np.concatenate([np.zeros((0, *field.shape), field.numpy_dtype), *parts])


def _joined(field: FieldSpec, column: Sequence[Any]) -> tuple[Array, list[int]]:
    """All rows' strings as UTF-8 bytes, end to end, and the length of each."""
    for value in column:
        if value is not None and not isinstance(value, str):
            raise TypeError(f"field {field.name} got {type(value).__name__}, wanted str")
    nothing = NULL_TEXT if field.nullable else b""
    encoded = [nothing if value is None else value.encode("utf-8", "surrogateescape") for value in column]
    return np.frombuffer(b"".join(encoded), np.uint8), [len(data) for data in encoded]


def _as_arrays(field: FieldSpec, column: Sequence[Any]) -> list[Array]:
    """A column as arrays [n, *shape], empty ones where there is no value."""
    dtype, shape = field.numpy_dtype, field.shape
    nothing = np.zeros((0, *shape), dtype)
    arrays = []
    for value in column:
        array = nothing if value is None else np.ascontiguousarray(value)
        if array.ndim == 0:
            array = array.reshape(1)
        if array.dtype != dtype or array.shape[1:] != shape:
            wanted = f"{dtype} [n, {', '.join(map(str, shape))}]"
            raise TypeError(f"field {field.name} got {array.dtype} {list(array.shape)}, wanted {wanted}")
        arrays.append(array)
    return arrays


class Shard:
    """A shard opened for reading: one read-only mapping; what it returns are read-only views of it."""

    def __init__(self, path: AnyFile, entry: ShardEntry, fields: Sequence[FieldSpec]) -> None:
        """Maps the file and checks its size and both ends, not its content.

        Raises CacheCorruptError where it is not the one of the entry, CacheReplacedError where its folder is gone.
        """
        self.path = path if isinstance(path, Path) else path.path
        self.entry = entry
        self.fields = tuple(fields)
        self._mapping = mapping = _map(path, entry)
        try:
            # numpy would take -1 elements for all that are there.
            if (smallest := min(entry.rows, entry.hash_offset, *itertools.chain(*entry.spans))) < 0:
                raise ValueError(f"it holds {smallest}, wanted 0 or more")
            self._columns = [_column(mapping, entry, f, span) for f, span in zip(fields, entry.spans, strict=True)]
            self.hashes: Array = np.frombuffer(mapping, np.int64, entry.rows, entry.hash_offset)
        except (ValueError, TypeError, OverflowError) as err:  # its checksum is right, so somebody wrote it like this
            raise _refused(f"{path}: its entry in the shard table leads out of the file: {err}") from err
        self.tensors: TensorColumns = tuple(
            (f.name, *c) for f, c in zip(fields, self._columns, strict=True) if f.role == "tensor"
        )
        self._tensor_spans = [span for field, span in zip(fields, entry.spans, strict=True) if field.role == "tensor"]
        self._checked: set[str] = set()

    def row(self, index: int) -> dict[str, Array]:
        """Returns the tensor fields of one row: read-only views [n, *shape] of the mapping."""
        return row_of(self.tensors, index)

    def will_need(self, index: int) -> None:
        """Asks the kernel to read the pages of one row's tensor fields, without waiting for them."""
        for (_, values, offsets), span in zip(self.tensors, self._tensor_spans, strict=True):
            row_bytes = values.itemsize * math.prod(values.shape[1:])
            first, last = (span[0] + offset * row_bytes for offset in (offsets[index], offsets[index + 1]))
            start = first - first % mmap.PAGESIZE
            if not 0 <= first < last <= len(self._mapping):  # nothing, or a damaged offset that `check_row` will find
                continue
            self._mapping.madvise(mmap.MADV_WILLNEED, start, last - start)

    def drop_pages(self) -> None:
        """Takes the pages of the file out of this process's memory; what is read again is mapped again."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def check_row(self, index: int, values: Sequence[Array]) -> None:
        """Raises CacheCorruptError where the bytes of a row's tensor fields, in their order, are not those hashed."""
        computed = sample_hash(values)
        stored = int(self.hashes[index])
        if computed != stored:
            raise _refused(
                f"{self.path} row {index} (bytes from {self._first_byte(index)}): stored xxh3-64 "
                f"{stored & (2**64 - 1):016x}, computed {computed & (2**64 - 1):016x}; "
                "run: forebay preprocess CONFIG --verify, it makes this shard again"
            )

    def column(self, name: str) -> tuple[Array, Array]:
        """Returns a field's values [total, *shape] and offsets int64 [rows + 1], after checking their CRC-32."""
        values, view = self._columns[self._index(name)]
        offsets = np.asarray(view, np.int64)
        checksums = self._checksums
        for member, data in ((f"values/{name}.memmap", values), (f"offsets/{name}.memmap", offsets)):
            stored, computed = checksums.get(member), crc32(data.data)
            if stored != computed:
                del self._checksums  # perhaps it is these that are damaged, and are mended
                shown = "none" if stored is None else f"{stored:08x}"
                raise _refused(
                    f"{self.path} {member}: stored CRC-32 {shown}, computed {computed:08x}; "
                    "run: forebay preprocess CONFIG --verify"
                )
        return values, offsets

    def strings(self, name: str) -> list[str]:
        """Returns a string field, one entry a row."""
        values, offsets = self.column(name)
        data = values.tobytes()
        return [data[a:b].decode("utf-8", "surrogateescape") for a, b in itertools.pairwise(offsets.tolist())]

    def string(self, name: str, index: int) -> str:
        """Returns a string field of one row; the column is checked, as in `column`, when it is first asked for."""
        if name not in self._checked:
            self.column(name)
            self._checked.add(name)
        values, offsets = self._columns[self._index(name)]
        return values[offsets[index] : offsets[index + 1]].tobytes().decode("utf-8", "surrogateescape")

    def lengths(self, name: str) -> Array:
        """Returns how many values each row has in a field, int64 [rows]."""
        return np.diff(np.asarray(self._columns[self._index(name)][1], np.int64))

    @cached_property
    def _checksums(self) -> dict[str, int]:
        try:  # of the mapping and not of the path, where a rebuilt cache may stand by now
            return stored_checksums(self._mapping)
        except ValueError as err:
            raise _refused(f"{self.path}: {err}; run: forebay preprocess CONFIG --verify") from err

    def _index(self, name: str) -> int:
        return [field.name for field in self.fields].index(name)

    def _first_byte(self, index: int) -> int:
        """Where in the file a row's first tensor begins; where its hash stands, for a group without tensors."""
        if not self.tensors:
            return self.entry.hash_offset + 8 * index
        name, values, offsets = self.tensors[0]
        row_bytes = values.itemsize * math.prod(values.shape[1:])
        return self.entry.spans[self._index(name)][0] + offsets[index] * int(row_bytes)


def row_of(columns: TensorColumns, index: int) -> dict[str, Array]:
    """Returns one row of these columns by field name: read-only views [n, *shape]."""
    end = index + 1
    return {name: values[offsets[index] : offsets[end]] for name, values, offsets in columns}


def rows_of(shards: Sequence[TensorColumns], rows: Sequence[int]) -> dict[str, list[Array]]:
    """Returns of each field the arrays of these rows. shards: of each row, the columns of its shard."""
    found: dict[str, list[Array]] = {}
    for field, (name, *_) in enumerate(shards[0]):
        arrays = found[name] = []
        for columns, row in zip(shards, rows, strict=True):
            _, values, offsets = columns[field]
            arrays.append(values[offsets[row] : offsets[row + 1]])
    return found


def _map(path: AnyFile, entry: ShardEntry) -> mmap.mmap:
    try:
        with path.open() if isinstance(path, HeldFile) else open(path, "rb", opener=open_own) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size_bytes:
                raise _refused(
                    f"{path} has {size} bytes, its cache says {entry.size_bytes}; run: forebay preprocess CONFIG"
                )
            mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except ForebayError:  # some of these are an OSError or a ValueError too
        raise
    except FileNotFoundError as err:
        raise _refused(f"{path} is missing from its cache; run: forebay preprocess CONFIG") from err
    except (OSError, ValueError) as err:  # ValueError: an empty file that its entry calls empty
        if isinstance(err, OSError) and is_gone(err) and isinstance(path, HeldFile):
            path.folder.raise_gone(path.place, err)
        if isinstance(err, OSError) and err.errno in OUT_OF_HANDLES:  # says nothing about the file
            raise CacheError(
                f"{path} cannot be mapped: {err.strerror}; lower loader.max_open_shards or raise `ulimit -n`",
                code="FB422",
            ) from err
        raise CacheCorruptError(f"{path} cannot be opened: {getattr(err, 'strerror', None) or err}") from err
    if mapping[:4] != LOCAL_SIGNATURE or mapping[-END_SIZE : 4 - END_SIZE] != END_SIGNATURE:
        raise _refused(f"{path} does not begin and end like a .tdz; run: forebay preprocess CONFIG")
    return mapping


def _column(mapping: mmap.mmap, entry: ShardEntry, field: FieldSpec, span: Span) -> tuple[Array, memoryview]:
    values_offset, count, offsets_offset = span
    elements = count * math.prod(field.shape)
    values = np.frombuffer(mapping, field.numpy_dtype, elements, values_offset).reshape(-1, *field.shape)
    # A memoryview gives Python ints at half the cost of numpy scalars, and this is read twice a field and sample.
    offsets = memoryview(mapping)[offsets_offset : offsets_offset + 8 * (entry.rows + 1)].cast("q")
    return values, offsets


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
    return {**asdict(entry), "spans": [list(span) for span in entry.spans]}


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


def _refused(what: str) -> CacheCorruptError:
    return CacheCorruptError(what, code="FB411")
