"""Seconds by stage: a listener to the stretches of `forebay.spans`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

from forebay.spans import listening


class StageClock:
    """Adds up the seconds of stretches by name, in all threads. Of nested ones a moment falls to the innermost."""

    def __init__(self) -> None:
        self.wall_s: Counter[str] = Counter()
        self.cpu_s: Counter[str] = Counter()
        """CPU seconds of the thread that the stretch was in; threads that it had work for it are not in there."""
        self._local, self._lock = threading.local(), threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[StageClock]:
        """Hears all stretches of this process until the block ends."""
        with listening(self.stretch):
            yield self

    @contextlib.contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        """Counts the block as `name`, but what inside of it has a name of its own."""
        stack = self._stack()
        self._put_down(stack)
        stack.append(name)
        try:
            yield
        finally:
            self._put_down(stack)
            stack.pop()

    def _stack(self) -> list[str]:
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.since = [], (0.0, 0.0)
        stack: list[str] = self._local.stack
        return stack

    def _put_down(self, stack: list[str]) -> None:
        now = time.perf_counter(), time.thread_time()
        if stack:
            with self._lock:
                self.wall_s[stack[-1]] += now[0] - self._local.since[0]
                self.cpu_s[stack[-1]] += now[1] - self._local.since[1]
        self._local.since = now
