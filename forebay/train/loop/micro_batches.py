"""The micro-batches of each optimizer step: grouped, counted over all ranks, with the end of an epoch agreed by all."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from forebay.errors import PlanError
from forebay.spans import ALL_REDUCE, span
from forebay.steps.batch import IGNORED
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.models.objective import num_rows

SumOverRanks = Callable[[Sequence[int]], list[int]]
CountTargets = Callable[[Mapping[str, Any]], int]
"""Returns what the loss of a batch is a mean of: target tokens, or samples."""


class BatchLoader(Protocol):
    """The demands of the loop on a loader; `forebay.train.loader.Loader` is one. Every rank's gives as many batches."""

    @property
    def weight(self) -> int:
        """The weight of the batch handed out last: 1, or 0 if it only keeps this rank in step."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's batches of one epoch, of the next epoch at the next call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns where the next batch is, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Makes the next batch the one that `state` names."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Returns counts so far, among them `padding`, the share of padded frames in all frames."""
        ...


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
