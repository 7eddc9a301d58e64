"""A plan of windows and its order: a shuffle of all samples, cut into windows, each sorted and cut into batches.

Any position is computed at the cost of the one window that holds it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np

from forebay.config.plan import PlanConfig, WindowConfig
from forebay.errors import PlanError
from forebay.plan.interface import EpochOrder, KeptPlan, Tail, check_epoch, checked_positions
from forebay.plan.make_buckets import check_lengths
from forebay.plan.permutation import Permutations, derive_key
from forebay.store.layout import Array, Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPlan(KeptPlan):
    """Samples by length, and the rules by which `WindowOrder` makes windows of them, and micro-batches of the windows.

    members: int32 (int64 from 2^31 samples on) [num_samples], sample indices from the shortest sample to the longest.
    lengths: int64 [num_values], every length that occurs, rising, and starts: int64 [num_values + 1], how many samples
    are shorter: together the length of any rank.
    num_windows: whole windows, each of `batches_per_window` micro-batches.
    batch_size: samples a micro-batch; None: `budget` padded audio samples a micro-batch, which none exceeds unless it
    is one sample that does.
    last_batches: of the incomplete window at the epoch's end, under `batch_size`.
    """

    members: Array
    lengths: Array
    starts: Array
    num_windows: int
    batches_per_window: int
    last_batches: int = 0
    batch_size: int | None = None
    budget: int | None = None
    sample_rate_hz: int
    lockstep: int
    tail: Tail
    check: Callable[[Ints], None] | None = None

    def order(self, seed: int, epoch: int) -> WindowOrder:
        return WindowOrder(self, seed=seed, epoch=epoch)

    def lengths_at(self, ranks: Ints) -> Ints:
        """Returns the lengths, int64 in audio samples, of ranks from the shortest sample on."""
        found: Ints = self.lengths[np.searchsorted(self.starts, ranks, side="right") - 1]
        return found

    @property
    def num_batches(self) -> int:
        return self.num_windows * self.batches_per_window + self.last_batches

    def described(self) -> str:
        return f"{self.num_batches} batches in {self.num_windows} windows"

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out, other ones each epoch: under `batch_size` and `drop`."""
        return len(self.members) % self.batch_size if self.batch_size and self.tail == "drop" else 0

    @property
    def repeated(self) -> int:
        """Samples taken a second time, to fill the incomplete batch: under `batch_size` and `pad`."""
        return -len(self.members) % self.batch_size if self.batch_size and self.tail == "pad" else 0

    def arrays(self) -> dict[str, Array]:
        return {"members": self.members, "lengths": self.lengths, "starts": self.starts}

    def counts(self) -> dict[str, int]:
        rate, samples = self.sample_rate_hz, len(self.members)
        return {"sample_rate_hz": rate, "num_samples": samples, "num_batches": self.num_batches}

    def figures(self, _settings: PlanConfig) -> dict[str, Any]:
        names = ("num_windows", "batches_per_window", "last_batches", "batch_size", "budget")
        return {"windows": {name: getattr(self, name) for name in names}}

    @classmethod
    def restored(cls, kept: dict[str, Any], *, metadata: Mapping[str, Any], settings: WindowConfig) -> Self:
        figures = {"sample_rate_hz": metadata["sample_rate_hz"], **metadata["windows"]}
        return cls(**kept, **figures, lockstep=settings.lockstep, tail=settings.tail)


def window_plan(durations: Array, *, sample_rate_hz: int, settings: WindowConfig) -> WindowPlan:
    """Returns the plan in which every sample is in exactly one window of each epoch.

    durations: integers [num_samples], in audio samples.
    Under `batch_size` every window has `window` batches, the last one what is left. Under `batch_seconds` the number of
    windows is the smallest with which `window` batches hold any window whatever the seed, and no batch exceeds the
    budget.
    Raises PlanError for no samples, a negative duration (with its index), or when `drop` leaves no batch at all.
    """
    durations = np.asarray(durations)
    check_lengths(durations, settings)
    members = np.argsort(durations, kind="stable")
    lengths, counts = np.unique(durations, return_counts=True)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    windows = _counted(settings, len(durations)) or _budgeted(settings, lengths, starts, sample_rate_hz=sample_rate_hz)
    return WindowPlan(
        members=members.astype(np.int32 if len(members) < 2**31 else np.int64),
        lengths=lengths.astype(np.int64),
        starts=starts,
        **windows,
        sample_rate_hz=sample_rate_hz,
        lockstep=settings.lockstep,
        tail=settings.tail,
    )


