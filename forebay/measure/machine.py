"""The use of a machine by an arm: time, CPU seconds and memory of its processes, its device, and the device's peak.

The clocks are of a call, of the steps of a block, and of stages by the stretches of `forebay.spans`.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from forebay.spans import listening
from forebay.train.device import DeviceLoad
from forebay.train.loop.trainable import num_compilations

_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250.0, 80.0),
    ("GH200", 989.0, 67.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("H20", 148.0, 44.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("A6000", 154.8, 38.7),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)
"""By a part of a device's name, the first that fits: dense TFLOP/s of its data sheet, half precision and float32."""


def peak_flops(device: str, *, precision: str) -> float | None:
    """Returns the peak FLOP/s of a device by its name, None where it is in no table.

    precision: `train.mixed_precision`; "no" is float32 without TF32, as torch multiplies unless told otherwise.
    """
    for part, half, single in _PEAKS:
        if part in device:
            return 1e12 * (single if precision == "no" else half)
    return None


def device_name() -> str | None:
    """Returns the name of the CUDA device, None on the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def machine() -> dict[str, Any]:
    """Returns what figures depend on: processor, cores, torch's threads, versions, the load when it began."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its children, those that ended and those that live."""
    own, ended = os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    fields = (_told(pid, "stat").rpartition(")")[2].split() for pid in _descendants(os.getpid()))
    living = sum(int(ticks) for found in fields for ticks in found[11:13]) / os.sysconf("SC_CLK_TCK")
    return own.user + own.system + ended.ru_utime + ended.ru_stime + living


def host_bytes() -> int:
    """Returns the most memory that this process has had, and what its children have now, shared pages shared out."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = (line for pid in _descendants(os.getpid()) for line in _told(pid, "smaps_rollup").splitlines())
    return own + sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, _told(pid, f"task/{task.name}/children").split()):
            found += [child, *_descendants(child)]
    return found


def _told(pid: int, file: str) -> str:
    """Returns a file of a process, an empty text where it has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


class Utilisation:
    """Asks the driver ten times a second how busy the device is while a block runs. Without CUDA: no samples.

    bucket: that of the step at hand, to be set by the arm; the host may be a little ahead of the device. samples:
    bucket and share of time in which the device computed, of each look.
    """

    def __init__(self) -> None:
        self.bucket = -1
        self.samples: list[tuple[int, float]] = []
        self._load = DeviceLoad(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Utilisation:
        if self._load.share() is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.1) and (share := self._load.share()) is not None:
            self.samples.append((self.bucket, share))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device that the config's model is trained on here. is_cuda: its memory is calibrated; a host's is not."""

    is_cuda: bool
    name: str
    total_bytes: int
    free_bytes: int
    """What other processes leave of it."""


def device() -> Device:
    """Returns the device that accelerate would take: the first of CUDA, else the CPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return Device(is_cuda=True, name=torch.cuda.get_device_name(0), total_bytes=total, free_bytes=free)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(is_cuda=False, name="CPU", total_bytes=pages, free_bytes=_field_bytes("meminfo", "MemAvailable"))


def release_memory() -> None:
    """Gives the device memory that no tensor holds back to other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return _field_bytes("self/status", "VmRSS")


def reset_peaks() -> None:
    """Makes the peaks what is taken now."""
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peaks() -> tuple[int, int]:
    """Returns the most bytes since this process began, or since `reset_peaks`: reserved, and held by tensors.

    On the CPU both are the resident memory of this process.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return (_field_bytes("self/status", "VmHWM"),) * 2


def _field_bytes(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc", file).read_text(encoding="ascii"), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


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
