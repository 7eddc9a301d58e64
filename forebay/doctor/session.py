"""The parent's side: arms are asked for one by one, and none of them can take longer than it may."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from forebay.doctor.bench import Task
from forebay.doctor.child import Answer
from forebay.errors import ForebayError
from forebay.train.compare.child import Child

logger = logging.getLogger(__name__)

_SET_UP_S = 6.0
"""What an arm may take beside the seconds that it measures for: lists and plans are made in it."""
_SET_UPS_S = {"step": 18.0}
"""Of arms that need more: transformers is imported there, and the model loaded."""
_WORK = "forebay.doctor.child:work"


class Session:
    """A child that measures, and another one whenever the last was killed. `close` ends it, with what it started."""

    def __init__(self, task: Task, *, deadline_s: float) -> None:
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
def session(task: Task, *, deadline_s: float) -> Iterator[Session]:
    """Yields a session that ends with the block."""
    found = Session(task, deadline_s=deadline_s)
    try:
        yield found
    finally:
        found.close()
