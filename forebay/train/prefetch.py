"""Results of a function over arguments, in their order, made ahead by background threads.

The pages of coming batches are read ahead too, while the disk is cold and only then.

Output buffers are reused. A buffer goes out as a tensor and comes back by itself when the last view of it is gone.
A fresh buffer costs page faults, often more than the copy into it. A buffer refilled too early gives wrong gradients
without an error. So nobody hands buffers back by hand: the tensor's storage owns a loan, and the end of the loan is the
return. Slices, `view`s, `detach`, tensors saved for backward, a TensorDict and `.numpy()` arrays all keep the storage,
and with it the loan, alive.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from forebay.store.source import SampleSource

A = TypeVar("A")
T = TypeVar("T")
THREAD_NAME = "forebay-loader"
"""Prefix of the names of all threads started here."""
_IMPORTED_BY = os.getpid()
_BATCHES = 256
"""Batches whose pages are asked for after a batch that met the disk; asking costs microseconds a sample."""


class Prefetch(Generic[A, T]):
    """Iterator over `function(argument)` in the order of `arguments`, whatever the threads do.

    The threads start now and end when the iterator is exhausted, closed, garbage-collected, or after an error, which is
    raised where its result would have stood. `function` must not hold this object, or it is never collected. A forked
    child has none of its parent's threads: it starts its own at its first `next`, and misses and repeats nothing.
    """

    def __init__(self, function: Callable[[A], T], arguments: Iterator[A], *, num_threads: int, prefetch: int) -> None:
        """Starts threads that keep `prefetch` results ready; num_threads of 0: each result is made when asked for."""
        self._function = function
        self._arguments = arguments
        self._num_threads = num_threads
        self._prefetch = max(prefetch, 1)
        self._ahead: deque[tuple[A, Future[T]]] = deque()
        self._closed = False
        if num_threads:
            self._start([])

    def __iter__(self) -> Prefetch[A, T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        try:
            return self._next_ahead() if self._num_threads else self._function(next(self._arguments))
        except BaseException:  # a StopIteration, an error of `function`, an interrupt: the end in any case
            self.close()
            raise

    def close(self) -> None:
        """Ends the threads and waits for them; the iterator is exhausted then. Calling it again does nothing."""
        self._closed = True
        self._ahead.clear()
        if self._num_threads:
            self._finalizer()

    def _next_ahead(self) -> T:
        if self._pid != os.getpid():
            self._finalizer.detach()
            self._start([argument for argument, _ in self._ahead])
        if not self._ahead:
            raise StopIteration
        future = self._ahead.popleft()[1]
        self._top_up()
        try:
            return future.result()
        finally:
            del future  # an error holds this frame; holding the error in turn would be a cycle

    def _start(self, arguments: list[A]) -> None:
        self._pid = os.getpid()
        if self._pid != _IMPORTED_BY:
            # After a fork torch makes its thread pool anew at the first use. Two new threads that do so at once meet
            # "Invalid thread pool!" (torch 2.13, in a third of the forks of a process that had called set_num_threads);
            # here there is one thread.
            torch.set_num_threads(torch.get_num_threads())
        self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix=f"{THREAD_NAME}-{id(self):x}")
        self._finalizer = weakref.finalize(self, _end, self._executor, self._pid, f"{THREAD_NAME}-{id(self):x}")
        self._ahead = deque((argument, self._executor.submit(self._function, argument)) for argument in arguments)
        self._top_up()

    def _top_up(self) -> None:
        while len(self._ahead) < self._prefetch:
            try:
                argument = next(self._arguments)
            except StopIteration:
                return
            self._ahead.append((argument, self._executor.submit(self._function, argument)))


def _end(executor: ThreadPoolExecutor, pid: int, name: str) -> None:
    if os.getpid() != pid:
        return  # in a forked child: the threads, and whoever held the executor's lock, are not here
    # The garbage collector may run in one of the threads themselves; a thread cannot wait for its own end.
    own = threading.current_thread().name.startswith(name)
    executor.shutdown(wait=not own, cancel_futures=True)


class ReadAhead:
    """Asks for pages ahead from the first batch on whose filling waits for a disk, until a while goes by without one.

    Threads may share it: what they race for is a number of batches.
    """

    def __init__(self, source: SampleSource) -> None:
        """source: asked by its `will_need`, see `Cache.will_need`."""
        self._source = source
        self._left = 0

    def announce(self, indices: Iterable[int]) -> None:
        """Says which samples are read soon, in the order of reading."""
        if self._left:
            self._left -= 1
            self._source.will_need(indices)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notices whether the block, in its thread, waited for pages from a disk."""
        before = _major_faults()
        yield
        if _major_faults() > before:
            self._left = _BATCHES


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


_GROWTH = 1.25
"""A shelf that meets a larger batch makes its buffers larger by this factor: slow growth does not reallocate."""
_LEAST_BYTES = 1 << 14
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

    def __init__(self, *, max_free: int, pin_memory: bool = False, least_bytes: int = _LEAST_BYTES) -> None:
        """Makes an empty ring that keeps at most `max_free` returned buffers a name; more go back to the system.

        least_bytes: what is smaller is no loan. The allocator has it without a page fault, at a fifth of the cost.
        """
        self.pin_memory = pin_memory
        self._max_free, self._least_bytes = max_free, least_bytes
        self._shelves: dict[str, _Shelf] = {}

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous tensor [*shape] with arbitrary values that no other living tensor shares memory with."""
        if self.pin_memory:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < self._least_bytes:
            return torch.empty(shape, dtype=dtype)
        shelf = self._shelves.get(name)
        if shelf is None:
            shelf = self._shelves.setdefault(name, _Shelf(deque(maxlen=self._max_free)))
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

    It speaks numpy's array interface because numpy shortens a chain of array bases, and passes by an array subclass.
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
