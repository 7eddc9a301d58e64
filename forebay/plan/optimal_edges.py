"""The edges that leave the least padding, of one length alone, or of seconds and label tokens together.

The cost of a sample is what it is padded to: the upper edges of its bucket. One length gives buckets, two give cells:
each range of seconds has token edges of its own, and a dynamic programme says how many. All in integers, so that every
machine finds the same edges.
"""

from __future__ import annotations

import numpy as np

from forebay.store.layout import Array

MAX_BINS = 1024
"""Of the histogram that edges are chosen on: 30 ms apart for 30 s. Twice as many gain 0.004 points of padding."""
CANDIDATES = 64
"""Edges on each axis that cells may have: the optimal ones of that axis alone. Twice as many gain 0.1 point of cost."""
PIECE = 2**20
"""Samples looked at in one go: numpy's own results are int64."""
IMPOSSIBLE = np.iinfo(np.int64).max // 4


def optimal_edges(lengths: Array, *, k: int) -> list[int]:
    """Returns the upper edges, rising, of at most `k` buckets of lengths, integers [num_samples]."""
    width = int(lengths.max()) // MAX_BINS + 1
    counts = np.zeros(MAX_BINS, dtype=np.int64)
    for start in range(0, len(lengths), PIECE):
        counts += np.bincount(lengths[start : start + PIECE] // width, minlength=MAX_BINS)
    held = np.flatnonzero(counts)
    tops = (held + 1) * width
    return [int(tops[last]) for last in optimal_cuts(counts[held], tops, k=k)]


def optimal_cells(
    durations: Array, tokens: Array, *, token_cost: int, k: int
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Returns the upper edges of ranges of durations, and for each its upper edges in tokens: at most `k` cells.

    durations, tokens: integers [num_samples], not empty. token_cost: of a token, in units of a duration. The least is
    exact for samples padded to the upper edges of their cell, where an axis has at most `CANDIDATES` lengths.
    """
    edges, token_edges = optimal_edges(durations, k=CANDIDATES), optimal_edges(tokens, k=CANDIDATES)
    shape = len(edges), len(token_edges)
    counts = np.zeros(shape, dtype=np.int64)
    for start in range(0, len(durations), PIECE):
        pairs = zip((edges, token_edges), (durations, tokens), strict=True)
        rows, columns = (np.searchsorted(tops, found[start : start + PIECE], side="right") for tops, found in pairs)
        counts += np.bincount(rows * shape[1] + columns, minlength=counts.size).reshape(shape)
    tops, token_tops = np.array(edges), np.array(token_edges)
    padded = _costs(counts.sum(1), tops) + token_cost * _least_tokens(counts, token_tops, k=k)
    found_edges, cells, first = [], [], 0
    for last, number in cheapest(padded, k=k):
        own = counts[first : last + 1].sum(0)
        held = np.flatnonzero(own)
        cuts = optimal_cuts(own[held], token_tops[held], k=number)
        found_edges.append(edges[last])
        cells.append(tuple(token_tops[held[cuts]].tolist()))
        first = last + 1
    return found_edges, tuple(cells)


def optimal_cuts(counts: Array, tops: Array, *, k: int) -> list[int]:
    """Returns the last bin of each of min(k, num_bins) buckets that together pad the least.

    counts: int64 [num_bins], samples a bin, each above 0. tops: int64 [num_bins], the lengths that bins end at, rising.
    The least is exact for samples padded to the upper edge of their bucket, sum over buckets of samples * edge: what a
    batch under a budget is sized by, and what the longest of a batch comes close to. O(k * num_bins^2); of equal
    edges those with the shorter first buckets.
    """
    return [last for last, _ in cheapest(_costs(counts, tops)[None], k=k)]


def _costs(counts: Array, tops: Array) -> Array:
    """Returns the cost of one bucket of the bins from `first` to `last`: int64 [first, last]."""
    below = np.concatenate(([0], np.cumsum(counts)))
    cost: Array = (below[1:] - below[:-1, None]) * tops
    cost[np.tril_indices(len(counts), -1)] = IMPOSSIBLE
    return cost


def cheapest(costs: Array, *, k: int) -> list[tuple[int, int]]:
    """Returns the last bin and the cells of each range, where all ranges together cost least with at most `k` cells.

    costs: int64 [most, num_bins, num_bins]: of a range with 1 to `most` cells, by its first and last bin. Dynamic
    programme over (cells so far, last bin).
    """
    most, num_bins = costs.shape[:2]
    start = np.full(num_bins + 1, IMPOSSIBLE)
    start[0] = 0
    best, chosen = [start], [np.zeros(num_bins, np.int64)]
    for cells in range(1, min(k, most * num_bins) + 1):
        # The bins before `first` have the other cells.
        before = np.stack([best[cells - own][:-1] for own in range(1, min(cells, most) + 1)])
        total = (before[:, :, None] + costs[: len(before)]).reshape(-1, num_bins)
        chosen.append(total.argmin(axis=0))
        best.append(np.concatenate(([IMPOSSIBLE], np.minimum(total.min(axis=0), IMPOSSIBLE))))
    left, end, found = int(np.argmin([reached[-1] for reached in best])), num_bins, []
    while end:
        own, first = divmod(int(chosen[left][end - 1]), num_bins)
        found.append((end - 1, own + 1))
        left, end = left - own - 1, first
    return found[::-1]


def _least_tokens(counts: Array, tops: Array, *, k: int) -> Array:
    """Returns the tokens, padded, of ranges with at most 1 to min(k, num_tops) cells: int64 [cells, first, last].

    counts: int64 [num_bins, num_tops]. Ranges that end before they begin have 0.
    """
    num_bins, num_tops = counts.shape
    found = np.zeros((min(k, num_tops), num_bins, num_bins), np.int64)
    for first in range(num_bins):
        own = np.cumsum(counts[first:], axis=0)
        highest = num_tops - 1 - np.argmax(own[:, ::-1] > 0, axis=1)
        costs = np.stack([_costs(row, tops) for row in own])
        best = costs[:, 0]
        for number in range(len(found)):
            found[number, first, first:] = np.take_along_axis(best, highest[:, None], axis=1)[:, 0]
            before = np.concatenate((np.full((len(own), 1), IMPOSSIBLE), best[:, :-1]), axis=1)
            best = np.minimum(best, (before[:, :, None] + costs).min(axis=1))
    return found
