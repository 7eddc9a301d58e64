"""Batches on a device, copied on a stream of their own, some batches ahead of the step that uses them.

The use of a machine by a run: cores of this process, and the device's utilisation and memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from forebay.errors import ConfigError
from forebay.extras import install_line
from forebay.train.collate.patches import PatchBatch, fields_of, moved

_logger = logging.getLogger(__name__)
T = TypeVar("T")
Batch = dict[str, Any] | PatchBatch
"""Tensors, and what is none of packs (`max_length_q`), which stays as it is."""


class Ahead(Generic[T]):
    """Iterator over what `start` makes of items, `depth` of which are started before the one handed out is finished.

    start: begins the work on an item and returns what finishes it. An error stands where its item would have stood.
    """

    def __init__(self, items: Iterator[T], start: Callable[[T], Callable[[], T]], *, depth: int) -> None:
        self._items, self._start, self._depth = items, start, depth
        self._started: deque[Callable[[], T]] = deque()
        self._end: Exception | None = None

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        while self._end is None and len(self._started) <= self._depth:
            try:
                self._started.append(self._start(next(self._items)))
            except Exception as err:  # noqa: BLE001  # raised in its turn; a StopIteration too
                self._end = err
        if not self._started:
            assert self._end is not None
            raise self._end
        return self._started.popleft()()


class SideStream:
    """Copies batches to a CUDA device on a stream of its own: the copies run beside the step's kernels.

    The host's memory is pinned and torch's own (see `BufferRing`): its allocator gives a block out again only after the
    copies from it have ended, so a batch on the host may be dropped as soon as its copy has begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)

    def start(self, batch: Batch, finish: Callable[[Any], Batch] | None = None) -> Callable[[], Batch]:
        """Begins to copy; the result waits, on the stream that is current then, and returns the batch on the device.

        finish: what makes the batch of what was copied, on the same stream.
        """
        with torch.cuda.stream(self._stream):
            move = batch.to if isinstance(batch, PatchBatch) else partial(moved, batch)
            copied: Batch = move(self._device, non_blocking=True)
            copied = copied if finish is None else finish(copied)
            done = self._stream.record_event()

        def ready() -> Batch:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            for value in fields_of(copied).values():
                if isinstance(value, torch.Tensor):
                    # Made on the side stream, which must not take its memory back too early.
                    value.record_stream(current)
            return copied

        return ready


def is_host(device: torch.device | str | None) -> bool:
    """Returns whether batches for `device` stay on the host."""
    return device is None or torch.device(device).type == "cpu"


def side_stream(device: torch.device | str | None) -> SideStream | None:
    """Returns the stream that takes batches to a device; None where they stay on the host.

    Raises ConfigError for a device that is neither a CPU nor a CUDA device that torch sees.
    """
    if device is None or is_host(device):
        return None
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, wanted cpu or a CUDA device that torch sees; leave device out")
    return SideStream(device)


class Hardware:
    """Looks at the machine from time to time; a look costs microseconds, and on a GPU asks its driver."""

    def __init__(self, device: torch.device) -> None:
        """Begins to count; logs, once, if the device's utilisation cannot be told for want of a package."""
        self._device = device if device.type == "cuda" else None
        self._load = DeviceLoad(device)
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def look(self) -> dict[str, Any]:
        """Returns what was taken since the last look, or since this object was made; the fields of `StepLog`.

        On a CPU `cpu_share` alone.
        """
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        share = (cpu_s - self._cpu_s) / max(wall_s - self._wall_s, 1e-9)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        if self._device is None:
            return {"cpu_share": share}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "cpu_share": share,
            "device_utilization": self._load.share(),
            "device_memory_bytes": total - free,
            "device_total_bytes": total,
        }


class DeviceLoad:
    """How busy a device is, as its driver saw it last."""

    def __init__(self, device: torch.device) -> None:
        """Logs, once, if that cannot be told for want of a package."""
        self._device = device if device.type == "cuda" and _has_nvml() else None

    def share(self) -> float | None:
        """Returns the share of time in which the device computed; None where nobody tells."""
        if self._device is None:
            return None
        import pynvml

        try:
            return torch.cuda.utilization(self._device) / 100
        except pynvml.NVMLError as err:  # a part of a GPU (MIG) has none
            _logger.info("the device does not tell its utilisation: %s", err)
            self._device = None
            return None


def _has_nvml() -> bool:
    try:
        import pynvml  # noqa: F401
    except ImportError:
        if int(os.environ.get("RANK", "0")) == 0:
            _logger.info("log lines go without the device's utilisation; for it run: %s", install_line("gpu"))
        return False
    return True
