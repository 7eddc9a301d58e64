"""The process that measures. Importing this module imports all that its arms need, before any clock runs."""

from __future__ import annotations

import dataclasses
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from forebay.doctor.arms.codecs import codecs
from forebay.doctor.arms.loaders import cached, uncached, workers
from forebay.doctor.arms.pieces import pieces
from forebay.doctor.arms.plans import plans
from forebay.doctor.arms.raw import find, listing, made, reads
from forebay.doctor.bench import Bench, Task
from forebay.doctor.figures import Skip
from forebay.errors import ForebayError
from forebay.train.calibrate.isolated import end_with


def _step(bench: Bench, seconds: float) -> Any:
    # transformers and accelerate take seconds to import, and a step that is given needs neither.
    return pkgutil.resolve_name("forebay.doctor.arms.step:step")(bench, seconds)


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


def work(task: Task, parent: Connection) -> None:
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
