"""The arrays of a cold form: names, shapes, and their objects: chunks along the first axis. Nothing here needs zarr.

The root's `zarr.json` is written last: with it the cold form is whole. What was begun is known by the group `files`.

An object has chunks, each compressed by zstd with a checksum, and an index of them, as the zarr v3 codec
`sharding_indexed` lays it out: at the end offset and size of each chunk as little-endian uint64, 2^64 - 1 for a chunk
that is not there, then the CRC-32C of these numbers. zarr writes the same bytes; encoded here, an object costs what
zstd costs, and half of what it costs through zarr's event loop.

The bytes of `.tdz` shards lie in the arrays, all shards of a group one after the other. An array of a group is a strip:
each shard's part of it is one member of that shard's file. `frame` is what is left of the files: headers, the member
meta.json, the directory. So a shard is made again of its strips alone, whatever wrote it, and no byte of it is a matter
of the writer's version.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import CacheCorruptError, CacheMismatchError, MissingExtraError
from forebay.extras import install_line
from forebay.store.held import open_own
from forebay.store.key import SHORT
from forebay.store.layout import Array, FieldSpec, Group, Ints
from forebay.store.shard import shard_name

CHUNK_BYTES = 256 * 1024
"""Values that are compressed together: reading one sample decompresses so much, or twice that."""
SHARD_BYTES = 32 * 1024 * 1024
"""Values that are one object (zarr calls it a shard): what a thread holds at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdArray:
    """One array. chunk_rows: rows that are compressed together. chunks: so many of these are one object, at most.

    dimensions: their names; xarray wants one length for one name.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dimensions: tuple[str, ...]
    chunk_rows: int
    chunks: int
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def shard_rows(self) -> int:
        """Rows of one object; the last has fewer."""
        return self.chunk_rows * self.chunks

    @property
    def num_shards(self) -> int:
        """Objects of the array. What has no bytes has none."""
        return -(-self.shape[0] // self.shard_rows) if self.row_bytes else 0

    def rows(self, index: int) -> tuple[int, int]:
        """Returns the first row of an object and the row after its last."""
        start = index * self.shard_rows
        return start, min(start + self.shard_rows, self.shape[0])

    def name(self, index: int) -> str:
        """Returns the name of an object below the root."""
        return f"{self.path}/c/{index}" + "/0" * (len(self.shape) - 1)


def cold_array(
    path: str, dtype: np.dtype[Any] | str, shape: tuple[int, ...], dimensions: tuple[str, ...], **attributes: Any
) -> ColdArray:
    """Returns an array of these rows, cut into chunks of CHUNK_BYTES and objects of SHARD_BYTES."""
    dtype = np.dtype(dtype).newbyteorder("<")
    row_bytes = max(1, dtype.itemsize * math.prod(shape[1:]))
    chunk_rows = max(1, min(CHUNK_BYTES // row_bytes, shape[0]))
    chunks = max(1, min(SHARD_BYTES // (chunk_rows * row_bytes), -(-shape[0] // chunk_rows)))
    return ColdArray(
        path=path,
        dtype=dtype,
        shape=shape,
        dimensions=dimensions,
        chunk_rows=chunk_rows,
        chunks=chunks,
        attributes=attributes,
    )


ROOT = "zarr.json"
BEGUN = "files/zarr.json"
FORM_VERSION = 1
"""The newest form that is written and read."""
_ABOUT = "forebay"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The parts of a cold form, and how they lie: two of equal marks have the same names with the same values.

    metadata: xxh3-128 of metadata.json. level: of zstd. chunk_bytes, shard_bytes: values compressed, and one object.
    """

    key: str
    metadata: str
    level: int
    chunk_bytes: int
    shard_bytes: int
    form_version: int = FORM_VERSION

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes of a group that is marked."""
        return {_ABOUT: asdict(self)}

    def __str__(self) -> str:
        return f"the zarr form of the cache of key {self.key[:SHORT]}"


def pull_hint(data: bytes, where: object) -> str | None:
    """Returns what to do with a cold form that was named as a cache; None where a root's document is of none."""
    mark = mark_of(data, where)
    return (
        None if mark is None else f"{where} is {mark}, nothing reads samples of it; run: forebay cache pull {where} DIR"
    )


