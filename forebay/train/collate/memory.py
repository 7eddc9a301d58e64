"""Where the memory of batches comes from: fresh, or a ring of reused buffers."""

from __future__ import annotations

from typing import Protocol

import torch


class Allocate(Protocol):
    """Makes uninitialised tensors, by the name of the batch field that they are for."""

    def __call__(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous CPU tensor that shares memory with no other living tensor."""
        ...


def fresh(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    """Returns newly allocated memory; `name` does not matter."""
    return torch.empty(shape, dtype=dtype)
