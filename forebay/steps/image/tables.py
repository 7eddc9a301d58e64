"""Floats of a processor as codes of one or two bytes, by a table of the values that each channel takes, and back.

What an image processor gives of eight-bit pixels takes few different values: 256 a channel, one more where it pads. A
code is the place of a value among them, so a code and the table are the value, bit for bit. `inner` says how channels
lie along their axis: place i is of channel `i // inner % channels`. It is 1 for [3, height, width] and for
[height, width, 3], and 392 for the patches of Qwen2-VL, whose rows are (channel, time, y, x).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from forebay.steps.form_values import raw
from forebay.steps.image.processor.codes import blocks
from forebay.store.layout import Array

Values = npt.NDArray[np.float32]
"""[channels, n]: the value of each code in each channel."""
_PIECE = 1 << 15
"""Values at a time on the host: they stay in the cache."""
_DEVICE_PIECE = 1 << 25
"""Values at a time on a device: bounds the indices of a gather to 128 MB."""
_MIN_BLOCK = 64
"""Values of a channel side by side, from which on each channel is a pass of its own."""
_LINE = 1024
"""Values of interleaved channels that are indexed together: numpy's inner loops are long then."""


def expand(codes: Array, table: Values, axis: int, out: torch.Tensor, *, inner: int = 1, copies: int = 1) -> None:
    """Makes `out` the values of codes, in the calling thread.

    codes: uint8 or uint16 of any shape, their channels along `axis`. out: on the host, of that shape, float32, float16
    or bfloat16 (the table is rounded to it), with any strides. copies: `out` has the `inner` values of a channel so
    many times, and no gaps. Raises IndexError for a code that the table does not have.
    """
    is_whole = table.shape[1] > np.iinfo(codes.dtype).max
    if codes.size and not is_whole and int(codes.max()) >= table.shape[1]:
        raise IndexError(f"a code is {int(codes.max())}, the table has {table.shape[1]} values")
    values = raw(torch.from_numpy(np.ascontiguousarray(table)).to(out.dtype))
    # In the order in which codes lie in memory: batches keep it.
    if copies > 1:
        shape = blocks(codes.shape, axis, channels=len(values), inner=inner)
        _expand_copies(codes.reshape(shape), values, raw(out.view(*shape[:2], copies, shape[2])))
        return
    order = sorted(range(codes.ndim), key=lambda axis: -abs(codes.strides[axis]))  # the largest stride first
    codes, target = codes.transpose(order), raw(out).transpose(order)
    axis = order.index(axis % len(order)) if order else 0
    if len(values) == 1:
        _fill(codes, values[0], target)
    elif codes.flags.c_contiguous and target.flags.c_contiguous:
        shape = blocks(codes.shape, axis, channels=len(values), inner=inner)
        _expand_blocks(codes.reshape(shape), values, target.reshape(shape))
    else:
        for place, channel in _parts(codes.shape, axis, channels=len(values), inner=inner):
            _fill(codes[place], values[channel], target[place])


def expand_on_device(
    codes: torch.Tensor, table: torch.Tensor, axis: int, *, dtype: torch.dtype, inner: int = 1, copies: int = 1
) -> torch.Tensor:
    """Returns the values of codes in `dtype`, on the device of both: what `expand` gives, by gathers.

    codes: uint8, uint16, or the bits of the latter as int16, which every device can compute with. A code behind the
    end of the table is its last one: to raise, the host would wait for the device.
    """
    values = table.to(dtype)
    channels, count = values.shape
    made = list(codes.shape)
    if copies > 1:
        made[axis] *= copies
    out = torch.empty(made, dtype=dtype, device=codes.device)
    is_plain = channels == copies == 1
    shape = (1, 1, codes.numel()) if is_plain else blocks(codes.shape, axis, channels=channels, inner=inner)
    rows, targets = codes.contiguous().view(shape), out.view(*shape[:2], copies, shape[2])
    first = torch.arange(0, channels * count, count, dtype=torch.int32, device=codes.device)[:, None]
    for place in _device_pieces(shape):
        index = rows[place].to(torch.int32)
        if codes.dtype == torch.int16:
            index &= 0xFFFF
        if codes.dtype != torch.uint8 or count < 256:
            index.clamp_(max=count - 1)
        index = index + first
        found = values.view(-1).index_select(0, index.view(-1)).view(index.shape)
        targets[(*place[:2], slice(None), *place[2:])] = found[:, :, None]
    return out


