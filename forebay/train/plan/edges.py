"""Where buckets end: the configured edges, or k edges that leave the least padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from forebay.config import PlanConfig
from forebay.errors import PlanError
from forebay.train.plan.interface import Array

MAX_BINS = 1024
"""Of the histogram that edges are chosen on: 30 ms apart for 30 s. Twice as many gain 0.004 points of padding."""
_PIECE = 2**20


def bucket_edges(durations: Array, *, sample_rate_hz: int, settings: PlanConfig) -> list[int]:
    """Returns the upper edges of the buckets, rising, in audio samples; with `k` at most so many as there are lengths.

    Configured edges are compared as the decimals that the config shows: 0.1 s at 16 kHz is 1600 samples.
    """
    if settings.k is None:
        return [math.ceil(Fraction(repr(edge)) * sample_rate_hz) for edge in settings.edges_s]
    return _optimal_edges(durations, k=settings.k)


def token_edges(tokens: Array, *, settings: PlanConfig) -> list[int]:
    """Returns the upper edges, in tokens and rising, of the buckets of samples without audio: `edges`, else `k` optimal ones.

    tokens: integers [num_samples], not empty. Raises PlanError where neither is given.
    """
    if settings.edges is not None:
        return list(settings.edges)
    if settings.k is None:
        raise PlanError(
            f"{len(tokens)} samples have no audio, so edges_s cannot place them; give plan.edges in tokens (they have "
            f"{int(tokens.min())} to {int(tokens.max())}), for example edges = [32, 64, 128], or plan.k"
        )
    return _optimal_edges(tokens, k=settings.k)


def _optimal_edges(lengths: Array, *, k: int) -> list[int]:
    width = int(lengths.max()) // MAX_BINS + 1
    counts = np.zeros(MAX_BINS, dtype=np.int64)
    for start in range(0, len(lengths), _PIECE):
        counts += np.bincount(lengths[start : start + _PIECE] // width, minlength=MAX_BINS)
    held = np.flatnonzero(counts)
    tops = (held + 1) * width
    return [int(tops[last]) for last in optimal_cuts(counts[held], tops, k=k)]


def optimal_cuts(counts: Array, tops: Array, *, k: int) -> list[int]:
    """Returns the last bin of each of min(k, num_bins) buckets that together pad the least.

    counts: int64 [num_bins], samples a bin, each above 0. tops: int64 [num_bins], the lengths that bins end at, rising.
    The least is exact for samples padded to the upper edge of their bucket, sum over buckets of samples * edge: what a
    batch under a budget is sized by, and what the longest of a batch comes close to. Dynamic programme over (buckets, last
    bin), O(k * num_bins^2), in integers: the same edges on every machine; of equal ones those with the shorter first
    buckets.
    """
    num_bins = len(counts)
    below = np.concatenate(([0], np.cumsum(counts)))
    # Entry [first, last]: the cost of one bucket of these bins.
    cost = (below[1:] - below[:-1, None]) * tops
    impossible = np.iinfo(np.int64).max // 4
    cost[np.tril_indices(num_bins, -1)] = impossible
    best = cost[0]
    firsts: list[Array] = []
    for _ in range(min(k, num_bins) - 1):
        # Bins before `first` are in one bucket less.
        total = np.concatenate(([impossible], best[:-1]))[:, None] + cost
        firsts.append(total.argmin(axis=0))
        best = np.minimum(total.min(axis=0), impossible)
    return _backwards(firsts, num_bins - 1)


def _backwards(firsts: Sequence[Array], last: int) -> list[int]:
    cuts = [last]
    for chosen in reversed(firsts):
        cuts.append(int(chosen[cuts[-1]]) - 1)
    return cuts[::-1]