def mark_of(data: bytes, where: object) -> Mark | None:
    """Returns the mark of a `zarr.json`, None where it is of no cold form; CacheMismatchError for a newer one."""
    try:
        about = json.loads(data)["attributes"][_ABOUT]
        version = int(about["form_version"])
        if version <= FORM_VERSION:
            numbers = {name: int(about[name]) for name in ("level", "chunk_bytes", "shard_bytes", "form_version")}
            return Mark(key=str(about["key"]), metadata=str(about["metadata"]), **numbers)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    raise CacheMismatchError(
        f"{where}: form_version is {version}, this forebay reads up to {FORM_VERSION}; upgrade forebay", code="FB406"
    )


_ABSENT = np.iinfo(np.uint64).max
_SUM_BYTES = 4


class DamagedError(ValueError):
    """An object is not what was written; the text says where."""


def zarr() -> Any:
    """Returns the module, which is an extra. Raises MissingExtraError."""
    try:
        import google_crc32c  # noqa: F401  # comes with zarr
        import numcodecs  # noqa: F401
        import zarr
    except ImportError as err:
        raise MissingExtraError(
            f"the zarr form of a cache needs zarr, which is not installed; run: {install_line('zarr')}"
        ) from err
    return zarr


def encode(array: ColdArray, rows: Array, *, level: int) -> bytes:
    """Returns the object of these rows, all that it is to hold."""
    import google_crc32c
    from numcodecs import Zstd

    zstd = Zstd(level=level, checksum=True)
    index = np.full((array.chunks, 2), _ABSENT, "<u8")
    parts: list[bytes] = []
    position = 0
    for number, start in enumerate(range(0, len(rows), array.chunk_rows)):
        part = zstd.encode(_whole_chunk(array, rows[start : start + array.chunk_rows]))
        index[number] = position, len(part)
        position += len(part)
        parts.append(part)
    table = index.tobytes()
    return b"".join([*parts, table, google_crc32c.value(table).to_bytes(_SUM_BYTES, "little")])


