"""Batches on a device: copied on a stream of their own, some batches ahead of the step that uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from forebay.errors import ConfigError
from forebay.train.collate.patches import PatchBatch, fields_of, moved

T = TypeVar("T")
Batch = dict[str, Any] | PatchBatch
"""Tensors, and what is none of packs (`max_length_q`), which stays as it is."""


class Ahead(Generic[T]):
    """Iterator over what `start` makes of items, `depth` of which are started before the one handed out is finished.

    start: begins the work on an item and returns what finishes it. An error of the items stands where its item would
    have stood.
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

    def start(self, batch: Batch) -> Callable[[], Batch]:
        """Begins to copy; the result waits, on the stream that is current then, and returns the batch on the device."""
        with torch.cuda.stream(self._stream):
            move = batch.to if isinstance(batch, PatchBatch) else partial(moved, batch)
            copied: Batch = move(self._device, non_blocking=True)
            done = self._stream.record_event()

        def finish() -> Batch:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            for value in fields_of(copied).values():
                if isinstance(value, torch.Tensor):
                    # Made on the side stream, which must not take its memory back too early.
                    value.record_stream(current)
            return copied

        return finish


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
