"""What a plan and one epoch of it are, whatever kind of plan it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from forebay.errors import PlanError
from forebay.store.layout import Array, Ints

Tail = Literal["short", "drop", "pad"]


class EpochOrder(Protocol):
    """One epoch: position to micro-batch, a function of (plan, seed, epoch, position) and nothing else."""

    def __len__(self) -> int: ...

    def batch(self, position: int) -> Ints:
        """Returns the sample indices of one micro-batch, int64 [batch size]. IndexError outside 0..len-1."""
        ...

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """Returns several micro-batches at once: the same as `batch` one by one, at a fraction of the cost a batch."""
        ...

    def bucket(self, position: int) -> int:
        """Returns the shape class of one micro-batch: its bucket, or its place in a window sorted by length."""
        ...

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the shape classes of several micro-batches, int64 [num_positions]."""
        ...


class Plan(Protocol):
    """Which samples form which micro-batch; no seed, no epoch: one for all."""

    @property
    def num_batches(self) -> int:
        """Micro-batches of one epoch, over all ranks; the same for every seed and epoch."""
        ...

    @property
    def lockstep(self) -> int:
        """Micro-batches that come in a row from one shape class."""
        ...

    @property
    def tail(self) -> Tail:
        """What becomes of what is incomplete, see `forebay.plan.cursor`."""
        ...

    @property
    def grad_accs(self) -> tuple[int, ...] | None:
        """Micro-batches an optimizer step of each shape class, where the plan says so; None: `train.grad_acc`."""
        ...

    def order(self, seed: int, epoch: int) -> EpochOrder:
        """Returns epoch `epoch` (0 or more) under `seed` (any integer)."""
        ...


def check_epoch(epoch: int) -> None:
    """Raises PlanError for a negative epoch."""
    if epoch < 0:
        raise PlanError(f"epoch is {epoch}, wanted 0 or more")