def _device_pieces(shape: tuple[int, int, int]) -> Iterator[tuple[slice, ...]]:
    rows, channels, block = shape
    if rows == 1:
        step = max(1, _DEVICE_PIECE // channels)
        yield from ((slice(None), slice(None), slice(start, start + step)) for start in range(0, block, step))
        return
    step = max(1, _DEVICE_PIECE // max(1, channels * block))
    yield from ((slice(start, start + step),) for start in range(0, rows, step))


def _parts(
    shape: Sequence[int], axis: int, *, channels: int, inner: int
) -> Iterator[tuple[tuple[slice | int, ...], int]]:
    """Yields the runs of places along `axis` that are of one channel, and that channel."""
    for start in range(0, shape[axis], inner):
        yield (*(slice(None) for _ in range(axis)), slice(start, start + inner)), start // inner % channels


def _fill(codes: Array, values: Array, target: Array) -> None:
    """Makes `target` the values of codes of one channel; any shape and strides."""
    if codes.flags.c_contiguous and target.flags.c_contiguous:
        flat, out = codes.reshape(-1), target.reshape(-1)
        for start in range(0, len(flat), _PIECE):
            # Every index is in range; "clip" only keeps numpy from buffering the result to say otherwise.
            values.take(flat[start : start + _PIECE], mode="clip", out=out[start : start + _PIECE])
    elif codes.ndim > 1 and codes.size > _PIECE * len(codes):
        for part, out in zip(codes, target, strict=True):
            _fill(part, values, out)
    elif codes.size:
        step = max(1, _PIECE * len(codes) // codes.size)
        for start in range(0, len(codes), step):
            target[start : start + step] = values.take(codes[start : start + step], mode="clip")


def _expand_blocks(codes: Array, values: Array, target: Array) -> None:
    rows, channels, block = codes.shape
    if block < _MIN_BLOCK:
        _expand_interleaved(codes.reshape(-1), values, target.reshape(-1), block=block)
        return
    step = max(1, _PIECE // block)
    for start in range(0, rows, step):
        for channel in range(channels):
            _fill(codes[start : start + step, channel], values[channel], target[start : start + step, channel])


def _expand_copies(codes: Array, values: Array, target: Array) -> None:
    """Makes target [rows, channels, copies, block] the values of codes [rows, channels, block], each copy alike."""
    step = max(1, _PIECE // max(1, 2 * codes.shape[2]))
    for start in range(0, len(codes), step):
        for channel, own in enumerate(values):
            target[start : start + step, channel] = own.take(codes[start : start + step, channel], mode="clip")[:, None]


def _expand_interleaved(codes: Array, values: Array, target: Array, *, block: int) -> None:
    channels, count = values.shape
    wide = np.uint16 if values.size <= 1 << 16 else np.intp
    first = np.repeat(np.arange(0, channels * count, count, dtype=wide), block)
    first = np.tile(first, max(1, min(len(codes), _LINE) // len(first)))
    flat, whole = values.reshape(-1), len(codes) // len(first) * len(first)
    lines, out = codes[:whole].reshape(-1, len(first)), target[:whole].reshape(-1, len(first))
    step = max(1, _PIECE // len(first))
    for start in range(0, len(lines), step):
        flat.take(lines[start : start + step] + first, mode="clip", out=out[start : start + step])
    flat.take(codes[whole:] + first[: len(codes) - whole], mode="clip", out=target[whole:])
