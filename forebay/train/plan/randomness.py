"""How far an epoch's order is from the order in which samples are stored."""

from __future__ import annotations

import math

import numpy as np

from forebay.train.plan.interface import Array
from forebay.train.plan.permutation import Ints


class Randomness:
    """Sums over the samples of an epoch, taken in any pieces."""

    def __init__(self, num_samples: int, *, shards: Array | None = None) -> None:
        """shards: integers [num_samples], the shard that holds each sample; None: not known."""
        self._num_samples, self._shards = num_samples, shards
        self._moved, self._taken = 0, 0
        num_shards = int(shards.max()) + 1 if shards is not None else 0
        self._counts, self._sums, self._squares = (np.zeros(num_shards) for _ in range(3))

    def add(self, samples: Ints, places: Ints) -> None:
        """Counts some samples (indices) and where in the epoch's stream of samples each of them stands."""
        self._moved += int(np.abs(places - samples).sum())
        self._taken += len(samples)
        if self._shards is None:
            return
        own, where = self._shards[samples], places / self._num_samples
        for total, weights in ((self._counts, None), (self._sums, where), (self._squares, where * where)):
            total += np.bincount(own, weights, minlength=len(total))

    def to_json(self) -> dict[str, float | None]:
        """Returns `mean_displacement` and `shard_spread`, both as shares of the epoch.

        mean_displacement: between where a sample is stored and where it stands; 1/3 when any place is as likely.
        shard_spread: root mean square distance of a sample from the mean place of its shard's samples; 0.289 (1/sqrt(12))
        when a shard's samples are all over the epoch, about N / shards when they stay within N shards; None: not known.
        """
        moved = self._moved / max(self._taken * self._num_samples, 1)
        if self._shards is None:
            return {"mean_displacement": round(moved, 4), "shard_spread": None}
        held = self._counts > 0
        inside = self._squares[held] - self._sums[held] ** 2 / self._counts[held]
        spread = math.sqrt(max(float(inside.sum()), 0.0) / max(self._taken, 1))
        return {"mean_displacement": round(moved, 4), "shard_spread": round(spread, 4)}
