"""The process that measures. Importing this module imports all that its arms need, before any clock runs.

The parent's side: arms are asked for one by one, and none of them can take longer than it may.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pkgutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError
from forebay.measure.cache_arms import codecs, find, listing, made, plans, reads
from forebay.measure.child_process import Child
from forebay.measure.doctor_bench import Bench, DoctorTask
from forebay.measure.isolated_calls import end_with
from forebay.measure.loader_arms import cached, pieces, uncached, workers
from forebay.measure.predict import Skip


def _step(bench: Bench, seconds: float) -> Any:
    # transformers and accelerate take seconds to import, and a step that is given needs neither.
    return pkgutil.resolve_name("forebay.measure.step_arm:step")(bench, seconds)


ARMS: dict[str, Callable[[Bench, float], Any]] = {
    "find": find,
    "listing": listing,
    "raw read": reads,
    "steps of a build": made,
    "cache": pieces,
    "plan": plans,
    "cached loader": cached,
    "uncached loader": uncached,
    "uncached DataLoader": workers,
    "codecs": codecs,
    "step": _step,
}
"""The arms by their names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an arm came to: its figures, or why there are none."""

    value: Any = None
    skipped: str | None = None
    failed: str | None = None
    seconds: float = 0.0


def work(task: DoctorTask, parent: Connection) -> None:
    """Measures the arms that the parent names, each in the seconds that the parent gives it; None ends it."""
    end_with(task.parent)
    if task.prepare is not None:
        pkgutil.resolve_name(task.prepare)()
    bench = Bench(task)
    while (asked := parent.recv()) is not None:
        name, seconds, bench.pace_s = asked
        began = time.perf_counter()
        try:
            answer = Answer(value=ARMS[name](bench, seconds))
        except Skip as err:
            answer = Answer(skipped=str(err))
        except ForebayError as err:
            answer = Answer(failed=str(err))
        except OSError as err:
            answer = Answer(failed=f"{err.strerror or err}{f': {err.filename}' if err.filename else ''}")
        parent.send(dataclasses.replace(answer, seconds=time.perf_counter() - began))


logger = logging.getLogger(__name__)

_SET_UP_S = 6.0
"""What an arm may take beside the seconds that it measures for: lists and plans are made in it."""
_SET_UPS_S = {"step": 18.0}
"""Of arms that need more: transformers is imported there, and the model loaded."""
_WORK = "forebay.measure.doctor_child:work"


class Session:
    """A child that measures, and another one whenever the last was killed. `close` ends it, with what it started."""

    def __init__(self, task: DoctorTask, *, deadline_s: float) -> None:
        """deadline_s: on the clock of `time.monotonic`; nothing is waited for behind it."""
        self.task, self._deadline_s = task, deadline_s
        self._child: Child | None = None
        self._is_ready = False
        self.pace_s = 0.0
        """Seconds of a step for each of its samples, once they are known."""
        self.start_s = 0.0
        """What the child took to start and to import what steps need, once it has answered; a build's processes do."""
        self._count = 0
        self._start()

    def ask(self, arm: str, seconds: float) -> Answer:
        """Returns what an arm came to in about so many seconds; the child is killed where it does not end."""
        left_s = self._deadline_s - time.monotonic()
        if left_s < 1:
            return Answer(skipped="no time was left for it")
        limit_s = min(2 * seconds + _SET_UPS_S.get(arm, _SET_UP_S), left_s)
        try:
            child = self._ready(left_s)
            child.send((arm, min(seconds, left_s / 2), self.pace_s))
            answer: Answer = child.receive(limit_s)
        except TimeoutError:
            self.close()
            return Answer(failed=f"it did not end in {limit_s:.0f} s and was stopped", seconds=limit_s)
        except ForebayError as err:
            self.close()
            return Answer(failed=str(err))
        return answer

    def limit(self, rows: int) -> None:
        """Makes the next child list no more rows than this."""
        self.close()
        self.task = dataclasses.replace(self.task, limit=rows)

    def close(self) -> None:
        """Ends the child at once."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self) -> None:
        self._count, self._began_s = self._count + 1, time.monotonic()
        log = Path(self.task.root) / f"log-{self._count}"
        self._child = Child("doctor", _WORK, log=log, advice="the other arms are measured")
        self._is_ready = False

    def _ready(self, left_s: float) -> Child:
        if self._child is None:
            self._start()
        assert self._child is not None
        if not self._is_ready:
            self._child.receive(left_s)  # its imports are done
            self.start_s = time.monotonic() - self._began_s
            self._child.send(self.task)
            self._is_ready = True
        return self._child


@contextlib.contextmanager
def session(task: DoctorTask, *, deadline_s: float) -> Iterator[Session]:
    """Yields a session that ends with the block."""
    found = Session(task, deadline_s=deadline_s)
    try:
        yield found
    finally:
        found.close()
