"""Floats of a processor to codes: the inverse of a table, fast, and each value compared with what its code stands for.

A search in a sorted table costs more than the processor itself (50 ns a value). But the values of a channel lie evenly,
or nearly so: a product, a sum and a cast give the place, or a cell of a small array that holds it. What was computed so
is looked up in the table and compared bit for bit, so that no arithmetic is trusted. For eyes, and for checks against
eight-bit images, codes are shown as levels from 0 to 255.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.steps.form import FieldForm, Table
from forebay.store.layout import Array

_PIECE = 1 << 15
"""Values at a time: they, their codes and what these stand for stay in the cache."""
_MAX_CELLS = 1 << 16
_MAX_PAIRED = 4
"""Channels whose values are looked up two at a time: what two codes stand for takes 512 KiB a channel."""
_MAX_LINE = 1e30
"""Scales and shifts above it leave float32 on the way."""
Floats = npt.NDArray[np.float32]


class NotInTable(ValueError):  # noqa: N818  it says what is so
    """An array holds a value that its table has not. value, channel: the first such value, and where it stands."""

    def __init__(self, value: float, *, channel: int) -> None:
        super().__init__(f"the value {value!r} of channel {channel} is not in the table")
        self.value, self.channel = value, channel


class Encoder:
    """Makes codes of floats by a table; uint8 up to 256 values a channel, else uint16. Threads may share one."""

    def __init__(self, table: Table) -> None:
        """Takes a table whose values differ in each channel, bit for bit, but for repetitions of the last one."""
        self._axis, self._inner = table.axis, table.inner
        self.dtype: np.dtype[Any] = np.dtype("uint8" if table.values.shape[1] <= 256 else "uint16")
        self._channels = [_Channel.of(values, self.dtype) for values in np.ascontiguousarray(table.values)]
        if len(self._channels) <= _MAX_PAIRED:
            self._channels = [channel.paired(self.dtype) for channel in self._channels]

    def codes(self, array: Floats) -> Array:
        """Returns the codes of an array, contiguous. Raises NotInTable."""
        values = np.ascontiguousarray(array)
        codes = np.empty(values.shape, self.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            for index, (part, out) in self._pieces(values, codes):
                if not self._channels[index].encode(part, out, scratch=_SCRATCH):
                    raise NotInTable(float(self._channels[index].missing(part, out)[0]), channel=index)
        return codes

    def missing(self, array: Floats) -> list[Floats]:
        """Returns for each channel the values of an array that the table does not have, each once."""
        values = np.ascontiguousarray(array)
        found: list[list[Floats]] = [[] for _ in self._channels]
        with np.errstate(invalid="ignore", over="ignore"):
            for index, (part, out) in self._pieces(values, np.empty(values.shape, self.dtype)):
                if not self._channels[index].encode(part, out, scratch=_SCRATCH):
                    found[index].append(self._channels[index].missing(part, out))
        return [different(np.concatenate([*rest, np.empty(0, np.float32)])) for rest in found]

    def _pieces(self, values: Floats, codes: Array) -> Iterator[tuple[int, tuple[Floats, Array]]]:
        """Yields pieces of one channel with the place for their codes, both of one rank and shape."""
        channels = len(self._channels)
        shape = (1, 1, values.size)
        if channels > 1:
            shape = blocks(values.shape, self._axis, channels=channels, inner=self._inner)
        values, codes = values.reshape(shape), codes.reshape(shape)
        rows, _, block = shape
        height, width = max(1, _PIECE // max(block, 1)), min(block, _PIECE)
        for channel in range(channels):
            for top in range(0, rows, height):
                for left in range(0, block, max(width, 1)):
                    place = (slice(top, top + height), channel, slice(left, left + width))
                    yield channel, (values[place], codes[place])


def blocks(shape: Sequence[int], axis: int, *, channels: int, inner: int) -> tuple[int, int, int]:
    """Returns the shape [rows, channels, block] that a contiguous array of this shape has, seen by its channels."""
    axis %= len(shape)
    if shape[axis] % (channels * inner):
        raise ValueError(f"axis {axis} of {list(shape)} has no {channels} channels of {inner}")
    rows = math.prod(shape[:axis]) * (shape[axis] // (channels * inner))
    return rows, channels, inner * math.prod(shape[axis + 1 :])


class _Scratch(threading.local):
    """Memory of a thread for pieces, kept: new memory would cost page faults at each image."""

    def __init__(self) -> None:
        self.held, self.near, self.looked = np.empty((3, _PIECE), np.float32)
        self.codes, self.apart = np.empty(_PIECE, np.uint8), np.empty(2 * _PIECE, np.uint8)


_SCRATCH = _Scratch()


@dataclass(frozen=True, slots=True)
class _Channel:
    """The values of a channel, and where they lie: at `int(value * scale + shift)`, or at the cell of that number."""

    values: Floats
    line: tuple[np.float32, np.float32]
    """(scale, shift)."""
    cells: Array | None = None
    """The code of each cell. None: a cell's number is the code."""
    odd: np.float32 | None = None
    """The last value, which lies apart from the others: what a processor pads with."""
    sorted_bits: tuple[Array, Array] | None = None
    """Where no cells tell the values apart: the bits of the values in order, and their codes."""
    pairs: Array | None = None
    """The bits of the two values that two codes of one byte stand for, by their two bytes read as one number."""

    @classmethod
    def of(cls, values: Floats, dtype: np.dtype[Any]) -> _Channel:
        """Returns the channel by the least work that tells its values apart."""
        kept = values[: len(values) - _num_repeated(values)]
        for even in (kept, kept[:-1]):
            line = _line(even, len(even)) if len(even) else None
            # Both zeros are equal, and no comparison of numbers finds the odd one.
            is_told = even is kept or kept[-1] not in even
            if is_told and line is not None and np.array_equal(_cell(even, line), np.arange(len(even))):
                return cls(values, line, odd=None if even is kept else kept[-1])
        count = len(kept)
        while count <= _MAX_CELLS and (line := _line(kept, count)) is not None:
            cells = _cell(kept, line)
            if cells.max() < _MAX_CELLS and len(np.unique(cells)) == len(kept):
                codes = np.zeros(int(cells.max()) + 1, dtype)
                codes[cells] = np.arange(len(kept))
                return cls(values, line, cells=codes)
            count *= 2
        bits = kept.view(np.uint32)
        order = np.argsort(bits)
        return cls(values, (np.float32(0), np.float32(0)), sorted_bits=(bits[order], order.astype(dtype)))

    def paired(self, dtype: np.dtype[Any]) -> _Channel:
        """Returns the channel with `pairs`, unless more than the odd value needs codes of two bytes.

        To look up two values at once halves the time of that. dtype: of codes.
        """
        values = self.values
        if dtype != np.uint8:
            values = values[: len(values) - _num_repeated(values) - (self.odd is not None)]
            if len(values) > 256 or self.odd is None or np.isnan(self.odd):
                return self
        codes = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
        return replace(self, pairs=values.take(codes, mode="clip").view(np.uint64).reshape(-1))

    def encode(self, part: Floats, out: Array, *, scratch: _Scratch) -> bool:
        """Writes the codes of some values. Returns whether each code stands for its value, bit for bit.

        part, out: [rows, values side by side]. numpy's messages of invalid numbers are to be off.
        """
        if part.flags.c_contiguous:
            return self._encode(part.reshape(-1), out.reshape(-1), scratch=scratch)
        held, codes = scratch.held[: part.size], scratch.apart[: part.size * out.itemsize].view(out.dtype)
        held.reshape(part.shape)[...] = part
        is_right = self._encode(held, codes, scratch=scratch)
        out[...] = codes.reshape(out.shape)
        return is_right

    def _encode(self, given: Floats, out: Array, *, scratch: _Scratch) -> bool:
        is_paired = self.pairs is not None and given.size % 2 == 0
        if is_paired and out.dtype != np.uint8:
            return self._encode_odd(given, out, scratch=scratch)
        self._write(given, out, near=scratch.near[: given.size])
        if is_paired:
            return np.array_equal(self._looked_up(out, scratch=scratch).view(np.uint64), given.view(np.uint64))
        looked = scratch.looked[: given.size]
        self.values.take(out, mode="clip", out=looked)
        return np.array_equal(looked.view(np.uint32), given.view(np.uint32))

    def _encode_odd(self, given: Floats, out: Array, *, scratch: _Scratch) -> bool:
        """Writes codes of two bytes, of which only that of the odd value needs two."""
        assert self.odd is not None
        odd, last = self.odd.view(np.uint32), len(self.values) - 1
        bits, codes = given.view(np.uint32), scratch.codes[: given.size]
        if bits[0] == odd == bits[-1] and (bits == odd).all():
            out[...] = last  # padding alone
            return True
        self._write_even(given, codes, near=scratch.near[: given.size])
        is_other = self._looked_up(codes, scratch=scratch).view(np.uint32) != bits
        num_other = np.count_nonzero(is_other)
        out[...] = codes
        if num_other == 0:
            return True
        is_odd = bits == odd
        np.putmask(out, is_odd, last)
        # No code of `pairs` stands for the odd value, so its places are among the others.
        return bool(np.count_nonzero(is_odd) == num_other)

    def _looked_up(self, codes: Array, *, scratch: _Scratch) -> Floats:
        """Returns what an even number of codes of one byte stand for. `near` of the scratch is overwritten."""
        assert self.pairs is not None
        # numpy looks up by numbers of this kind alone, and would make them itself.
        places, looked = scratch.near[: codes.size].view(np.intp), scratch.looked[: codes.size]
        places[...] = codes.view(np.uint16)
        self.pairs.take(places, mode="clip", out=looked.view(np.uint64))
        return looked

    def _write(self, given: Floats, codes: Array, *, near: Floats) -> None:
        """Writes the codes that values should have; what of them is wrong, `encode` finds. near: memory."""
        if self.sorted_bits is not None:
            bits, found = self.sorted_bits
            codes[...] = found.take(np.searchsorted(bits, given.view(np.uint32)), mode="clip")
            return
        self._write_even(given, codes, near=near)
        if self.odd is not None:
            codes[given == self.odd] = len(self.values) - 1

    def _write_even(self, given: Floats, codes: Array, *, near: Floats) -> None:
        np.multiply(given, self.line[0], out=near)
        np.add(near, self.line[1], out=near)
        codes[...] = near if self.cells is None else self.cells.take(near.astype(np.uint16), mode="clip")

    def missing(self, part: Floats, codes: Array) -> Floats:
        """Returns the values whose codes, as `encode` wrote them, do not stand for them."""
        found: Floats = part[self.values.take(codes, mode="clip").view(np.uint32) != part.view(np.uint32)]
        return found


