"""The archive form of tensordict (`.tdz`): a stored zip with one 64-byte aligned member an array.

Ours are always 64-byte aligned, zip64, with CRC-32 filled in and the root's meta.json last, so that a truncated file
has no root. Byte layout: APPNOTE.TXT 6.3.10 of PKWARE, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3; the padding
block (id 0x6474) and the meaning of meta.json: tensordict 0.15, `tensordict/_archive.py`.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.store.files import start_writeback, write_all, write_aside

try:
    from zlib_ng.zlib_ng import crc32 as crc32  # five times as fast: a third of the CPU of writing a shard is less
except ImportError:  # a cache is read without it
    from zlib import crc32 as crc32

ALIGNMENT = 64
LOCAL_SIGNATURE = b"PK\x03\x04"
END_SIGNATURE = b"PK\x05\x06"
END_SIZE = 22
_END64_SIGNATURE = b"PK\x06\x06"
_END64 = "<4sQ2H2I4Q"
_ENDS_SIZE = struct.calcsize(_END64) + 20 + END_SIZE  # 20: the locator between the two
_CENTRAL_SIGNATURE = b"PK\x01\x02"
_CENTRAL = "<4s6H3I5H2I"
_ZIP64_VERSION = 45
_FULL_32 = 0xFFFFFFFF
_DOS_DATE = 0x21  # 1980-01-01, the earliest date a zip knows: bytes must not depend on the clock
_PAD_ID = 0x6474
_WRITEBACK_BYTES = 16 * 1024 * 1024
"""After as much the disk is set to work, beside the hashing of what follows."""
TORCH_DTYPES = {
    "float16": "torch.float16",
    "float32": "torch.float32",
    "float64": "torch.float64",
    "int8": "torch.int8",
    "int16": "torch.int16",
    "int32": "torch.int32",
    "int64": "torch.int64",
    "uint8": "torch.uint8",
    "uint16": "torch.uint16",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """An array whose parts along axis 0 lie apart in memory: written one after the other, never put together.

    arrays: [n, *shape] of one dtype, at least one.
    """

    arrays: Sequence[np.ndarray[Any, Any]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of all parts."""
        found: np.dtype[Any] = self.arrays[0].dtype
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parts put together."""
        return (sum(map(len, self.arrays)), *self.arrays[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]


Member = tuple[str, Sequence[memoryview]]
"""Name and content, piece by piece."""


@dataclass(frozen=True, slots=True)
class Written:
    """The file written: its size and xxh3-128, and the offset of each array's first byte by member name."""

    size_bytes: int
    xxh3_128: str
    offsets: dict[str, int]


def write_tdz(path: Path, arrays: Mapping[str, np.ndarray[Any, Any] | Parts]) -> Written:
    """Writes arrays as one archive, complete or absent, and returns its digest and offsets.

    arrays: by name; `a/b` puts `b` into the nested TensorDict `a` (one level). The bytes depend on names, order,
    dtypes, shapes and values alone, not on strides, byte order or where `Parts` are divided.
    Raises TypeError for a dtype that is not in `TORCH_DTYPES`.
    """
    members = _members(arrays)
    state = xxhash.xxh3_128()
    position = 0
    offsets: dict[str, int] = {}
    directory: list[bytes] = []
    with write_aside(path) as file:

        def put(data: bytes | memoryview) -> None:
            nonlocal position
            state.update(data)
            write_all(file, data)
            if position // _WRITEBACK_BYTES != (position + len(data)) // _WRITEBACK_BYTES:
                start_writeback(file)
            position += len(data)

        for name, pieces in members:
            size, checksum = 0, 0
            for piece in pieces:
                size += len(piece)
                checksum = crc32(piece, checksum)
            directory.append(_central_record(name, size, checksum, position))
            put(_local_header(name, size, checksum, position))
            offsets[name.removesuffix(".memmap")] = position
            for piece in pieces:
                put(piece)
        put(b"".join([*directory, _end_records(len(members), position, sum(map(len, directory)))]))
    return Written(position, state.hexdigest(), offsets)


