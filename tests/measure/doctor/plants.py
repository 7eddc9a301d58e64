"""Faults that are planted in the code path of a process that measures."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from forebay.measure import doctor as child
from forebay.measure import doctor_bench as bench


def hang() -> None:
    """The first arm starts a process, says which, and never ends."""

    def stuck(own: bench.Bench, _seconds: float) -> NoReturn:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (Path(own.task.root) / "pids").write_text(f"{os.getpid()} {sleeper.pid}")
        time.sleep(600)
        raise AssertionError

    child.ARMS["find"] = dataclasses.replace(child.ARMS["find"], work=stuck)


def die() -> None:
    """The first arm ends its process."""
    child.ARMS["find"] = dataclasses.replace(child.ARMS["find"], work=lambda *_: os._exit(7))
