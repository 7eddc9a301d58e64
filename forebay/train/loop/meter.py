"""Loss, speed and waiting of a training run, kept on the device until someone reads them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from forebay.errors import ForebayError
from forebay.train.loop.micro_batches import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """What one log line says: loss, speed and waiting over the steps since the line before."""

    step: int
    loss: float
    """Mean over these steps, in nats a target token."""
    learning_rate: float
    """Of the last of these steps."""
    samples_per_s: float
    data_wait_share: float
    padding: float
    """Share of padded frames in all frames, since the run began."""
    skipped_steps: int = 0
    """Steps since the run began that the scaler of fp16 skipped."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: loss {self.loss:.4f}, lr {self.learning_rate:.2e}, {self.samples_per_s:.1f} samples/s, "
            f"data wait {100 * self.data_wait_share:.1f} %, padding {100 * self.padding:.1f} %"
        )


class Meter:
    """Sums over a run. Losses stay on the device: reading each one would stop the host from running ahead of it."""

    def __init__(
        self,
        *,
        first_step: int,
        sum_on_device: Callable[[torch.Tensor], torch.Tensor],
        has_scaler: bool,
        losses: tuple[float, float] | None = None,
    ) -> None:
        """first_step: the step of the first `add`, counted from 1; losses: of step 1 and of the step before it.

        has_scaler: fp16, where an infinite gradient norm is normal.
        """
        self._losses = losses
        self.num_samples = 0
        self.skipped_steps = 0
        self.wait_s = 0.0
        self._sum_on_device = sum_on_device
        self._has_scaler = has_scaler
        self._next_step = first_step
        self._pending: list[torch.Tensor] = []
        self._window: list[float] = []
        self._start_s = self._window_start_s = time.perf_counter()
        self._window_samples, self._window_wait_s = 0, 0.0

    def add(self, *, loss: torch.Tensor, grad_norm: torch.Tensor, group: Group, is_skipped: bool = False) -> None:
        """Counts one step. loss: this rank's part of the step's loss, a scalar; the ranks' parts add up to it."""
        self._pending.append(torch.stack([loss.detach().float(), grad_norm.detach().float()]))
        self.skipped_steps += is_skipped
        self.num_samples += group.num_samples
        self._window_samples += group.num_samples
        self.wait_s += group.wait_s
        self._window_wait_s += group.wait_s

    def settle(self) -> None:
        """Reads the pending steps from the device.

        Raises ForebayError at the first step whose loss, or whose gradient norm without fp16 scaling, is not finite:
        on every rank, before a checkpoint could keep what such a step did to the weights.
        """
        if not self._pending:
            return
        steps = torch.stack(self._pending)
        losses = self._sum_on_device(steps[:, 0].contiguous()).tolist()
        norms = steps[:, 1].tolist()
        self._pending = []
        for loss, norm in zip(losses, norms, strict=True):
            for name, value in (("loss", loss), ("gradient norm", 0.0 if self._has_scaler else norm)):
                if not math.isfinite(value):
                    raise ForebayError(
                        f"the {name} of step {self._next_step} is {value}; the last checkpoint is from before it: "
                        "lower train.learning_rate or raise train.warmup_steps, then run: forebay train --resume"
                    )
            self._next_step += 1
        self._losses = (self._losses[0] if self._losses else losses[0], losses[-1])
        self._window.extend(losses)

    def line(self, *, learning_rate: float, padding: float) -> StepLog:
        """Returns the log line of the steps since the last one, at least one step; begins the next line's window."""
        self.settle()
        now_s = time.perf_counter()
        elapsed_s = max(now_s - self._window_start_s, 1e-9)
        log = StepLog(
            step=self._next_step - 1,
            loss=math.fsum(self._window) / len(self._window),
            learning_rate=learning_rate,
            samples_per_s=self._window_samples / elapsed_s,
            data_wait_share=self._window_wait_s / elapsed_s,
            padding=padding,
            skipped_steps=self.skipped_steps,
        )
        self._window, self._window_samples, self._window_wait_s, self._window_start_s = [], 0, 0.0, now_s
        return log

    @property
    def losses(self) -> tuple[float, float]:
        """Losses of step 1 and of the last step; see `settle` for what it raises. At least one step is done."""
        self.settle()
        if self._losses is None:
            raise ValueError("no step has been counted yet")
        return self._losses

    @property
    def elapsed_s(self) -> float:
        """Wall time since the meter was made, above 0."""
        return max(time.perf_counter() - self._start_s, 1e-9)