def _counted(settings: WindowConfig, num_samples: int) -> dict[str, Any] | None:
    size = settings.batch_size
    if not isinstance(size, int):
        return None
    num_batches = num_samples // size if settings.tail == "drop" else -(-num_samples // size)
    if num_batches == 0:
        raise PlanError(
            f'plan.tail = "drop" leaves none of {num_samples} samples: they fill no batch of {size}; '
            'set plan.tail = "split"',
            code="FB502",
        )
    # A window is whole when its samples are.
    num_windows = num_samples // (size * settings.window)
    last_batches = num_batches - num_windows * settings.window
    windows = {"num_windows": num_windows, "batches_per_window": settings.window, "last_batches": last_batches}
    return {**windows, "batch_size": size}


def _budgeted(settings: WindowConfig, lengths: Array, starts: Array, *, sample_rate_hz: int) -> dict[str, Any]:
    budget = math.floor(Fraction(repr(settings.batch_seconds)) * sample_rate_hz)
    values, bounds = lengths.tolist(), starts.tolist()  # a search in lists is faster, one by one
    count = bounds[-1]

    def length(rank: int) -> int:
        return int(values[bisect.bisect_right(bounds, rank) - 1])

    def batches_of(num_windows: int) -> int:
        return _worst_cut(length, count, num_windows=num_windows, budget=budget, limit=settings.window)

    # The fewest windows that hold their samples in `window` batches: more of them are smaller.
    low = 1 + bisect.bisect_left(range(1, count), -settings.window, key=lambda windows: -batches_of(windows))
    batches = batches_of(low)
    if count // low < batches:
        # Some window has fewer samples than batches: hardly two samples fit into one. Then each is a window.
        low, batches = count, 1
    return {"num_windows": low, "batches_per_window": batches, "budget": budget}


