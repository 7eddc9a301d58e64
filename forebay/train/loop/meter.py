"""Loss, speed and waiting of a training run, kept on the device until someone reads them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from forebay.errors import ForebayError
from forebay.train.loop.hardware import Hardware
from forebay.train.loop.micro_batches import Group
from forebay.train.loop.skipped import SkippedSteps
from forebay.train.loop.traffic import Traffic
from forebay.visible import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """What one log line says: loss, speed and waiting over the steps since the line before."""

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

        skipped: those before the first step, which `add` goes on counting. device: what the run computes on; None: a
        CPU.
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
