"""One row of the fault table: trials that are numbered, so that any of them can be run again by itself."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Tally:
    """The outcomes of trials: how often each was seen, and which were wrong, by number."""

    done: int = 0
    planned: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Row(Generic[T]):
    """A fault and what must come of it.

    prepared: what all trials share, made in a folder of its own. trial: makes one fault, in an empty folder, and
    returns a word for what came of it; raises AssertionError, or lets an error through, where that is wrong. The number
    of a trial decides all that it does. short, long: trials in `make test` and in `make faults`, where what is prepared
    may say how many there are; a `long` of None runs `short` of them, which are all.
    """

    name: str
    fault: str
    outcome: str
    prepared: Callable[[Path], AbstractContextManager[T]]
    trial: Callable[[T, int, Path], str]
    short: int
    long: int | Callable[[T], int] | None = None

    def long_count(self, shared: T) -> int:
        """Returns the trials of `make faults`."""
        if self.long is None:
            return self.short
        return self.long(shared) if callable(self.long) else self.long

    def check(self, folder: Path) -> Counter[str]:
        """Returns the outcomes of the short count, spread over the numbers of the long one; raises what is wrong."""
        outcomes: Counter[str] = Counter()
        with self.prepared(made(folder / "prepared")) as shared:
            step = max(1, self.long_count(shared) // self.short)
            for number in range(0, self.short * step, step):
                outcomes[self.once(shared, number, folder)] += 1
        return outcomes

    def once(self, shared: T, number: int, folder: Path) -> str:
        """Runs one trial in a folder that is removed afterwards."""
        scratch = made(folder / f"{self.name}-{number}")
        try:
            return self.trial(shared, number, scratch)
        except BaseException as err:
            err.add_note(f"python -m tests.faults --row {self.name} --start {number} --count 1")
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def made(folder: Path) -> Path:
    """Returns the folder, which is there now."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def dice(name: str, number: int) -> random.Random:
    """Returns the random numbers of a trial."""
    return random.Random(f"{name} {number}")


@contextlib.contextmanager
def nothing(folder: Path) -> Iterator[Path]:
    """Prepares nothing but the folder."""
    yield folder
