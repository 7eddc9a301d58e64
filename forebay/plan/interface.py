"""The interface of a plan and of one epoch of it, whatever kind of plan it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from forebay.config.plan import PlanConfig
from forebay.config.plan import Tail as Tail
from forebay.errors import PlanError
from forebay.store.layout import Array, Ints


class EpochOrder(Protocol):
    """One epoch: position to micro-batch, a function of (plan, seed, epoch, position) and nothing else."""

    __slots__ = ()

    def __len__(self) -> int: ...

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """Returns several micro-batches at once: the same as `batch` one by one, at a fraction of the cost a batch."""

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the shape classes of several micro-batches, int64 [num_positions].

        A shape class is a bucket, a length class of a mixture, or a place in a window, 0 that of the shortest samples.
        """

    def batch(self, position: int) -> Ints:
        """Returns the sample indices of one micro-batch, int64 [batch size]. IndexError outside 0..len-1."""
        return self.batches([position])[0]

    def bucket(self, position: int) -> int:
        """Returns the shape class of one micro-batch. IndexError outside 0..len-1."""
        return int(self.buckets([position])[0])


class Plan(Protocol):
    """Which samples form which micro-batch; no seed, no epoch: one for all."""

    @property
    def num_batches(self) -> int:
        """Micro-batches of one epoch, over all ranks; the same for every seed and epoch."""

    @property
    def lockstep(self) -> int:
        """Micro-batches that come in a row from one shape class."""

    @property
    def tail(self) -> Tail:
        """The rule for what is incomplete, see `forebay.plan.cursor`."""

    @property
    def grad_accs(self) -> tuple[int, ...] | None:
        """Micro-batches an optimizer step of each shape class, where the plan says so; None: `train.grad_acc`."""

    @property
    def patch_classes(self) -> tuple[int, ...]:
        """Rows of items, most often patches, that packs of fixed shapes are padded to, rising; of others none."""

    def order(self, seed: int, epoch: int) -> EpochOrder:
        """Returns epoch `epoch` (0 or more) under `seed` (any integer)."""

    def described(self) -> str:
        """Returns what the plan is, for a terminal: `11 batches in 7 buckets`."""


class KeptPlan:
    """A plan that a folder keeps as flat arrays; `forebay.plan.disk` reads and writes it.

    check: called with the places of `members` that are about to be read, where they are checked at first touch.
    """

    __slots__ = ()

    members: Array
    check: Callable[[Ints], None] | None
    grad_accs: tuple[int, ...] | None = None
    patch_classes: tuple[int, ...] = ()

    def members_at(self, places: Ints) -> Ints:
        """Returns the sample indices, int64, that stand at `places` of `members`."""
        if self.check is not None:
            self.check(places)
        found: Ints = self.members[places].astype(np.int64)
        return found

    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """Returns what a folder keeps of the plan, by file name."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Returns the counts that a list of plans shows."""

    @classmethod
    @abstractmethod
    def restored(cls, kept: dict[str, Any], *, metadata: Mapping[str, Any], settings: Any) -> Self:
        """Returns the plan of a folder. kept: `arrays` and `check`. metadata: with `counts` and `figures`."""

    @abstractmethod
    def figures(self, settings: PlanConfig) -> dict[str, Any]:
        """Returns what the plan is made of beside its settings and arrays, as JSON values."""


def places_of(starts: Ints, sizes: Ints) -> Ints:
    """Returns the places of runs of these sizes, each from its start on, one run behind the other."""
    ends = np.cumsum(sizes)
    found: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)
    return found


def in_batches(samples: Ints, sizes: Ints) -> list[Ints]:
    """Returns samples as batches of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [samples[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]


def check_epoch(epoch: int) -> None:
    """Raises PlanError for a negative epoch."""
    if epoch < 0:
        raise PlanError(f"epoch is {epoch}, wanted 0 or more")


def checked_positions(positions: Sequence[int] | Array, count: int) -> Ints:
    """Returns the positions, int64 [num_positions]. Raises IndexError for one outside of an epoch of `count`."""
    where = np.asarray(positions, dtype=np.int64)
    if len(where) and not (where.min() >= 0 and where.max() < count):
        bad = int(where.min() if where.min() < 0 else where.max())
        raise IndexError(f"position {bad} is outside of the epoch's {count} micro-batches")
    return where