def _whole_chunk(array: ColdArray, rows: Array) -> Array:
    """The rows of a chunk: in zarr all chunks of an array have one size, whatever the array has."""
    if len(rows) < array.chunk_rows:
        padded = np.zeros((array.chunk_rows, *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        rows = padded
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def decode(array: ColdArray, data: bytes, index: int, *, start: int, stop: int) -> Array:
    """Returns the rows from `start` to `stop` of the array, which lie in this object of it. Raises DamagedError."""
    first = array.rows(index)[0]
    chunks = _index(array, data)
    parts = []
    for number in range((start - first) // array.chunk_rows, -(-(stop - first) // array.chunk_rows)):
        begin = first + number * array.chunk_rows
        rows = _chunk(array, data, chunks, number)
        parts.append(rows[max(start - begin, 0) : stop - begin])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _index(array: ColdArray, data: bytes) -> Array:
    import google_crc32c

    size = 16 * array.chunks
    table = data[-size - _SUM_BYTES : -_SUM_BYTES]
    if len(table) != size:
        raise DamagedError(f"it has {len(data)} bytes, and its index alone has {size + _SUM_BYTES}")
    stored, computed = int.from_bytes(data[-_SUM_BYTES:], "little"), google_crc32c.value(table)
    if stored != computed:
        raise DamagedError(f"index: stored CRC-32C {stored:08x}, computed {computed:08x}")
    return np.frombuffer(table, "<u8").reshape(-1, 2)


def _chunk(array: ColdArray, data: bytes, chunks: Array, number: int) -> Array:
    from numcodecs import Zstd

    offset, size = (int(value) for value in chunks[number])
    if offset + size > len(data):
        raise DamagedError(f"chunk {number} is said to end at {offset + size}, and there are {len(data)} bytes")
    out = np.zeros(array.chunk_rows * array.row_bytes, np.uint8)
    try:
        Zstd().decode(memoryview(data)[offset : offset + size], out)
    except (RuntimeError, ValueError) as err:
        raise DamagedError(f"chunk {number} (bytes {offset} to {offset + size}): {err}") from err
    return out.view(array.dtype).reshape(array.chunk_rows, *array.shape[1:])


_TEXT = "UTF-8 of all rows, end to end: row r has the bytes from offsets[r] to offsets[r + 1]"
_VALUES = "values of all rows, end to end: row r has those from offsets[r] to offsets[r + 1]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """One array, and each shard's part of it.

    starts: int64 [shards + 1], the array's rows at which the shards' parts begin. places: int64 [shards], where the
    part begins in its file; None for the frame. added: int64 [shards], what a shard's numbers are moved by, for the
    strips of offsets, each of which has one more number in its file: where the next shard begins.
    """

    array: ColdArray
    starts: Ints
    places: Ints | None
    added: Ints | None = None

    def shards(self, start: int, stop: int) -> range:
        """Returns the shards that have some of these rows."""
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        last = int(np.searchsorted(self.starts, stop, "left"))
        return range(first, min(last, len(self.starts) - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes of a file: rows of an array, of which `added` is to be taken."""

    offset: int
    size_bytes: int
    array: ColdArray
    start: int
    stop: int
    added: int = 0


class GroupStrips:
    """The strips of one field group, by what its shard table says."""

    def __init__(self, folder: Path, group: Group, fields: Sequence[FieldSpec], table: Array) -> None:
        """fields: of `shard_fields`. folder: for errors. CacheCorruptError: members do not lie beside each other."""
        self.folder, self.group, self.table = folder, group, table
        for name in ("size_bytes", "rows", "hash_offset", "spans"):
            if len(table) and (smallest := int(table[name].min(initial=0))) < 0:
                raise self._foreign(
                    int(table[name].reshape(len(table), -1).min(axis=1).argmin()), f"it holds {smallest}"
                )
        self.rows = _starts(table["rows"])
        self.values: list[Strip] = []
        self.offsets: list[Strip] = []
        for index, spec in enumerate(fields):
            self._add(spec, table["spans"][:, index])
        hashes = cold_array(f"{group}/sample_hash", "int64", (int(self.rows[-1]),), ("row",), content=_HASH)
        self.hashes = Strip(array=hashes, starts=self.rows, places=table["hash_offset"])
        self.frame = self._frame()

    @property
    def strips(self) -> list[Strip]:
        """All of them, in the order of the files, but for the frame, which is last."""
        return [*self.values, *self.offsets, self.hashes, self.frame]

    @property
    def shard_rows(self) -> tuple[ColdArray, Ints]:
        """The array that says at which row each shard begins, and its values."""
        return cold_array(f"{self.group}/shard_rows", "int64", (len(self.rows),), ("shard_edge",)), self.rows

    def pieces(self, shard: int) -> list[Piece]:
        """Returns what a shard's file is made of, in the order of its bytes."""
        members = self._members(shard)
        start = int(self.frame.starts[shard])
        pieces, position = [], 0
        for member in [*members, None]:
            end = int(self.table["size_bytes"][shard]) if member is None else member.offset
            if size := end - position:
                pieces.append(
                    Piece(offset=position, size_bytes=size, array=self.frame.array, start=start, stop=start + size)
                )
                start += size
            if member is not None:
                pieces.append(member)
                position = member.offset + member.size_bytes
        return pieces

    def read(self, strip: Strip, start: int, stop: int) -> Array:
        """Returns rows of a strip as they stand in the files of the shards."""
        array = strip.array
        buffer = np.empty((stop - start, *array.shape[1:]), array.dtype)
        view = buffer.reshape(-1).view(np.uint8).data
        for shard in strip.shards(start, stop):
            first, last = (int(value) for value in strip.starts[shard : shard + 2])
            low, high = max(first, start), min(last, stop)
            target = view[(low - start) * array.row_bytes : (high - start) * array.row_bytes]
            path = self.path(shard)
            if strip.places is None:
                _read_frame(path, self.pieces(shard), self.frame, target, low)
            else:
                _read_at(path, int(strip.places[shard]) + (low - first) * array.row_bytes, target)
            if strip.added is not None:
                buffer[low - start : high - start] += strip.added[shard]
        if strip.added is not None and start < stop == array.shape[0]:
            buffer[-1] = self.values[self.offsets.index(strip)].starts[-1]
        return buffer

    def path(self, shard: int) -> Path:
        """Returns the file of a shard."""
        return self.folder / shard_name(self.group, shard)

    def _add(self, field: FieldSpec, spans: Array) -> None:
        starts = _starts(spans[:, 1])
        name, is_text = field.name, field.dtype == "str"
        axes = (f"{name}_{'byte' if is_text else 'value'}", *(f"{name}_{axis + 1}" for axis in range(len(field.shape))))
        content = _TEXT if is_text else _VALUES
        shape = (int(starts[-1]), *field.shape)
        array = cold_array(f"{self.group}/values/{name}", field.numpy_dtype, shape, axes, content=content)
        self.values.append(Strip(array=array, starts=starts, places=spans[:, 0]))
        edges = cold_array(f"{self.group}/offsets/{name}", "int64", (int(self.rows[-1]) + 1,), ("row_edge",))
        self.offsets.append(Strip(array=edges, starts=self.rows, places=spans[:, 2], added=starts[:-1]))

    def _members(self, shard: int) -> list[Piece]:
        """The pieces of a shard that are no frame, by their place."""
        pieces = []
        for strip in (*self.values, *self.offsets, self.hashes):
            assert strip.places is not None
            start, stop = (int(value) for value in strip.starts[shard : shard + 2])
            stop += strip.added is not None
            pieces.append(
                Piece(
                    offset=int(strip.places[shard]),
                    size_bytes=(stop - start) * strip.array.row_bytes,
                    array=strip.array,
                    start=start,
                    stop=stop,
                    added=0 if strip.added is None else int(strip.added[shard]),
                )
            )
        return sorted((piece for piece in pieces if piece.size_bytes), key=lambda piece: piece.offset)

    def _frame(self) -> Strip:
        sizes = np.array(self.table["size_bytes"], np.int64)
        for strip in (*self.values, *self.offsets, self.hashes):
            sizes -= (np.diff(strip.starts) + (strip.added is not None)) * strip.array.row_bytes
        if len(sizes) and sizes.min() < 0:
            raise self._foreign(int(sizes.argmin()), "its members are larger than its file")
        starts = _starts(sizes)
        array = cold_array(f"{self.group}/frame", "uint8", (int(starts[-1]),), ("frame_byte",), content=_FRAME)
        return Strip(array=array, starts=starts, places=None)

    def check(self, shard: int) -> None:
        """Raises CacheCorruptError where the members of a shard do not lie one after the other in its file.

        Its offsets must begin at 0 and end with the number of its values, as all that forebay writes do.
        """
        position = 0
        for member in self._members(shard):
            if member.offset < position:
                raise self._foreign(shard, f"{member.array.path} begins at {member.offset}, before {position}")
            position = member.offset + member.size_bytes
        if position > self.table["size_bytes"][shard]:
            raise self._foreign(shard, f"its members end at {position}, the file at {self.table['size_bytes'][shard]}")
        rows, path = int(self.table["rows"][shard]), self.path(shard)
        with _opened(path) as file:
            for values, offsets in zip(self.values, self.offsets, strict=True):
                assert offsets.places is not None
                count = int(values.starts[shard + 1] - values.starts[shard])
                ends = np.empty(2, "<i8")
                for index, row in enumerate((0, rows)):
                    place = int(offsets.places[shard]) + 8 * row
                    _fill(path, file, place, ends[index : index + 1].view(np.uint8).data)
                if ends.tolist() != [0, count]:
                    raise self._foreign(
                        shard, f"{offsets.array.path} goes from {ends[0]} to {ends[1]}, wanted 0 to {count}"
                    )

    def _foreign(self, shard: int, what: str) -> CacheCorruptError:
        return CacheCorruptError(
            f"{self.path(shard)}: its entry in the shard table is none that forebay writes: {what}; run: forebay "
            "preprocess CONFIG --rebuild"
        )


_HASH = "xxh3-64 of a row's tensor fields, each hashed with the hash before it as its seed"
_FRAME = "what the .tdz files have beside these arrays: headers, meta.json, directories"


def _starts(counts: Array) -> Ints:
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _read_frame(path: Path, pieces: Sequence[Piece], frame: Strip, target: memoryview, start: int) -> None:
    """Fills the target with the bytes of a shard's frame from this one on, of the whole strip."""
    stop = start + len(target)
    for piece in pieces:
        if piece.array is frame.array and piece.stop > start and piece.start < stop:
            low, high = max(piece.start, start), min(piece.stop, stop)
            _read_at(path, piece.offset + low - piece.start, target[low - start : high - start])


def _opened(path: Path) -> io.FileIO:
    return open(path, "rb", buffering=0, opener=open_own)


def _read_at(path: Path, offset: int, target: memoryview) -> None:
    with _opened(path) as file:
        _fill(path, file, offset, target)


def _fill(path: Path, file: io.FileIO, offset: int, target: memoryview) -> None:
    """Fills the target from this byte of a file on."""
    position = 0
    while position < len(target):
        count = os.preadv(file.fileno(), [target[position:]], offset + position)
        if not count:
            raise CacheCorruptError(
                f"{path} ends at {offset + position}, its entry in the shard table says later; run: forebay "
                "preprocess CONFIG --verify"
            )
        position += count
