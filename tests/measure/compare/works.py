"""The work of the children of `test_child`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from forebay.errors import ConfigError


def doubled(task: int, parent: Connection) -> None:
    """Sends the double of its task, then of each message until None comes."""
    parent.send(2 * task)
    while (number := parent.recv()) is not None:
        parent.send(2 * number)


def refusing(task: str, parent: Connection) -> None:
    raise ConfigError(f"{task} is not possible")


def failing(task: str, parent: Connection) -> None:
    for number in range(40):
        print(f"line {number}")
    raise RuntimeError(f"CUDA out of memory for {task}")


def killed(task: Any, parent: Connection) -> None:
    os._exit(7)


def endless(task: Any, parent: Connection) -> None:
    """Starts a process of its own, sends both process ids and never ends."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    parent.send((os.getpid(), sleeper.pid))
    time.sleep(600)
