"""How many steps a run has, and the learning rate of each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forebay.config.train import TrainConfig
from forebay.errors import ConfigError
from forebay.plan.cursor import LoaderState, num_steps
from forebay.plan.interface import Plan
from forebay.train.loader import Loader
from forebay.train.loop.micro_batches import BatchLoader

DEFAULT_STEPS = 100
"""Steps of a run whose config names neither `train.max_steps` nor `train.epochs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate as a function of the step: linear warm-up, then `kind`. A function has no state to be kept."""

    num_steps: int
    """Optimizer steps of the run, those before a resume included."""
    warmup_steps: int
    kind: Literal["cosine", "linear", "constant"]

    @classmethod
    def of(cls, settings: TrainConfig, *, num_steps: int) -> Schedule:
        """Returns the schedule of a run of `num_steps` steps. A share of warm-up is rounded up, as in transformers."""
        ratio = settings.warmup_ratio
        warmup_steps = settings.warmup_steps if ratio is None else math.ceil(num_steps * ratio)
        return cls(num_steps=num_steps, warmup_steps=warmup_steps, kind=settings.schedule)

    def factor(self, step: int) -> float:
        """Returns the share of `train.learning_rate` that step 1, 2, ... takes.

        Step `warmup_steps` is the first at the full rate, and so is the one after it. No step is spent at a rate of 0:
        transformers' schedules spend the first step of a warm-up there, and ours stands one step ahead of theirs in the
        warm-up, and with them afterwards.
        """
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = min((step - 1 - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1), 1.0)
        return 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def run_steps(settings: TrainConfig, loader: BatchLoader, *, steps_done: int) -> int:
    """Returns the optimizer steps of a whole run whose loader stands behind `steps_done` of them.

    `train.epochs` ends where epoch number `epochs` of the loader would begin, so a run that is resumed, on other ranks
    too, ends at the same sample. Raises ConfigError for `epochs` with a loader that has no plan to count by, or that
    stands at the end before the first step.
    """
    if settings.epochs is None:
        return settings.max_steps or DEFAULT_STEPS
    if not isinstance(loader, Loader):
        raise ConfigError(
            f"train.epochs is {settings.epochs}, but a {type(loader).__name__} has no plan by which steps are counted; "
            "set train.max_steps instead"
        )
    total = steps_done + steps_to_go(
        loader.plan,
        loader.state,
        epochs=settings.epochs,
        dp_world_size=loader.dp_world_size,
        grad_acc=settings.grad_acc,
    )
    if not total:
        raise ConfigError(
            f"train.epochs is {settings.epochs}, but the loader stands at epoch {loader.epoch} and no step was done; "
            "raise train.epochs, or begin with a new loader"
        )
    return total


def steps_to_go(plan: Plan, place: LoaderState, *, epochs: int, dp_world_size: int, grad_acc: int) -> int:
    """Returns the optimizer steps from a place to the head of epoch `epochs`: the groups of `micro_batch_groups`.

    grad_acc: micro-batches a step where the plan has no `grad_accs`. The first micro-batch of a step decides for the
    step, and no step spans two epochs.
    """
    total = 0
    sizes = plan.grad_accs or (grad_acc,)
    num_batches = plan.num_batches  # which a plan of buckets counts each time
    while place.epoch < epochs:
        micro_steps = num_steps(num_batches, dp_world_size, tail=plan.tail, start=place.position)
        if len(set(sizes)) == 1:
            total += -(-micro_steps // sizes[0])
        elif micro_steps:
            firsts = place.position + dp_world_size * np.arange(micro_steps)
            buckets = plan.order(place.seed, place.epoch).buckets(firsts)
            total += _num_groups(np.asarray(sizes)[buckets].tolist())
        place = place.next_epoch()
    return total


def _num_groups(sizes: Sequence[int]) -> int:
    """Returns the groups of an epoch. sizes: of the group that begins at each micro-batch of a rank, if one does."""
    at = count = 0
    while at < len(sizes):
        at, count = at + sizes[at], count + 1
    return count
