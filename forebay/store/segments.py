"""One file of values by digest: written once, never changed, mapped, and checked piece by piece where it is touched.

The form, little-endian: a body, the xxh3-64 of every 64 KiB of the body, and at the end a trailer, which says how many
values there are and what they belong to. The body is five columns. `high` and `low` are the halves of the digests, in
ascending order, `rows` says where each digest's value stands, `offsets` where the values lie, and `values` are the
bytes, in the order in which they came: texts that were kept together are read together.

A segment that is damaged costs the work that it saved, and nothing else. What lies in a damaged piece is not found.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from forebay.store.files import write_all, write_aside
from forebay.store.held import open_own
from forebay.store.layout import Array, Ints

MAGIC = b"forebayT"
VERSION = 1
PIECE_BYTES = 1 << 16
_BLOCK_BYTES = 64 * PIECE_BYTES
_TRAILER = struct.Struct("<8sIIQQ32sQ")
"""Magic, version, bytes a piece, number of values, their bytes, what they belong to, the checksum of the sums."""
TRAILER_BYTES = _TRAILER.size + 8
"""The trailer, and its own checksum."""
_A_ROW = 8 + 8 + 8 + 4
_MOST_ROWS = 1 << 32

_UNKNOWN, _SOUND, _DAMAGED = 0, 1, 2


class DamagedSegmentError(ValueError):
    """A file is not the segment that was written. It never leaves the store: such a file is passed over."""


class OtherSegmentError(ValueError):
    """A file is a segment of another version or of other values: it is passed over, and left as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a trailer says of its file. owner: 32 bytes, what the values belong to."""

    count: int
    value_bytes: int
    owner: bytes
    sums: int

    @property
    def body_bytes(self) -> int:
        """The size of the five columns."""
        return self.count * _A_ROW + 8 + self.value_bytes

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.body_bytes + 8 * -(-self.body_bytes // PIECE_BYTES) + TRAILER_BYTES

    def packed(self) -> bytes:
        """Returns the trailer."""
        data = _TRAILER.pack(MAGIC, VERSION, PIECE_BYTES, self.count, self.value_bytes, self.owner, self.sums)
        return data + _sum(data).to_bytes(8, "little")

    @classmethod
    def of(cls, trailer: bytes, size_bytes: int) -> Head:
        """Returns what a trailer says. Raises DamagedSegmentError, OtherSegmentError."""
        if len(trailer) != TRAILER_BYTES or trailer[:8] != MAGIC:
            raise DamagedSegmentError(f"its {size_bytes} bytes do not end as a segment does")
        if _sum(trailer[:-8]) != int.from_bytes(trailer[-8:], "little"):
            raise DamagedSegmentError("the checksum of its trailer is wrong")
        _, version, piece_bytes, count, value_bytes, owner, sums = _TRAILER.unpack(trailer[:-8])
        if (version, piece_bytes) != (VERSION, PIECE_BYTES):
            raise OtherSegmentError(f"its version is {version}, this forebay reads {VERSION}")
        head = cls(count=count, value_bytes=value_bytes, owner=owner, sums=sums)
        if head.count >= _MOST_ROWS or head.size_bytes != size_bytes:
            raise DamagedSegmentError(f"it has {size_bytes} bytes, its trailer says {head.size_bytes}")
        return head


class Segment:
    """A segment, mapped. Threads and forked children may share it."""

    def __init__(self, path: Path, owner: bytes) -> None:
        """Maps a file. Raises DamagedSegmentError, OtherSegmentError, and OSError where it cannot be opened."""
        self.path = path
        with open(path, "rb", buffering=0, opener=open_own) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size < TRAILER_BYTES:
                raise DamagedSegmentError(f"it has {status.st_size} bytes")
            self._map = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
        self.size_bytes, self.is_mine = status.st_size, os.geteuid() in (0, status.st_uid)
        self.head = Head.of(self._map[-TRAILER_BYTES:], status.st_size)
        if self.head.owner != owner:
            raise OtherSegmentError("its values belong to another folder")
        self._sums = self._checked_sums()
        self._states = np.zeros(len(self._sums), np.uint8)
        self.is_damaged = False
        """Whether a piece that was touched so far is not the one that was written."""
        self._lay_out()

    def _checked_sums(self) -> Array:
        data = self._map[self.head.body_bytes : -TRAILER_BYTES]
        if _sum(data) != self.head.sums:
            raise DamagedSegmentError("the checksum of its checksums is wrong")
        return np.frombuffer(data, "<u8")

    def _lay_out(self) -> None:
        count = self.head.count
        self._low_at, self._offsets_at = 8 * count, 16 * count
        self._rows_at = self._offsets_at + 8 * (count + 1)
        self._values_at = self._rows_at + 4 * count
        self._high = np.frombuffer(self._map, "<u8", count, 0)
        self._low = np.frombuffer(self._map, "<u8", count, self._low_at)
        self._offsets = np.frombuffer(self._map, "<i8", count + 1, self._offsets_at)
        self._rows = np.frombuffer(self._map, "<u4", count, self._rows_at)

    def find(self, digests: Array, wanted: Ints, found: list[bytes | None]) -> Ints:
        """Fills `found` where this segment has the value of a digest; returns the part of `wanted` that it has not.

        digests: uint64 [n, 2]. wanted: indices of digests, which are indices of `found`.
        """
        places = self._places(digests[wanted])
        if places is None:
            return wanted
        has = places >= 0
        starts, stops, is_sound = self._spans(places[has])
        has[has] = is_sound
        values = self._map
        hits = zip(wanted[has].tolist(), starts[is_sound].tolist(), stops[is_sound].tolist(), strict=True)
        for index, start, stop in hits:
            found[index] = values[start:stop]
        return wanted[~has]

    def _places(self, digests: Array) -> Ints | None:
        """Returns where digests stand among the sorted ones, int64 [n], -1 where they do not; None where none does."""
        high, low, last = digests[:, 0], digests[:, 1], self.head.count - 1
        if last < 0:
            return None
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

    def _spans(self, places: Ints) -> tuple[Ints, Ints, Array]:
        """Returns where the values of digests begin and end in the file, and which of these can be believed."""
        is_sound = self._are_sound(8 * places, 8)
        for start, width in ((self._low_at, 8), (self._rows_at, 4)):
            is_sound &= self._are_sound(start + width * places, width)
        rows = np.where(is_sound, self._rows[places], 0).astype(np.int64)
        is_sound &= rows < self.head.count
        rows[~is_sound] = 0
        is_sound &= self._are_sound(self._offsets_at + 8 * rows, 16)
        starts, stops = self._offsets[rows], self._offsets[rows + 1]
        is_sound &= (starts >= 0) & (starts <= stops) & (stops <= self.head.value_bytes)
        starts, lengths = np.where(is_sound, starts, 0), np.where(is_sound, stops - starts, 0)
        starts = self._values_at + starts
        is_sound &= self._are_sound(starts, lengths)
        return starts, starts + lengths, is_sound

    def _are_sound(self, starts: Ints, lengths: Ints | int) -> Array:
        """Returns whether spans of the body are as they were written, bool [n]; pieces are checked at their first use.

        starts, lengths: in bytes.
        """
        newest = len(self._states) - 1
        first = np.minimum(starts // PIECE_BYTES, newest)
        last = np.clip((starts + lengths - 1) // PIECE_BYTES, first, newest)  # of an empty value nothing is read
        for piece in self._unknown(first, last):
            self._states[piece] = _SOUND if self._is_sound(piece) else _DAMAGED
            self.is_damaged |= bool(self._states[piece] == _DAMAGED)
        if not self.is_damaged:
            return np.ones(len(starts), bool)
        before = np.concatenate([[0], np.cumsum(self._states == _DAMAGED)])
        return np.asarray(before[last + 1] == before[first])

    def _unknown(self, first: Ints, last: Ints) -> list[int]:
        """Returns the pieces of spans that nobody has looked at yet."""
        touched = np.concatenate([first, last])
        if (last - first > 1).any():
            steps = np.zeros(len(self._states) + 1, np.int64)
            np.add.at(steps, first, 1)
            np.add.at(steps, last + 1, -1)
            touched = np.flatnonzero(np.cumsum(steps[:-1]))
        unknown: list[int] = np.unique(touched[self._states[touched] == _UNKNOWN]).tolist()
        return unknown

    def _is_sound(self, piece: int) -> bool:
        stop = min((piece + 1) * PIECE_BYTES, self.head.body_bytes)
        return _sum(memoryview(self._map)[piece * PIECE_BYTES : stop]) == int(self._sums[piece])

    def rows(self) -> tuple[Array, Ints, Ints]:
        """Returns digests, uint64 [n, 2], and where the values begin and end in the file, in the order of the values.

        Only of those that can be believed: everything is checked.
        """
        places = np.arange(self.head.count)
        starts, stops, is_sound = self._spans(places)
        order = np.argsort(starts[is_sound], kind="stable")
        digests = np.stack([self._high, self._low], axis=1)[is_sound][order]
        return digests, starts[is_sound][order], stops[is_sound][order]

    def runs(self, starts: Ints, stops: Ints) -> Iterator[memoryview]:
        """Yields the bytes of values, those that lie one behind the other together."""
        if len(starts):
            bounds = np.flatnonzero(starts[1:] != stops[:-1])
            begins = starts[np.concatenate([[0], bounds + 1])]
            ends = stops[np.concatenate([bounds, [len(stops) - 1]])]
            view = memoryview(self._map)
            for start, stop in zip(begins.tolist(), ends.tolist(), strict=True):
                yield from (view[at : min(at + _BLOCK_BYTES, stop)] for at in range(start, stop, _BLOCK_BYTES))


def write_segment(path: Path, owner: bytes, digests: Array, lengths: Ints, values: Iterable[bytes | memoryview]) -> int:
    """Makes `path` a segment, or leaves nothing there; returns its size in bytes.

    digests: uint64 [n, 2], each once. lengths: of their values, in bytes. values: these in the same order, in blocks of
    any size. Raises OSError.
    """
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    with write_aside(path) as file:
        body = _Body(file)
        for column in (digests[order, 0].astype("<u8"), digests[order, 1].astype("<u8"), offsets.astype("<i8")):
            body.add(column.tobytes())
        body.add(order.astype("<u4").tobytes())
        for block in values:
            body.add(block)
        sums = body.sums()
        head = Head(count=len(digests), value_bytes=int(offsets[-1]), owner=owner, sums=_sum(sums))
        if head.body_bytes != body.size_bytes:
            raise ValueError(f"{body.size_bytes} bytes were given for {head.body_bytes}")
        write_all(file, sums + head.packed())
    return head.size_bytes


def merge_segments(path: Path, owner: bytes, segments: Sequence[Segment]) -> int:
    """Makes `path` a segment of all that can be believed of some others, each digest once; returns how many it has.

    Nothing is written where there is none. Raises OSError.
    """
    parts = [segment.rows() for segment in segments]
    digests = np.concatenate([part[0] for part in parts])
    source = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    # The sort is stable: of a digest that several have, the first one counts.
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (digests[order][1:] != digests[order][:-1]).any(axis=1)
    kept = np.zeros(len(order), bool)
    kept[order[is_first]] = True
    chosen = [kept[source == number] for number in range(len(parts))]
    spans = [(starts[c], stops[c]) for (_, starts, stops), c in zip(parts, chosen, strict=True)]
    lengths = np.concatenate([stops - starts for starts, stops in spans])
    if len(lengths):
        blocks = (run for segment, span in zip(segments, spans, strict=True) for run in segment.runs(*span))
        write_segment(path, owner, digests[kept], lengths, blocks)
    return len(lengths)


class _Body:
    """Writes the body of a segment in large blocks, and sums its pieces meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._held = file, bytearray()
        self._sums: list[int] = []
        self.size_bytes = 0

    def add(self, data: bytes | memoryview) -> None:
        """Writes bytes behind those of before."""
        self._held += data
        self.size_bytes += len(data)
        while len(self._held) >= _BLOCK_BYTES:
            self._put(_BLOCK_BYTES)

    def sums(self) -> bytes:
        """Writes what is left; returns the sums of all pieces."""
        self._put(len(self._held))
        return np.array(self._sums, "<u8").tobytes()

    def _put(self, size: int) -> None:
        block = bytes(self._held[:size])
        del self._held[:size]
        self._sums += [_sum(block[start : start + PIECE_BYTES]) for start in range(0, size, PIECE_BYTES)]
        write_all(self._file, block)


def _sum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)
