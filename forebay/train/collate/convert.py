"""Copies into rows of a batch, with the change of dtype in the same pass.

numpy's float16 casts take about 20 times as long as torch's (one EPYC core, 240,000 values: 390 us against 17), so torch
casts. It gets pieces below its parallel grain: a loader thread must not start an OpenMP team beside the training step.

Where the memory of batches comes from: fresh, or a ring of reused buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from forebay.store.layout import Array

PIECE = 32_000
"""Elements; torch runs element-wise work of fewer than 32,768 in the calling thread."""


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


class Allocate(Protocol):
    """Makes uninitialised tensors, by the name of the batch field that they are for."""

    def __call__(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous CPU tensor that shares memory with no other living tensor."""
        ...


def fresh(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    """Returns newly allocated memory; `name` does not matter."""
    return torch.empty(shape, dtype=dtype)