def _members(arrays: Mapping[str, np.ndarray[Any, Any] | Parts]) -> list[Member]:
    """Arrays and the meta.json of each level, the innermost first and the root's last."""
    metas: dict[str, dict[str, Any]] = {"": {}}
    members: dict[str, list[Member]] = {"": []}
    for name, array in arrays.items():
        if array.dtype.name not in TORCH_DTYPES:
            raise TypeError(f"array {name} has dtype {array.dtype}, wanted one of {', '.join(TORCH_DTYPES)}")
        folder, _, leaf = name.rpartition("/")
        metas.setdefault(folder, {})[leaf] = {
            "device": "cpu",
            "shape": list(array.shape),
            "dtype": TORCH_DTYPES[array.dtype.name],
            "is_nested": False,
        }
        parts = array.arrays if isinstance(array, Parts) else [array]
        members.setdefault(folder, []).append((f"{name}.memmap", [_bytes(part) for part in parts]))
    result: list[Member] = []
    for folder in sorted(members, key=lambda name: name == ""):
        if folder:
            metas[""][folder] = {"type": "TensorDict"}
        document = {
            **metas[folder],
            "shape": [],
            "device": "cpu",
            "_type": "<class 'tensordict._td.TensorDict'>",
            "_format_version": 1,
            "_class": "tensordict:TensorDict",
        }
        meta = json.dumps(document).encode("ascii")
        result += [*members[folder], (f"{folder}/meta.json" if folder else "meta.json", [memoryview(meta)])]
    return result


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def stored_checksums(archive: mmap.mmap | bytes) -> dict[str, int]:
    """Returns the CRC-32 of every member by its name, from the directory of an archive that `write_tdz` wrote.

    Raises ValueError where there is no such directory.
    """
    checksums: dict[str, int] = {}
    try:
        signature, *_, count, _, position = struct.unpack_from(_END64, archive, len(archive) - _ENDS_SIZE)
        if signature != _END64_SIGNATURE:
            raise ValueError(f"end record begins with {signature!r}, wanted {_END64_SIGNATURE!r}")
        for _ in range(count):
            record = struct.unpack_from(_CENTRAL, archive, position)
            if record[0] != _CENTRAL_SIGNATURE:
                raise ValueError(f"entry at {position} begins with {record[0]!r}, wanted {_CENTRAL_SIGNATURE!r}")
            name = position + struct.calcsize(_CENTRAL)
            checksums[archive[name : name + record[10]].decode("ascii")] = record[7]
            position = name + record[10] + record[11]
    except (struct.error, OverflowError) as err:
        raise ValueError(f"directory ends early: {err}") from err
    return checksums


def _local_header(name: str, size: int, checksum: int, position: int) -> bytes:
    encoded = name.encode("ascii")
    zip64 = struct.pack("<HHQQ", 1, 16, size, size)
    start = position + 30 + len(encoded) + len(zip64) + 4
    pad = -start % ALIGNMENT
    extra = zip64 + struct.pack("<HH", _PAD_ID, pad) + bytes(pad)
    fixed = struct.pack(
        "<4s5H3I2H",
        LOCAL_SIGNATURE,
        _ZIP64_VERSION,
        0,
        0,
        0,
        _DOS_DATE,
        checksum,
        _FULL_32,
        _FULL_32,
        len(encoded),
        len(extra),
    )
    return fixed + encoded + extra


def _central_record(name: str, size: int, checksum: int, position: int) -> bytes:
    encoded = name.encode("ascii")
    extra = struct.pack("<HHQQQ", 1, 24, size, size, position)
    sizes = (checksum, _FULL_32, _FULL_32, len(encoded), len(extra), 0, 0, 0, 0o100644 << 16, _FULL_32)
    made_by = (3 << 8) | _ZIP64_VERSION  # 3: Unix, so that the mode bits are read as such
    fixed = struct.pack(_CENTRAL, _CENTRAL_SIGNATURE, made_by, _ZIP64_VERSION, 0, 0, 0, _DOS_DATE, *sizes)
    return fixed + encoded + extra


def _end_records(count: int, position: int, directory_size: int) -> bytes:
    end64 = struct.pack(
        _END64,
        _END64_SIGNATURE,
        44,
        (3 << 8) | _ZIP64_VERSION,
        _ZIP64_VERSION,
        0,
        0,
        count,
        count,
        directory_size,
        position,
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, position + directory_size, 1)
    end = struct.pack("<4s4H2IH", END_SIGNATURE, 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), _FULL_32, _FULL_32, 0)
    return end64 + locator + end
