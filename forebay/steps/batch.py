"""What batch forms share: copies into rows of a batch, with the change of dtype in the same pass, and rows of text.

numpy's float16 casts take about 20 times as long as torch's (one EPYC core, 240,000 values: 390 us against 17), so
torch casts. It gets pieces below its parallel grain: a loader thread must not start an OpenMP team beside the training
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from forebay.steps.step import Allocate, Batch
from forebay.store.layout import Array

PIECE = 32_000
"""Elements; torch runs element-wise work of fewer than 32,768 in the calling thread."""

IGNORED = -100
"""Label that torch's cross entropy passes over, as in transformers."""


def fresh(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    """Returns newly allocated memory; `name` does not matter."""
    return torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> Array:
    """Returns the tensor's memory as an array; bfloat16, which numpy does not have, as its bits in int16."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def raw_values(values: Sequence[float], dtype: torch.dtype) -> list[float]:
    """Returns the values rounded to `dtype` as `raw` shows them."""
    rounded = torch.tensor(values, dtype=dtype)
    found: list[float] = raw(rounded).tolist()
    return found


def copy_values(values: Array, out: torch.Tensor, *, scratch: torch.Tensor) -> None:
    """Makes `out` equal to `values`, rounded to nearest even.

    values: float16 or float32, C-contiguous, read-only is fine. out: float16, float32 or bfloat16, contiguous, as many
    elements. scratch: float32 [PIECE], overwritten.
    """
    source = torch.from_numpy(_Writable.alias(values)).view(-1)
    target = out.view(-1)
    # Straight from float16 to bfloat16 torch takes 2.6 times as long as over float32.
    over_float32 = source.dtype == torch.float16 and target.dtype == torch.bfloat16
    if not over_float32 and torch.get_num_threads() == 1:
        target.copy_(source)
        return
    for piece, part in zip(torch.split(source, PIECE), torch.split(target, PIECE), strict=True):
        part.copy_(scratch[: len(piece)].copy_(piece) if over_float32 else piece)


class _Writable:
    """Alias of an array that does not say that it is read-only: torch warns of such arrays even where it only reads."""

    __slots__ = ("__array_interface__",)

    def __init__(self, values: Array) -> None:
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}

    @classmethod
    def alias(cls, values: Array) -> Array:
        """Returns the alias; it is to be read only, and only while `values` lives."""
        return np.asarray(cls(values))


class Rows:
    """Rows of a batch to be written in float32: its own memory, or for other dtypes one scratch row, then copied."""

    def __init__(self, out: torch.Tensor, shape: tuple[int, ...], *, allocate: Allocate) -> None:
        self._out, self._shape = out, shape
        self._is_direct = out.dtype == torch.float32
        if self._is_direct:
            self._rows = out.numpy()
        else:
            self._row = allocate("row", shape, dtype=torch.float32)
            self._scratch = allocate("piece", (PIECE,), dtype=torch.float32)

    def array(self, index: int) -> Array:
        """Returns float32 [*shape] to write row `index` into."""
        if self._is_direct:
            row: Array = self._rows[index].reshape(self._shape)
            return row
        return self._row.numpy()

    def done(self, index: int) -> None:
        """Row `index` of the batch now holds what was written."""
        if not self._is_direct:
            copy_values(self._row.numpy(), self._out[index], scratch=self._scratch)


def moved_frames(
    stored: Sequence[Array], pads: Sequence[float], *, room: int, dtype: torch.dtype, allocate: Allocate
) -> torch.Tensor:
    """Returns [batch, n_mels, room]: each sample's frames [frames, n_mels] and its pad value behind them, transposed.

    The memory stays in the order of the store, [batch, room, n_mels], and the tensor is a transposed view of it: a copy
    is then one straight pass (10 times as fast as transposing each sample), a transfer to a device still one block, and
    the model's first convolution brings it into its own order there.
    """
    return padded("input_features", stored, pads, room=room, dtype=dtype, allocate=allocate).transpose(1, 2)


def padded(
    name: str, stored: Sequence[Array], pads: Sequence[float], *, room: int, dtype: torch.dtype, allocate: Allocate
) -> torch.Tensor:
    """Returns [batch, room, ...]: each sample's values [length, ...] and its pad value behind them."""
    out = allocate(name, (len(stored), room, *stored[0].shape[1:]), dtype=dtype)
    rows, raw_pads = raw(out), raw_values(pads, dtype)
    if stored[0].dtype == rows.dtype:
        for row, values, pad in zip(rows, stored, raw_pads, strict=True):
            length = len(values)
            row[:length] = values
            row[length:] = pad
        return out
    scratch = allocate("piece", (PIECE,), dtype=torch.float32)
    for out_row, row, values, pad in zip(out.unbind(), rows, stored, raw_pads, strict=True):
        copy_values(values, out_row[: len(values)], scratch=scratch)
        row[len(values) :] = pad
    return out


def counted(name: str, values: Sequence[int], *, allocate: Allocate) -> torch.Tensor:
    """Returns int64 [batch]: a number a sample."""
    out = allocate(name, (len(values),), dtype=torch.int64)
    out.numpy()[:] = values
    return out


def computed_rows(
    names: tuple[str, str],
    stored: Sequence[Array],
    finish: Callable[[Array, Array, Array], None],
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    allocate: Allocate,
) -> Batch:
    """Returns values [batch, *shape] and their mask int32 [batch, shape[0]], by these names.

    The arithmetic is done in float32, for other dtypes in one row of scratch.
    finish: called with the stored values of a sample, float16 ones widened, and the rows of values and mask to fill.
    """
    mask = allocate(names[1], (len(stored), shape[0]), dtype=torch.int32)
    out = allocate(names[0], (len(stored), *shape), dtype=dtype)
    scratch = allocate("piece", (PIECE,), dtype=torch.float32)
    row = allocate("row", shape, dtype=torch.float32) if dtype != torch.float32 else None
    rows = list(out.numpy()) if row is None else [row.numpy()] * len(stored)
    wide = None
    if stored[0].dtype == np.float16:
        wide = allocate("wide", max(stored, key=len).shape, dtype=torch.float32)
    for index, (values, mask_row) in enumerate(zip(stored, mask.numpy(), strict=True)):
        if wide is not None:
            copy_values(values, wide[: len(values)], scratch=scratch)
            values = wide[: len(values)].numpy()
        finish(values, rows[index], mask_row)
        if row is not None:
            copy_values(row.numpy(), out[index], scratch=scratch)
    return {names[0]: out, names[1]: mask}


def ones_mask(name: str, lengths: Sequence[int], room: int, *, allocate: Allocate) -> torch.Tensor:
    """Returns int32 [batch, room], 1 up to each sample's length and 0 behind it."""
    mask = allocate(name, (len(lengths), room), dtype=torch.int32)
    rows = mask.numpy()
    rows.fill(1)
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0
    return mask


def filled(name: str, shape: tuple[int, int], value: int, *, allocate: Allocate) -> torch.Tensor:
    """Returns int64 of this shape with one value everywhere."""
    tensor = allocate(name, shape, dtype=torch.int64)
    tensor.numpy().fill(value)
    return tensor
