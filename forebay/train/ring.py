"""Reused output buffers. A buffer goes out as a tensor and comes back by itself when the last view of it is gone.

A fresh buffer costs page faults, often more than the copy into it. A buffer refilled too early gives wrong gradients
without an error. So nobody hands buffers back by hand: the tensor's storage owns a loan, and the end of the loan is the
return. Slices, `view`s, `detach`, tensors saved for backward, a TensorDict and `.numpy()` arrays all keep the storage,
and with it the loan, alive.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch

_GROWTH = 1.25
"""A shelf that meets a larger batch makes its buffers larger by this factor: slow growth does not reallocate."""

_ALIGNMENT = 64
"""Bytes; a cache line. numpy gives 16, and a copy of a whole sample into memory that begins inside of a line takes
twice as long (AMD EPYC: 17 us instead of 9 for 180 KB)."""


class BufferRing:
    """Hands out uninitialised tensors by name; threads may share it, and a forked child may go on with its copy.

    One shelf a name (a batch field): fields come back one by one, so a user who keeps only `labels` keeps no features
    alive. Where every buffer of a shelf is out, a new one is made.

    Pinned buffers are torch's own: its host allocator reuses a freed block only after the copies to a device that were
    started from it have ended, which a ring outside of it cannot see.
    """

    def __init__(self, *, max_free: int, pin_memory: bool = False) -> None:
        """Makes an empty ring that keeps at most `max_free` returned buffers a name; more go back to the system."""
        self.pin_memory = pin_memory
        self._max_free = max_free
        self._shelves: dict[str, _Shelf] = {}

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous tensor [*shape] with arbitrary values that no other living tensor shares memory with."""
        if self.pin_memory:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        shelf = self._shelves.get(name)
        if shelf is None:
            shelf = self._shelves.setdefault(name, _Shelf(deque(maxlen=self._max_free)))
        size_bytes = math.prod(shape) * dtype.itemsize
        # A storage of its own size, typed afterwards: bfloat16 is no numpy dtype.
        loaned = np.asarray(_Loan(shelf.buffer(size_bytes), shelf.free))[:size_bytes]
        return torch.from_numpy(loaned).view(dtype).view(shape)


class _Shelf:
    """Buffers of one batch field.

    Returned ones wait in a deque: its operations are single steps under the GIL, so that a return may happen in any
    thread, in the middle of a garbage collection, and across a fork, without a lock.
    """

    __slots__ = ("_size_bytes", "free")

    def __init__(self, free: deque[_Buffer]) -> None:
        self.free = free
        self._size_bytes = 1

    def buffer(self, size_bytes: int) -> _Buffer:
        if size_bytes > self._size_bytes:
            self._size_bytes = math.ceil(size_bytes * _GROWTH)
        while True:
            try:
                buffer = self.free.pop()  # the last one returned: its pages are the warmest
            except IndexError:
                return _Buffer(max(self._size_bytes, size_bytes))
            if buffer.size_bytes >= size_bytes:
                return buffer


class _Buffer:
    """Memory of one tensor."""

    __slots__ = ("address", "memory", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.memory = np.empty(size_bytes + _ALIGNMENT, dtype=np.uint8)
        self.address = self.memory.ctypes.data + -self.memory.ctypes.data % _ALIGNMENT
        self.size_bytes = size_bytes


class _Loan:
    """Owner of a buffer while it is out; when the last array made of the owner dies, the owner returns the buffer.

    It speaks numpy's array interface because numpy shortens a chain of array bases, and would pass by an array
    subclass.
    """

    __slots__ = ("__array_interface__", "_buffer", "_free")

    def __init__(self, buffer: _Buffer, free: deque[_Buffer]) -> None:
        self._buffer = buffer
        self._free = free
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (buffer.size_bytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
        }

    def __del__(self) -> None:
        self._free.append(self._buffer)