def _worst_cut(length: Callable[[int], int], count: int, *, num_windows: int, budget: int, limit: int) -> int:
    """Returns how many batches the longest window that a seed could make needs; what is above `limit` may be cut short.

    A window has one sample of every `num_windows` that follow each other in length, so the longest window has the
    longest sample of each.
    """
    longest = -(-count // num_windows)

    def in_window(place: int) -> int:
        return length(count - 1 - (longest - 1 - place) * num_windows)

    return len(greedy_cut(in_window, longest, budget=budget, limit=limit + 1)) - 1


def greedy_cut(length: Callable[[int], int], count: int, *, budget: int, limit: int) -> list[int]:
    """Returns the bounds of the fewest batches that keep to a budget, from 0 to `count`.

    length: of places 0 to count - 1, never falling. A batch costs its longest sample (a length of 0 counts as
    1) times its samples, and has at least one. Batches are taken from the longest sample down, each as large as it can
    be: what is left is then the least for the others. Stops behind `limit` batches, with what is left in the first.
    """
    bounds = [count]
    while bounds[-1] and len(bounds) < limit:
        end = bounds[-1]
        bounds.append(max(end - max(budget // max(length(end - 1), 1), 1), 0))
    if bounds[-1]:
        bounds.append(0)
    return bounds[::-1]


def even_cut(lengths: list[int], *, num_batches: int, budget: int) -> list[int]:
    """Returns the bounds of exactly `num_batches` batches, the costliest as cheap as it can be (to 1 in 512).

    lengths: never falling, at least `num_batches` of them; as many batches can hold them within `budget`. No batch is
    above the budget, but for single samples that are.
    """
    count = len(lengths)
    low, high = sum(lengths) // num_batches, budget
    while high - low > high >> 9:
        middle = (low + high) // 2
        cut = greedy_cut(lengths.__getitem__, count, budget=middle, limit=num_batches + 1)
        low, high = (low, middle) if len(cut) - 1 <= num_batches else (middle + 1, high)
    bounds = greedy_cut(lengths.__getitem__, count, budget=high, limit=count + 1)
    while len(bounds) - 1 < num_batches:
        # Halving the costliest never makes a batch dearer.
        costs = [(b - a > 1) * (b - a) * lengths[b - 1] + (b - a > 1) for a, b in itertools.pairwise(bounds)]
        place = costs.index(max(costs))
        bounds.insert(place + 1, (bounds[place] + bounds[place + 1]) // 2)
    return bounds


WINDOW_VERSION = 1
"""Bumped when the same plan, seed, epoch and position give other samples."""


class WindowOrder(EpochOrder):
    """One epoch of a window plan: a function of (plan, seed, epoch, position) and nothing else.

    Under `batch_size` one keyed permutation of all samples is cut into windows. Under a budget the shuffle is
    stratified: of every `num_windows` samples that follow each other in length each window gets one, by a keyed
    permutation for each such stratum. All windows are then so alike that a fixed number of batches holds each of them
    within the budget. So the epoch is seekable: else all batches before a position would have to be counted.

    A window is sorted by length and cut into its batches. `lockstep` windows form a group: the group takes the batches
    of one place (of nearly equal lengths) from all its windows in a row, place by place in keyed order, so that ranks
    step through equal shapes. The windows that fill no group come last, then the incomplete window.
    """

    def __init__(self, plan: WindowPlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer). Costs O(samples of a window)."""
        check_epoch(epoch)
        self.plan, self.seed, self.epoch = plan, seed, epoch
        self._strata = 0 if plan.batch_size else -(-len(plan.members) // plan.num_windows)
        sizes = [plan.num_windows] * self._strata if self._strata else [len(plan.members)]
        self._line = Permutations(sizes, self._key("samples"))
        # What was made of the group that positions fell into last; they come in a row.
        self._windows: dict[int, list[Ints]] = {}
        self._classes: dict[int, Ints] = {}

    def __len__(self) -> int:
        return self.plan.num_batches

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the places of several micro-batches in their sorted windows, int64 [num_positions]."""
        return np.array([place for _, place in self._locate(positions)], dtype=np.int64)

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        """See `EpochOrder`; the batches of one group cost little more than one of them."""
        return [self._window(window)[place] for window, place in self._locate(positions)]

    def _locate(self, positions: Sequence[int] | Array) -> list[tuple[int, int]]:
        """Returns window and place inside the sorted window of each micro-batch."""
        return [self._place(position) for position in checked_positions(positions, len(self)).tolist()]

    def _place(self, position: int) -> tuple[int, int]:
        plan = self.plan
        group, inside = divmod(position, plan.lockstep * plan.batches_per_window)
        first = group * plan.lockstep
        windows, batches = min(plan.lockstep, plan.num_windows - first), plan.batches_per_window
        if inside >= windows * batches:  # also where no whole window is left
            inside, first = inside - windows * batches, plan.num_windows
            windows, batches = 1, plan.last_batches
        slot, window = divmod(inside, windows)
        return first + window, int(self._places(first, batches)[slot])

    def _places(self, first: int, batches: int) -> Ints:
        """Returns the order in which the group of windows from `first` on takes its batches."""
        found = self._classes.get(first)
        if found is None:
            found = Permutations([batches], self._key(f"places {first}"))(np.arange(batches))
            self._classes.clear()
            self._classes[first] = found
        return found

    def _window(self, window: int) -> list[Ints]:
        """Returns the batches of one window, from the shortest samples to the longest."""
        found = self._windows.get(window)
        if found is None:
            if len(self._windows) >= self.plan.lockstep:
                self._windows.clear()
            ranks, bounds = self._stratified(window) if self._strata else self._counted(window)
            samples = self.plan.members_at(ranks)
            found = self._windows[window] = [samples[a:b] for a, b in itertools.pairwise(bounds)]
        return found

    def _stratified(self, window: int) -> tuple[Ints, list[int]]:
        strata = np.arange(self._strata)
        ranks = self._line(np.full(self._strata, window), member=strata) + strata * self.plan.num_windows
        # The incomplete stratum is that of the shortest samples.
        ranks -= self._strata * self.plan.num_windows - len(self.plan.members)
        ranks = ranks[ranks >= 0]
        assert self.plan.budget is not None
        lengths = self.plan.lengths_at(ranks).tolist()
        return ranks, even_cut(lengths, num_batches=self.plan.batches_per_window, budget=self.plan.budget)

    def _counted(self, window: int) -> tuple[Ints, list[int]]:
        size, count = self.plan.batch_size, len(self.plan.members)
        assert size is not None
        start = window * self.plan.batches_per_window * size
        batches = self.plan.batches_per_window if window < self.plan.num_windows else self.plan.last_batches
        # The places behind the end are those of the head again, under `pad`.
        stop = start + batches * size if self.plan.tail == "pad" else min(start + batches * size, count)
        ranks = np.sort(self._line(np.arange(start, stop) % count))
        return ranks, [min(place * size, len(ranks)) for place in range(batches + 1)]

    def _key(self, purpose: str) -> int:
        return derive_key("forebay window", WINDOW_VERSION, self.seed, self.epoch, purpose)
