"""The steps of a run: how many there are, the micro-batches of each, and its learning rate.

Micro-batches are grouped and counted over all ranks, with the end of an epoch agreed by all.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch

from forebay.config.train import TrainConfig
from forebay.errors import ConfigError, PlanError
from forebay.plan.cursor import LoaderState, num_steps
from forebay.plan.interface import Plan
from forebay.spans import ALL_REDUCE, span
from forebay.steps.batch import IGNORED
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.loader import Loader
from forebay.train.models.objective import num_rows

SumOverRanks = Callable[[Sequence[int]], list[int]]
CountTargets = Callable[[Mapping[str, Any]], int]
"""Returns what the loss of a batch is a mean of: target tokens, or samples."""


class BatchLoader(Protocol):
    """The demands of the loop on a loader; `forebay.train.loader.Loader` is one. Every rank's gives as many batches."""

    @property
    def weight(self) -> int:
        """The weight of the batch handed out last: 1, or 0 if it only keeps this rank in step."""

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's batches of one epoch, of the next epoch at the next call."""

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch is, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Makes the next batch the one that `state` names."""

    def report(self) -> Mapping[str, Any]:
        """Returns counts so far, among them `padding`, the share of padded frames in all frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The micro-batches of one optimizer step."""

    batches: list[tuple[Batch, int]]
    """This rank's micro-batches, one at least, each with its weight, 1 or 0."""
    num_targets: int
    """Target tokens in all micro-batches of weight 1 on all ranks; 1 where there are none, since it divides."""
    num_samples: int
    """In the same micro-batches."""
    wait_s: float
    """Seconds in which this rank waited for its loader."""


def micro_batch_groups(
    loader: BatchLoader,
    *,
    size: int | Callable[[], int],
    count_targets: CountTargets,
    sum_over_ranks: SumOverRanks,
    num_ranks: int = 1,
) -> Generator[Group, None, None]:
    """Yields groups of up to `size` micro-batches for ever, epoch after epoch; a group never spans two epochs.

    size: one number, or a function that is asked before each group (`grad_acc` bucket by bucket); equal on all ranks.
    The last group of an epoch is shorter where `size` does not divide it, and is a step like any other. Closing the
    generator closes the loader's iterator. Raises PlanError where a whole epoch gives nothing, and, on every rank,
    where one rank's epoch ends before another's: the others would wait for its gradients for ever.
    """
    read = partial(_next_group, loader, count_targets=count_targets, sum_over_ranks=sum_over_ranks, num_ranks=num_ranks)
    num_groups, num_epochs = 0, 0
    while num_groups or num_epochs < 2:  # the first epoch may be empty after a resume at the very end of one
        num_groups, num_epochs = 0, num_epochs + 1
        with contextlib.ExitStack() as stack:
            epoch = iter(loader)
            if (close := getattr(epoch, "close", None)) is not None:
                stack.callback(close)  # the loader's threads stop now, not when the garbage collector comes by
            while (group := read(epoch, size=size if isinstance(size, int) else size())) is not None:
                yield group
                num_groups += 1
    raise PlanError(
        'the loader gives no batch in a whole epoch; lower plan.batch_size, or set plan.tail = "split"', code="FB502"
    )


def _next_group(
    loader: BatchLoader,
    epoch: Iterator[Batch],
    *,
    size: int,
    count_targets: CountTargets,
    sum_over_ranks: SumOverRanks,
    num_ranks: int,
) -> Group | None:
    """Returns the next group of an epoch, None at its end."""
    started_s = time.perf_counter()
    # The weight is the loader's word on the batch that it handed out last.
    batches = [(batch, loader.weight) for batch in itertools.islice(epoch, size)]
    wait_s = time.perf_counter() - started_s
    with span("bookkeeping"):
        num_targets = sum(weight * count_targets(fields_of(batch)) for batch, weight in batches)
        num_samples = sum(weight * count_samples(batch) for batch, weight in batches)
    ready, num_targets, num_samples = sum_over_ranks([bool(batches), num_targets, num_samples])
    if not ready:
        return None
    if ready != num_ranks:
        raise PlanError(
            f"{num_ranks - ready} of {num_ranks} ranks are at the end of their epoch and the others are not; give "
            "every rank as many batches, as forebay.train.make_loader does",
            code="FB704",
        )
    return Group(batches=batches, num_targets=max(num_targets, 1), num_samples=num_samples, wait_s=wait_s)


def count_samples(batch: Batch) -> int:
    """Returns the samples of a batch: its rows, or in packs the segments that hold a target (padding holds none)."""
    if "position_ids" not in batch:
        return num_rows(fields_of(batch))
    labels = batch["labels"]
    segments = (batch["position_ids"][0].flatten() == 0).cumsum(0)
    # Segments rise along the pack, so every change is a new one.
    return int((torch.diff(segments[labels.flatten() != IGNORED], prepend=segments.new_zeros(1)) != 0).sum())


def host_sum(num_ranks: int) -> SumOverRanks:
    """Returns a function that sums a list of integers over all ranks, on the host; with one rank it returns the list.

    Its own gloo group: counts that decide about the next step need not wait for the device to finish this one.
    """
    if num_ranks == 1:
        return lambda values: [int(value) for value in values]
    process_group = torch.distributed.new_group(backend="gloo")

    def sum_over_ranks(values: Sequence[int]) -> list[int]:
        counts = torch.tensor(values, dtype=torch.int64)
        with span(ALL_REDUCE):
            torch.distributed.all_reduce(counts, group=process_group)
        return [int(count) for count in counts]

    return sum_over_ranks


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
