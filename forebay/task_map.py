"""A map over tasks (`forebay.preprocess.pool` has one), the row that each is at, and the error of a dead process."""

from __future__ import annotations

import mmap
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from forebay.errors import BuildError

T = TypeVar("T")
R = TypeVar("R")
_marks: mmap.mmap | None = None
_is_second_try = False
_device: str | None = None


class Map(Protocol):
    """The built-in `map`, or one over processes: results in the order of the tasks."""

    def __call__(self, function: Callable[[T], R], tasks: Sequence[T], /) -> Iterable[R]:
        """Returns `function(task)` of every task."""


class WorkerDied(BuildError):  # noqa: N818  it is caught by name where the sample is known
    """A worker died twice over one task; `task` and `position` (the row it was at) say where."""

    code = "FB302"

    def __init__(self, task: Any, position: int, status: int) -> None:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        super().__init__(f"a worker process died twice over one task ({how})")
        self.task = task
        self.position = position
        self.status = status


def mark(position: int) -> None:
    """Notes the row that is being worked on, where the parent finds it if this process dies. Costs a memory write."""
    if _marks is not None:
        _marks[:8] = position.to_bytes(8, "little")


def is_second_try() -> bool:
    """Whether a process has died over the task that is worked on: if this one dies too, the row should be known."""
    return _is_second_try


def mark_in(marks: mmap.mmap) -> None:
    """Lets `mark` write to the memory that a worker shares with its parent."""
    global _marks
    _marks = marks


def begin(*, is_tried_again: bool, on: str | None = None) -> None:
    """Notes that a task begins, whether a process has died over it, and the device that models run on."""
    global _is_second_try, _device
    _is_second_try, _device = is_tried_again, on


def device() -> str | None:
    """Returns where this process runs models: a device's name, the socket of its process, or None: here, on the CPU."""
    return _device
