"""The Nth call of a process that changes files: it fails, the process ends there, or something else happens."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from forebay.store import seal
from tests.store.faults import Faults, error_of

CODES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
_MORE = ("unlink", "rmdir")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault at the `at`-th call (from 0) of a builder, or of the first of its workers.

    what: an error's name, a signal's name, or `meanwhile`: a function that is called there. SIGINT goes to the whole
    group of processes, as a terminal sends it.
    """

    at: int = -1
    what: str = "none"
    who: str = "builder"
    meanwhile: Callable[[], None] | None = None


class Shim(Faults):
    """Counts the calls of this process, and those of a worker that is forked from it anew. `seen` names every call."""

    def __init__(self, patch: pytest.MonkeyPatch, fault: Fault) -> None:
        self.fault = fault
        super().__init__(patch)
        for name in _MORE:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        patch.setattr(fcntl, "flock", self._wrapped("flock", fcntl.flock))
        patch.setattr(seal, "_exchange", self._wrapped("exchange", seal._exchange))
        self.become("builder")

    def become(self, who: str) -> None:
        """Counts from 0 again, as another process."""
        self.seen.clear()
        self._fail_at = self.fault.at if who == self.fault.who else -1

    def hit(self, name: str, path: object = None) -> None:
        self.seen.append(name)
        if len(self.seen) - 1 != self._fail_at:
            return
        what = self.fault.what
        if what in CODES:
            raise error_of(CODES[what], path)
        if what == "SIGINT":
            os.killpg(os.getpgid(0), signal.SIGINT)
        elif what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        elif self.fault.meanwhile is not None:
            self.fault.meanwhile()


def without_locks(patch: pytest.MonkeyPatch) -> None:
    """Makes flock do nothing, as some network file systems do."""

    def granted(*_: Any) -> None:
        return None

    patch.setattr(fcntl, "flock", granted)
