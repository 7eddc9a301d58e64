"""The clocks: of a call, of the steps of a block, and of stages by the stretches of `forebay.spans`."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from forebay.measure.machine import Utilisation, cpu_seconds, host_bytes
from forebay.spans import listening
from forebay.train.loop.trainable import num_compilations

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a micro-batch."""

T = TypeVar("T")

_MAX_COUNTED = 8
"""Shapes whose FLOPs an arm counts: each costs a training step at its end. Those between them are interpolated."""


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Returns what a call gives, and its seconds."""
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def within(seconds: float, items: Iterable[T]) -> Iterator[T]:
    """Yields items, the first one always, until so many seconds have passed."""
    ends = time.perf_counter() + seconds
    for item in items:
        yield item
        if time.perf_counter() > ends:
            return


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """One optimizer step, from the end of the step before it."""

    bucket: int
    seconds: float
    device_bytes: int | None = None
    """Most memory that torch had on the device during the step."""


@dataclass(kw_only=True, slots=True)
class ArmTurn:
    """One block, from the first request for data to the end of the last step on the device."""

    seconds: float = 0.0
    wait_s: float = 0.0
    first_batch_s: float = 0.0
    cpu_s: float = 0.0
    frames: int = 0
    room: int = 0
    """Frames that the batches had room for."""
    losses: list[float] = field(default_factory=list)
    steps: list[TimedStep] = field(default_factory=list)
    skipped: int = 0
    ids: list[str] = field(default_factory=list)
    """Of the samples that were trained on, sorted."""
    shapes: list[Shapes] = field(default_factory=list)
    """Of each micro-batch."""
    utilisation: list[tuple[int, float]] = field(default_factory=list)
    """Bucket, and share of time in which the device computed, of each look at it; empty where none is possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmFinish:
    """The answer of an arm after its last turn."""

    flops: dict[Shapes, float]
    """FLOPs of a micro-batch by its shapes, forward and backward, of as many shapes as were counted."""
    compilations: int
    host_bytes: int


class BlockClock:
    """Takes the times of one block. A context; `turn` is whole when it ends. Nothing waits for the device before."""

    def __init__(self) -> None:
        self.turn = ArmTurn()
        self._utilisation = Utilisation()
        self._marks: list[tuple[int, Any, int | None]] = []
        self._losses: list[torch.Tensor] = []

    def __enter__(self) -> BlockClock:
        _wait_for_device()
        self._cpu_s = cpu_seconds()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._utilisation.__enter__()
        self._start_s, self._begin = time.perf_counter(), _mark()
        return self

    def got_batches(self, batches: Iterable[Any], *, wait_s: float, bucket: int) -> None:
        """Counts the micro-batches of the next step, and the wait for them."""
        if not self._marks:
            self.turn.first_batch_s = wait_s
        self.turn.wait_s += wait_s
        self.turn.shapes += map(_shapes_of, batches)
        self._utilisation.bucket = bucket

    def step_done(self, loss: torch.Tensor, *, bucket: int, is_skipped: bool = False) -> None:
        """Counts a step whose work was given to the device. loss: of the step, a scalar that may be on the device."""
        peak = None
        if torch.cuda.is_available():
            # The allocator's figures are the host's: they need not wait for the device.
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self._marks.append((bucket, _mark(), peak))
        self._losses.append(loss.detach().float())
        self.turn.skipped += is_skipped

    def __exit__(self, *error: object) -> None:
        _wait_for_device()
        self.turn.seconds = time.perf_counter() - self._start_s
        self._utilisation.__exit__()
        self.turn.cpu_s = cpu_seconds() - self._cpu_s
        self.turn.utilisation = self._utilisation.samples
        self.turn.losses = torch.stack(self._losses).tolist() if self._losses else []
        before = self._begin
        for bucket, mark, peak in self._marks:
            seconds = mark - before if isinstance(mark, float) else before.elapsed_time(mark) / 1000
            self.turn.steps.append(TimedStep(bucket=bucket, seconds=seconds, device_bytes=peak))
            before = mark


def finish(seen: Mapping[Shapes, T], ready: Callable[[T], Callable[[], Any]]) -> ArmFinish:
    """Returns what an arm tells at its end. seen: a micro-batch of each shape; ready: gives a step on one of them."""
    return ArmFinish(
        flops={shapes: count_flops(ready(seen[shapes])) for shapes in spread_out(seen)},
        compilations=num_compilations(),
        host_bytes=host_bytes(),
    )


def _shapes_of(batch: Any) -> Shapes:
    """Returns names and shapes of the tensors of a batch."""
    return tuple(sorted((name, tuple(value.shape)) for name, value in batch.items() if hasattr(value, "shape")))


def num_elements(shapes: Shapes) -> int:
    """Returns the elements of all tensors of a micro-batch, which the work on it grows with."""
    return sum(math.prod(shape) for _, shape in shapes)


def spread_out(seen: Iterable[Shapes]) -> list[Shapes]:
    """Returns up to `_MAX_COUNTED` of some shapes, from the smallest to the largest, evenly."""
    ordered = sorted(seen, key=lambda shapes: (num_elements(shapes), shapes))
    places = np.linspace(0, len(ordered) - 1, min(_MAX_COUNTED, len(ordered))).round().astype(int)
    return [ordered[place] for place in places.tolist()]


def count_flops(step: Callable[[], Any]) -> float:
    """Returns the FLOPs of the products that a call does, backward passes in it included."""
    from torch.utils.flop_counter import FlopCounterMode

    # Compiled graphs are single calls that it cannot look into. Importing what compiles takes seconds.
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else contextlib.nullcontext()
    with eager, FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _mark() -> Any:
    """Returns now: on the device as it comes to it, else on the host."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StageClock:
    """Adds up the seconds of stretches by name, in all threads. Of nested ones a moment falls to the innermost."""

    def __init__(self) -> None:
        self.wall_s: Counter[str] = Counter()
        self._local, self._lock = threading.local(), threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[StageClock]:
        """Hears all stretches of this process until the block ends."""
        with listening(self.stretch):
            yield self

    @contextlib.contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        """Counts the block as `name`, but what inside of it has a name of its own."""
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        self._put_down(stack)
        stack.append(name)
        try:
            yield
        finally:
            self._put_down(stack)
            stack.pop()

    def _put_down(self, stack: list[str]) -> None:
        now = time.perf_counter()
        if stack:
            with self._lock:
                self.wall_s[stack[-1]] += now - self._local.since
        self._local.since = now
