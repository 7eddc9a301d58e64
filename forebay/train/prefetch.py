"""Results of a function over arguments, in their order, made ahead by background threads.

The pages of coming batches are read ahead too, while the disk is cold and only then.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

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
