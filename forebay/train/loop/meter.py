"""Loss, speed and waiting of a training run, kept on the device until someone reads them.

How long each phase of a run's start took: a line as a phase ends, and one line of all of them at step 1.

`logs/steps.jsonl` of a run: a head line with the settings, then the log lines of the run as JSON.

The last line of a run that waited for its data: why, and the command that helps.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from forebay.config.tree import Config
from forebay.errors import ForebayError
from forebay.store.files import append
from forebay.train.device import Hardware
from forebay.train.loader import FillTimes, Loader
from forebay.train.loop.schedule import BatchLoader, Group
from forebay.train.loop.trainable import SkippedSteps
from forebay.train.loop.usage_log import Traffic
from forebay.visible import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """The facts of one log line: loss, speed and waiting over the steps since the line before."""

    step: int
    loss: float
    """Mean over these steps, in nats a target token; over those with a finite loss, where fp16 has skipped some."""
    learning_rate: float
    """Of the last of these steps."""
    samples_per_s: float
    data_wait_share: float
    padding: float
    """Share of padded frames in all frames, since the run began."""
    grad_norm: float = math.nan
    """Of the last of these steps, before clipping."""
    skipped_steps: int = 0
    """Steps since the run began that the scaler of fp16 skipped."""
    cpu_share: float = math.nan
    """CPU seconds of this process, all its threads together, a second: 1 is one core busy."""
    device_utilization: float | None = None
    """Share of time in which the device computed, as its driver saw it last; None on a CPU, or without nvidia-ml-py."""
    device_memory_bytes: int | None = None
    """Used on the device, by whomever; None on a CPU, and so is the next one."""
    device_total_bytes: int | None = None
    remote: Traffic | None = None
    """What all nodes together asked of stores; None where all caches are local."""

    def __str__(self) -> str:
        parts = [
            f"loss {self.loss:.4f}",
            f"lr {self.learning_rate:.2e}",
            f"grad norm {self.grad_norm:.3g}",
            f"{self.samples_per_s:.1f} samples/s",
            f"data wait {100 * self.data_wait_share:.1f} %",
            f"padding {100 * self.padding:.1f} %",
            f"CPU {self.cpu_share:.2f} cores",
        ]
        if self.device_utilization is not None:
            parts.append(f"device {100 * self.device_utilization:.0f} %")
        if self.device_memory_bytes is not None and self.device_total_bytes is not None:
            parts.append(f"{human_bytes(self.device_memory_bytes)} of {human_bytes(self.device_total_bytes)}")
        if self.remote is not None:
            parts.append(str(self.remote))
        if self.skipped_steps:
            parts.append(f"{self.skipped_steps} steps skipped")
        return f"step {self.step}: {', '.join(parts)}"


class Meter:
    """Sums over a run. Losses stay on the device: reading each one would stop the host from running ahead of it."""

    def __init__(
        self,
        *,
        first_step: int,
        sum_on_device: Callable[[torch.Tensor], torch.Tensor],
        skipped: SkippedSteps,
        losses: tuple[float, float] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """first_step: the step of the first `add`, counted from 1; losses: of step 1 and of the step before it.

        skipped: before the first step, which `add` goes on counting. device: what the run computes on; None: a CPU.
        """
        self._losses = losses
        self.num_samples = 0
        self.skipped = skipped
        self.wait_s = 0.0
        self._sum_on_device = sum_on_device
        self._next_step = first_step
        self._pending: list[torch.Tensor] = []
        self._is_skipped: list[bool] = []
        self._window: list[float] = []
        self._grad_norm = math.nan
        self._hardware = Hardware(device or torch.device("cpu"))
        self._start_s = self._window_start_s = time.perf_counter()
        self._window_samples, self._window_wait_s = 0, 0.0

    def add(self, *, loss: torch.Tensor, grad_norm: torch.Tensor, group: Group, is_skipped: bool = False) -> None:
        """Counts one step. loss: this rank's part of the step's loss, a scalar; the ranks' parts add up to it.

        Raises ForebayError, on every rank, where too many steps in a row were skipped.
        """
        self._pending.append(torch.stack([loss.detach().float(), grad_norm.detach().float()]))
        self._is_skipped.append(is_skipped)
        self.skipped.add(self._next_step + len(self._pending) - 1, is_skipped=is_skipped)
        self.num_samples += group.num_samples
        self._window_samples += group.num_samples
        self.wait_s += group.wait_s
        self._window_wait_s += group.wait_s

    def settle(self) -> None:
        """Reads the pending steps from the device.

        Raises ForebayError at the first step whose loss or gradient norm is not finite and that was not skipped: on
        every rank, before a checkpoint could keep what such a step did to the weights.
        """
        if not self._pending:
            return
        steps = torch.stack(self._pending)
        losses = self._sum_on_device(steps[:, 0].contiguous()).tolist()
        norms, skipped = steps[:, 1].tolist(), self._is_skipped
        self._pending, self._is_skipped = [], []
        for loss, norm, is_skipped in zip(losses, norms, skipped, strict=True):
            if not is_skipped:
                self._check(loss, norm)
            self._next_step += 1
        self._grad_norm = norms[-1]
        finite = [loss for loss in losses if math.isfinite(loss)]
        first, last = self._losses or (math.nan, math.nan)
        if finite:
            first, last = first if math.isfinite(first) else finite[0], finite[-1]
        self._losses = (first, last)
        self._window.extend(finite)

    def _check(self, loss: float, norm: float) -> None:
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise ForebayError(
                    f"the {name} of step {self._next_step} is {value}; the last checkpoint is from before it: "
                    "lower train.learning_rate or raise train.warmup_steps, then run: forebay train --resume",
                    code="FB701",
                )

    def line(self, *, learning_rate: float, padding: float, remote: Traffic | None = None) -> StepLog:
        """Returns the log line of the steps since the last one, at least one step; begins the next line's window."""
        self.settle()
        now_s = time.perf_counter()
        elapsed_s = max(now_s - self._window_start_s, 1e-9)
        log = StepLog(
            step=self._next_step - 1,
            loss=math.fsum(self._window) / len(self._window) if self._window else math.nan,
            learning_rate=learning_rate,
            samples_per_s=self._window_samples / elapsed_s,
            data_wait_share=self._window_wait_s / elapsed_s,
            padding=padding,
            grad_norm=self._grad_norm,
            skipped_steps=self.skipped.total,
            remote=remote,
            **self._hardware.look(),
        )
        self._window, self._window_samples, self._window_wait_s, self._window_start_s = [], 0, 0.0, now_s
        return log

    @property
    def losses(self) -> tuple[float, float]:
        """Losses of step 1 and of the last step; see `settle` for what it raises. At least one step is done.

        A loss that is not finite is passed over, as far as there is a finite one.
        """
        self.settle()
        if self._losses is None:
            raise ValueError("no step has been counted yet")
        return self._losses

    @property
    def elapsed_s(self) -> float:
        """Wall time since the meter was made, above 0."""
        return max(time.perf_counter() - self._start_s, 1e-9)