def _line(values: Floats, count: int) -> tuple[np.float32, np.float32] | None:
    """Returns the scale and shift that lay values evenly over cells; None for values that no line can hold."""
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(high - low):
        return None
    scale = (count - 1) / (high - low) if high > low else 0.0
    shift = 0.5 - low * scale
    if max(scale, abs(shift)) > _MAX_LINE:
        return None
    return np.float32(scale), np.float32(shift)


def _cell(values: Floats, line: tuple[np.float32, np.float32]) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return (values * line[0] + line[1]).astype(np.int64)


def even_first(values: Floats) -> Floats:
    """Returns values with zero behind all others, where these lie evenly without it: it is what is padded with."""
    is_zero = values.view(np.uint32) == 0
    rest = values[~is_zero]
    if not is_zero.any() or len(rest) < 2:
        return values
    lines = [_line(found, len(found)) for found in (values, rest)]
    is_even = [
        line is not None and np.array_equal(_cell(found, line), np.arange(len(found)))
        for found, line in zip((values, rest), lines, strict=True)
    ]
    return np.append(rest, np.float32(0)) if is_even == [False, True] else values


def different(values: Floats) -> Floats:
    """Returns the values of an array that differ bit for bit, in their order as numbers."""
    found = np.unique(np.ascontiguousarray(values).view(np.uint32)).view(np.float32)
    return found[np.argsort(found, kind="stable")]


