"""Windows: a shuffle of all samples, cut into windows of so many batches, each sorted by length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from forebay.config import PlanConfig
from forebay.errors import PlanError
from forebay.train.plan.bucket import check_lengths
from forebay.train.plan.interface import Array, Tail
from forebay.train.plan.permutation import Ints
from forebay.train.plan.window_cut import Lengths, greedy_cut
from forebay.train.plan.window_order import WindowOrder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPlan:
    """Samples by length, and the rules by which `WindowOrder` shuffles them into windows and makes micro-batches of these.

    members: int32 (int64 from 2^31 samples on) [num_samples], sample indices from the shortest sample to the longest.
    lengths: int64 [num_values], every length that occurs, rising, and starts: int64 [num_values + 1], how many samples
    are shorter: together the length of any rank.
    num_windows: whole windows, each of `batches_per_window` micro-batches.
    batch_size: samples a micro-batch; None: `budget` padded audio samples a micro-batch, which none exceeds unless it is
    one sample that does.
    last_batches: of the incomplete window at the epoch's end, under `batch_size`.
    check: called with the places of `members` that are about to be read, where they are checked at first touch.
    """

    members: Array
    lengths: Array
    starts: Array
    num_windows: int
    batches_per_window: int
    last_batches: int
    batch_size: int | None
    budget: int | None
    sample_rate_hz: int
    lockstep: int
    tail: Tail
    check: Callable[[Ints], None] | None = None

    def order(self, seed: int, epoch: int) -> WindowOrder:
        """Returns epoch `epoch` (0 or more) under `seed` (any integer)."""
        return WindowOrder(self, seed=seed, epoch=epoch)

    def members_at(self, ranks: Ints) -> Ints:
        """Returns the sample indices, int64, of ranks from the shortest sample on."""
        if self.check is not None:
            self.check(ranks)
        found: Ints = self.members[ranks].astype(np.int64)
        return found

    def lengths_at(self, ranks: Ints) -> Ints:
        """Returns the lengths, int64 in audio samples, of ranks from the shortest sample on."""
        found: Ints = self.lengths[np.searchsorted(self.starts, ranks, side="right") - 1]
        return found

    @property
    def num_batches(self) -> int:
        """Micro-batches of one epoch, over all ranks."""
        return self.num_windows * self.batches_per_window + self.last_batches

    @property
    def grad_accs(self) -> None:
        """None: windows have no calibration, `train.grad_acc` holds."""
        return

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out, other ones each epoch: under `batch_size` and `drop` an incomplete batch."""
        return len(self.members) % self.batch_size if self.batch_size and self.tail == "drop" else 0

    @property
    def repeated(self) -> int:
        """Samples taken a second time, to fill the incomplete batch: under `batch_size` and `pad`."""
        return -len(self.members) % self.batch_size if self.batch_size and self.tail == "pad" else 0


def window_plan(durations: Array, *, sample_rate_hz: int, settings: PlanConfig) -> WindowPlan:
    """Returns the plan in which every sample is in exactly one window of each epoch.

    durations: integers [num_samples], in audio samples.
    Under `batch_size` every window has `window` batches, the last one what is left. Under `batch_seconds` the number of
    windows is the smallest with which `window` batches hold any window whatever the seed, and no batch exceeds the budget.
    Raises PlanError for no samples, a negative duration (with its index), or when `drop` leaves no batch at all.
    """
    durations = np.asarray(durations)
    check_lengths(durations, settings)
    members = np.argsort(durations, kind="stable")
    lengths, counts = np.unique(durations, return_counts=True)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    windows = _counted(settings, len(durations)) or _budgeted(
        settings, Lengths(lengths.astype(np.int64), starts), sample_rate_hz=sample_rate_hz
    )
    return WindowPlan(
        members=members.astype(np.int32 if len(members) < 2**31 else np.int64),
        lengths=lengths.astype(np.int64),
        starts=starts,
        num_windows=windows.num_windows,
        batches_per_window=windows.batches_per_window,
        last_batches=windows.last_batches,
        batch_size=windows.batch_size,
        budget=windows.budget,
        sample_rate_hz=sample_rate_hz,
        lockstep=settings.lockstep,
        tail=settings.tail,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Windows:
    num_windows: int
    batches_per_window: int
    last_batches: int = 0
    batch_size: int | None = None
    budget: int | None = None


def _counted(settings: PlanConfig, num_samples: int) -> _Windows | None:
    size = settings.batch_size
    if not isinstance(size, int):
        return None
    num_batches = num_samples // size if settings.tail == "drop" else -(-num_samples // size)
    if num_batches == 0:
        raise PlanError(
            f'plan.tail = "drop" leaves none of {num_samples} samples: they fill no batch of {size}; '
            'set plan.tail = "short"'
        )
    # A window is whole when its samples are.
    num_windows = num_samples // (size * settings.window)
    return _Windows(
        num_windows=num_windows,
        batches_per_window=settings.window,
        last_batches=num_batches - num_windows * settings.window,
        batch_size=size,
    )


def _budgeted(settings: PlanConfig, lengths: Lengths, *, sample_rate_hz: int) -> _Windows:
    budget = math.floor(Fraction(repr(settings.batch_seconds)) * sample_rate_hz)
    low, high = 1, len(lengths)
    while low < high:
        middle = (low + high) // 2
        fits = _worst_cut(lengths, num_windows=middle, budget=budget, limit=settings.window) <= settings.window
        low, high = (low, middle) if fits else (middle + 1, high)
    batches = _worst_cut(lengths, num_windows=low, budget=budget, limit=settings.window)
    if len(lengths) // low < batches:
        # Some window has fewer samples than batches: hardly two samples fit into one. Then each is a window.
        low, batches = len(lengths), 1
    return _Windows(num_windows=low, batches_per_window=batches, budget=budget)


def _worst_cut(lengths: Lengths, *, num_windows: int, budget: int, limit: int) -> int:
    """Returns how many batches the longest window that a seed could make needs; what is above `limit` may be cut short.

    A window has one sample of every `num_windows` that follow each other in length, so the longest has the longest of each.
    """
    longest = -(-len(lengths) // num_windows)

    def length(place: int) -> int:
        return lengths.at(len(lengths) - 1 - (longest - 1 - place) * num_windows)

    return len(greedy_cut(length, longest, budget=budget, limit=limit + 1)) - 1