T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Phases:
    """Seconds of the phases of a start, in the order of their first end. Rank 0 logs a line as each one ends.

    Every rank logs one line of all of them: the others wait for the slowest. Minutes without a byte on the device are
    then no riddle: what they went into is the line that comes next.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._tells = int(os.environ.get("RANK", "0")) == 0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time inside the block to the phase `name`. A block that an error leaves is not counted."""
        began_s = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - began_s
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s
        if self._tells:
            _logger.info("phase %s: %s", name, shown(elapsed_s))

    def started(self, items: Iterator[T]) -> Iterator[T]:
        """Yields items. The first item has two phases: `first batch` until it is there, `first step` until it is used.

        The line of all phases comes between the two.
        """
        with self("first batch"):
            first = next(items, None)
        if first is None:
            return
        self.tell()
        with self("first step"):
            yield first
        yield from items

    def tell(self) -> None:
        """Logs all phases so far in one line: `imports 3.1 s, model 6.2 s, first batch 0.05 s; step 1 begins`."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        whose = f"rank {os.environ.get('RANK', '0')}: " if ranks > 1 else ""
        _logger.info("%s%s; the first step begins", whose, self.line())

    def line(self) -> str:
        """Returns all phases so far in one line."""
        return ", ".join(f"{name} {shown(elapsed_s)}" for name, elapsed_s in self.seconds.items())


def shown(seconds: float) -> str:
    """Returns a duration in seconds for a person, two digits or all whole ones: `0.02 s`, `6.2 s`, `184 s`."""
    if seconds < 0.0095:
        return f"{seconds:.3f} s"
    return f"{seconds:.2f} s" if seconds < 0.095 else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


FILE_NAME = "steps.jsonl"
VERSION = 1


class StepsLog:
    """The log lines of one run, written by rank 0."""

    def __init__(self, config: Config, folder: Path, *, step: int) -> None:
        """Touches no file yet. folder: of the run.

        step: of the checkpoint that the run goes on from; 0: the file is begun anew.
        """
        self._path = folder / "logs" / FILE_NAME
        kept = [line for line in read_lines(self._path) if isinstance(line.get("step"), int) and line["step"] <= step]
        self._kept: list[dict[str, Any]] | None = [_head(config), *(kept if step else [])]

    def add(self, line: StepLog) -> None:
        """Appends a log line; ForebayError where it cannot be written."""
        try:
            kept = None if self._kept is None else b"".join(map(_line, self._kept))
            append(self._path, _line(asdict(line)), kept=kept, is_synced=False)
            self._kept = None
        except OSError as err:
            raise ForebayError(
                f"cannot write the log lines to {self._path}: {err.strerror}; make room, then go on with "
                "forebay train --resume",
                code="FB703",
            ) from err


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the documents of a file of JSON lines, up to one that is none; nothing where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):  # a crash has cut it short
            break
        if not isinstance(document, dict):
            break
        found.append(document)
    return found


def _head(config: Config) -> dict[str, Any]:
    settings = asdict(config)
    del settings["given"]  # they are among the others
    return {"version": VERSION, "name": config.name, "config": settings.pop("path"), "settings": settings}


def _line(document: Mapping[str, Any]) -> bytes:
    # NaN, for what a run cannot tell, is no JSON.
    finite = json.loads(json.dumps(document, default=str), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":")).encode("ascii") + b"\n"


WORTH_A_LINE = 0.05
"""The share of a run's time in which it waited for data, above which the run says why."""


