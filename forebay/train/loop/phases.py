"""How long each phase of a run's start took: a line as a phase ends, and one line of all of them at step 1."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Phases:
    """Seconds of the phases of a start, in the order of their first end. Rank 0 logs a line as each one ends.

    Every rank logs one line of all of them: the others wait for the slowest. Minutes without a byte on the device are
    then no riddle: what they went into is the line that comes next.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._tells = int(os.environ.get("RANK", "0")) == 0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time inside the block to the phase `name`. A block that an error leaves is not counted."""
        began_s = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - began_s
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s
        if self._tells:
            _logger.info("phase %s: %s", name, shown(elapsed_s))

    def started(self, items: Iterator[T]) -> Iterator[T]:
        """Yields items. The first item has two phases: `first batch` until it is there, `first step` until it is used.

        The line of all phases comes between the two.
        """
        with self("first batch"):
            first = next(items, None)
        if first is None:
            return
        self.tell()
        with self("first step"):
            yield first
        yield from items

    def tell(self) -> None:
        """Logs all phases so far in one line: `imports 3.1 s, model 6.2 s, first batch 0.05 s; step 1 begins`."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        whose = f"rank {os.environ.get('RANK', '0')}: " if ranks > 1 else ""
        _logger.info("%s%s; the first step begins", whose, self.line())

    def line(self) -> str:
        """Returns all phases so far in one line."""
        return ", ".join(f"{name} {shown(elapsed_s)}" for name, elapsed_s in self.seconds.items())


def shown(seconds: float) -> str:
    """Returns a duration in seconds for a person, two digits or all whole ones: `0.02 s`, `6.2 s`, `184 s`."""
    if seconds < 0.0095:
        return f"{seconds:.3f} s"
    return f"{seconds:.2f} s" if seconds < 0.095 else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
