"""The arms of the doctor, and the child that is asked for one after the other: none takes longer than it may.

Importing this module imports all that its arms need, before any clock runs.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from forebay.errors import ForebayError
from forebay.measure.cache_arms import codecs, find, listing, plans, reads
from forebay.measure.child_process import Child
from forebay.measure.doctor_bench import Bench, DoctorTask
from forebay.measure.loader_arms import cached, pieces, uncached, workers
from forebay.measure.predict import Skip
from forebay.measure.sample_cache import made

_SET_UP_S = 6.0
"""What an arm may take beside the seconds that it measures for: lists and plans are made in it."""


@dataclass(frozen=True, slots=True)
class DoctorArm:
    """One arm. field: of `MeasuredArms`. share: of the seconds, which it may measure in. work: of a bench and those."""

    field: str
    share: float
    work: Callable[[Bench, float], Any]
    needs: Literal["nothing", "raw data", "a cache"] = "nothing"
    more_s: float = 0.0
    """What it may take beside `_SET_UP_S`."""


def _step(bench: Bench, seconds: float) -> Any:
    # transformers and accelerate take seconds to import, and a step that is given needs neither.
    return pkgutil.resolve_name("forebay.measure.step_arm:step")(bench, seconds)


ARMS: dict[str, DoctorArm] = {
    "find": DoctorArm("opened", 0.03, find),
    "listing": DoctorArm("listed", 0.1, listing),
    "raw read": DoctorArm("raw_read", 0.05, reads, "raw data"),
    "steps of a build": DoctorArm("made", 0.15, made, "raw data"),
    "cache": DoctorArm("pieces", 0.07, pieces, "a cache"),
    "plan": DoctorArm("plan", 0.05, plans, "a cache"),
    "cached loader": DoctorArm("cached", 0.17, cached, "a cache"),
    "uncached loader": DoctorArm("uncached", 0.18, uncached, "raw data"),
    "step": DoctorArm("steps", 0.15, _step, "a cache", more_s=12.0),  # transformers is imported, the model loaded
    "uncached DataLoader": DoctorArm("workers", 0.1, workers, "raw data"),
    "codecs": DoctorArm("codecs", 0.05, codecs, "raw data"),
}
"""The arms by their names, in the order in which they are asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an arm came to: its figures, or why there are none."""

    value: Any = None
    skipped: str | None = None
    failed: str | None = None


def work(task: DoctorTask, parent: Connection) -> None:
    """Measures the arms that the parent names, each in the seconds that the parent gives it."""
    if task.prepare is not None:
        pkgutil.resolve_name(task.prepare)()
    bench = Bench(task)
    while True:
        name, seconds, bench.pace_s = parent.recv()
        try:
            answer = Answer(value=ARMS[name].work(bench, seconds))
        except Skip as err:
            answer = Answer(skipped=str(err))
        except ForebayError as err:
            answer = Answer(failed=str(err))
        except OSError as err:
            answer = Answer(failed=f"{err.strerror or err}{f': {err.filename}' if err.filename else ''}")
        parent.send(answer)


class DoctorSession:
    """A child that measures, and another one whenever the last was killed. A context, whose end ends the child."""

    def __init__(self, task: DoctorTask, *, deadline_s: float) -> None:
        """Starts the child. deadline_s: on the clock of `time.monotonic`; nothing is waited for behind it."""
        self.task, self._deadline_s = task, deadline_s
        self.pace_s = 0.0
        """Seconds of a step for each of its samples, once they are known."""
        self.start_s = 0.0
        """What the child took to start and to import what steps need, once it has answered; a build's processes do."""
        self._child: Child | None = None
        self._is_ready, self._count = False, 0
        self._start()

    def __enter__(self) -> DoctorSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def ask(self, name: str, seconds: float) -> Answer:
        """Returns what an arm came to in about so many seconds; the child is killed where it does not end."""
        left_s = self._deadline_s - time.monotonic()
        if left_s < 1:
            return Answer(skipped="no time was left for it")
        limit_s = min(2 * seconds + _SET_UP_S + ARMS[name].more_s, left_s)
        try:
            child = self._ready(left_s)
            child.send((name, min(seconds, left_s / 2), self.pace_s))
            answer: Answer = child.receive(limit_s)
        except TimeoutError:
            answer = Answer(failed=f"it did not end in {limit_s:.0f} s and was stopped")
            self._kill()
        except ForebayError as err:
            answer = Answer(failed=str(err))
            self._kill()
        return answer

    def limit(self, rows: int) -> None:
        """Makes the next child list no more rows than this."""
        self._kill()
        self.task = dataclasses.replace(self.task, limit=rows)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self) -> Child:
        self._count, self._began_s, self._is_ready = self._count + 1, time.monotonic(), False
        log = Path(self.task.root) / f"log-{self._count}"
        self._child = Child("the arm doctor", f"{__name__}:work", log=log, advice="the other arms are measured")
        return self._child

    def _ready(self, left_s: float) -> Child:
        child = self._child or self._start()
        if not self._is_ready:
            child.receive(left_s)  # its imports are done
            self.start_s = time.monotonic() - self._began_s
            child.send(self.task)
            self._is_ready = True
        return child
