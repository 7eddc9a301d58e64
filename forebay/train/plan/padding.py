"""Frames of batches that are padded to their own longest sample, summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.train.plan.interface import Array
from forebay.train.plan.permutation import Ints, Permutations, derive_key

CHUNK = 2**18
"""Samples looked at in one go: their temporaries stay in the CPU's cache."""
_ENOUGH = 2**22
"""Samples of a shuffle that say what all of it would: its padding is known to a hundredth of a percent."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Sums over some batches: frames held, frames padded to, the squares of the latter, and how many batches they are."""

    held: int = 0
    padded_to: int = 0
    squares: float = 0.0
    batches: int = 0

    def __add__(self, other: Padding) -> Padding:
        return Padding(
            self.held + other.held,
            self.padded_to + other.padded_to,
            self.squares + other.squares,
            self.batches + other.batches,
        )

    @property
    def share(self) -> float:
        """Padded share of all frames."""
        return round(1 - self.held / self.padded_to, 6) if self.padded_to else 0.0

    @property
    def cv(self) -> float:
        """Spread of the padded size of a batch: standard deviation over mean."""
        if not self.padded_to:
            return 0.0
        ratio = self.squares * self.batches / self.padded_to**2
        return round(math.sqrt(max(ratio - 1.0, 0.0)), 4)


def padding_of(batches: Sequence[Ints], frames: Array) -> Padding:
    """Returns the sums of micro-batches, each the sample indices of one, not empty. frames: integers [num_samples]."""
    if not batches:
        return Padding()
    sizes = np.array([len(batch) for batch in batches], dtype=np.int64)
    lengths = frames[np.concatenate(batches)]
    longest = np.maximum.reduceat(lengths, np.cumsum(sizes) - sizes)
    return _summed(lengths, longest.astype(np.int64) * sizes)


def padding_in_line(lengths: Array, size: int) -> Padding:
    """Returns the sums of consecutive batches of `size`, of which the last one may be shorter."""
    full = lengths[: len(lengths) // size * size].reshape(-1, size)
    rest = lengths[full.size :]
    costs = full.max(axis=1, initial=0).astype(np.int64) * size
    if len(rest):
        costs = np.append(costs, int(rest.max()) * len(rest))
    return _summed(lengths, costs)


def padding_random_order(frames: Array, size: int, *, seed: int) -> Padding:
    """Returns the sums of a shuffle without buckets, in batches of `size`; of a shuffle longer than 4 million its head."""
    line = Permutations([len(frames)], derive_key("forebay random order", seed))
    found = Padding()
    step = max(CHUNK // size, 1) * size
    count = min(len(frames), _ENOUGH)
    for start in range(0, count, step):
        found += padding_in_line(frames[line(np.arange(start, min(start + step, count)))], size)
    return found


def _summed(lengths: Array, costs: Ints) -> Padding:
    squares = float(np.square(costs.astype(np.float64)).sum())
    return Padding(int(lengths.sum(dtype=np.int64)), int(costs.sum()), squares, len(costs))
