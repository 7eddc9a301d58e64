"""Conversions between floating-point dtypes, for rows of a batch.

numpy's float16 casts take about 20 times as long as torch's here (one EPYC core, [3000, 80]: 390 us against 17), so torch
does them. It gets pieces below its parallel grain: a loader thread must not start an OpenMP team beside the training step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

_PIECE = 32_000
"""Elements; torch runs element-wise work of fewer than 32,768 in the calling thread."""


def widen(values: Array, out: Array) -> None:
    """Makes `out` float32 equal to `values` (any float dtype, read-only is fine), both C-contiguous with as many elements."""
    copy_pieces(torch.from_numpy(_Writable.alias(values)).view(-1), torch.from_numpy(out).view(-1))


def copy_pieces(values: torch.Tensor, out: torch.Tensor) -> None:
    """Makes `out` [n] equal to `values` [n], rounded to nearest even, without torch's threads."""
    for start in range(0, len(out), _PIECE):
        out[start : start + _PIECE].copy_(values[start : start + _PIECE])


class _Writable:
    """Alias of an array that does not say that it is read-only: torch warns of such arrays even where it only reads."""

    __slots__ = ("__array_interface__",)

    def __init__(self, values: Array) -> None:
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}

    @classmethod
    def alias(cls, values: Array) -> Array:
        """Returns the alias; it is to be read only, and only while `values` lives."""
        return np.asarray(cls(np.ascontiguousarray(values)))
