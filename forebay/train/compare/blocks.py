"""Blocks of a comparison: samples that every arm trains on in its turn, and the batches that an arm makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.plan.interface import EpochOrder, Plan, Tail, checked_positions
from forebay.store.layout import Array, Ints

STEPS_A_BLOCK = 10
"""Optimizer steps of a block: random batches are drawn from a block, so a block has to hold samples of all lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step. bucket: its shape class in the config's plan, -1 for random batches.

    batches: the sample indices of its micro-batches.
    """

    bucket: int
    batches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """What every arm trains on in one turn, as the batches of the config's plan."""

    steps: tuple[Step, ...]

    @property
    def samples(self) -> list[int]:
        """The sample indices, a sample that comes twice included twice."""
        return [index for step in self.steps for batch in step.batches for index in batch]

    def shuffled(self, seed: Sequence[int], *, grad_acc: int | None = None) -> Block:
        """Returns the same samples in random batches: as many steps and micro-batches, the latter of equal size (+-1).

        A random batch has as many samples as the plan's batches of the block have on average. grad_acc: micro-batches
        of every step instead of the plan's own; of all steps no more than there are samples.
        """
        samples = np.random.default_rng(list(seed)).permutation(self.samples)
        counts = [grad_acc or len(step.batches) for step in self.steps]
        parts = iter(np.array_split(samples, sum(counts)))
        batches = [tuple(tuple(part.tolist()) for part in itertools.islice(parts, count)) for count in counts]
        return Block(tuple(Step(bucket=-1, batches=own) for own in batches))


def planned_steps(plan: Plan, *, seed: int, grad_acc: int) -> Iterator[Step]:
    """Yields the optimizer steps of a plan, epoch after epoch, as one rank takes them.

    grad_acc: micro-batches a step where the plan says nothing.
    """
    epoch = 0
    while True:
        order, position = plan.order(seed, epoch), 0
        while position < len(order):
            bucket = order.bucket(position)
            size = grad_acc if plan.grad_accs is None else plan.grad_accs[bucket]
            places = range(position, min(position + size, len(order)))
            yield Step(bucket=bucket, batches=tuple(tuple(batch.tolist()) for batch in order.batches(places)))
            position += size
        epoch += 1


def dealt(steps: Sequence[Step], num_blocks: int) -> list[Block]:
    """Returns the steps dealt to blocks bucket by bucket, so that all blocks have about the plan's share of each.

    Inside a block the steps keep the plan's order. Numbers of steps of two blocks differ by one at most. Consecutive
    steps would not do: a plan has batches of one bucket in a row, and a block of one bucket has no padding to save.
    """
    by_bucket = sorted(range(len(steps)), key=lambda place: (steps[place].bucket, place))
    return [Block(tuple(steps[place] for place in sorted(by_bucket[first::num_blocks]))) for first in range(num_blocks)]


def num_blocks(steps: int) -> int:
    """Returns into how many blocks so many steps are dealt: three at least, if there are steps, since one warms up."""
    return max(steps // STEPS_A_BLOCK, min(3, steps))


class BlockPlan(Plan):
    """A plan whose one epoch is a block; its shape classes are the steps, so that `grad_accs` says the step's size."""

    tail: Tail = "short"
    lockstep = 1

    def __init__(self, block: Block) -> None:
        self._block = block
        self._batches = [np.asarray(batch, np.int64) for step in block.steps for batch in step.batches]
        self._steps = np.repeat(np.arange(len(block.steps)), [len(step.batches) for step in block.steps])

    @property
    def num_batches(self) -> int:
        """Micro-batches of the block."""
        return len(self._batches)

    @property
    def grad_accs(self) -> tuple[int, ...]:
        """Micro-batches of each step."""
        return tuple(len(step.batches) for step in self._block.steps)

    def order(self, seed: int, epoch: int) -> EpochOrder:  # noqa: ARG002  the order is the block's, whatever the seed
        """Returns the block's order."""
        return _BlockOrder(self._batches, self._steps)

    def described(self) -> str:
        """See `Plan`."""
        return f"{self.num_batches} batches of a block"


class _BlockOrder(EpochOrder):
    """The micro-batches of a block, one after the other."""

    __slots__ = ("_batches", "_steps")

    def __init__(self, batches: list[Ints], steps: Ints) -> None:
        self._batches, self._steps = batches, steps

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """See `EpochOrder`."""
        return [self._batches[place] for place in checked_positions(positions, len(self))]

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """See `EpochOrder`."""
        found: Ints = self._steps[checked_positions(positions, len(self))]
        return found