def _num_repeated(values: Floats) -> int:
    """Returns how many values at the end repeat the one before them: channels have tables of one length."""
    bits = values.view(np.uint32)
    return int(np.argmin(np.append(bits[:0:-1] == bits[-2::-1], False)))


def levels_of(field: FieldForm, array: Array) -> Array:
    """Returns values as uint8 of the same shape, 0 for the least that a channel can have and 255 for the greatest.

    Bytes without a table are as they are. Floats without one are between the least and the greatest of this image.
    """
    if field.table is None:
        return array if array.dtype == np.uint8 else scaled(array, array.min(), array.max())
    values, axis, inner = field.table.values, field.table.axis, field.table.inner
    shown = np.stack([scaled(row, row.min(), row.max()) for row in values])
    codes = np.minimum(array, values.shape[1] - 1)
    if len(shown) == 1:
        return np.asarray(shown[0][codes])
    along = [1] * array.ndim
    along[axis] = array.shape[axis]
    channels = (np.arange(array.shape[axis]) // inner % len(shown)).reshape(along)
    return np.asarray(shown[channels, codes])


def is_padding(field: FieldForm, array: Array) -> Array:
    """Returns which codes are the value that a processor pads with, where that is none of an image: zero, the last."""
    values = None if field.table is None else field.table.values
    if values is None or values.shape[1] < 2 or values[:, -1].any() or not (values[:, :-1] != 0).all():
        return np.zeros(array.shape, bool)
    return np.asarray(array == values.shape[1] - 1)


def scaled(values: Array, low: float, high: float) -> Array:
    """Returns values as uint8, 0 for `low` and 255 for `high`; all 0 where there is no span between them."""
    span = float(high) - float(low)
    if not math.isfinite(span) or span <= 0:
        return np.zeros(values.shape, np.uint8)
    share = (values.astype(np.float64) - float(low)) / span
    return np.asarray(np.clip(np.rint(share * 255), 0, 255).astype(np.uint8))