def waiting_line(config: Config, loader: BatchLoader, *, share: float, is_uncached: bool) -> str | None:
    """Returns why a run waited so large a share of its time for data, and the command; None where it hardly did."""
    if not share > WORTH_A_LINE:
        return None
    head, path = f"waited {100 * share:.0f} % of the time for data", config.named
    if is_uncached:
        return f"{head}: samples are made on the fly; run: forebay preprocess {path}"
    ask = f"run: forebay doctor {path}"
    if not isinstance(loader, Loader):
        return f"{head}; {ask}"
    if not loader.settings.num_threads:
        return f"{head}: loader.num_threads = 0 fills batches in the step's own thread; {ask}"
    return f"{head}: {_why(loader.fill_times, threads=loader.settings.num_threads)}; {ask}"


def _why(times: FillTimes, *, threads: int) -> str:
    filled_s = times.read_s + times.collate_s
    if not filled_s:
        return "no batch was filled"
    if times.collate_s >= times.read_s:
        return f"collating took {100 * times.collate_s / filled_s:.0f} % of the work of {threads} threads"
    share = f"reading the cache took {100 * times.read_s / filled_s:.0f} % of the work of {threads} threads"
    # A read that needs no CPU waits for something: for a page of the disk, or for a download.
    is_cold = times.read_cpu_s < times.read_s / 2
    return f"{share}, most of it waiting for a cold disk, a download or busy cores" if is_cold else share
