"""Histograms of lengths: bins of round widths, and how many samples are in each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from forebay.store.layout import Array

_WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)
_MAX_BINS = 16

_BODY = 0.99
"""Share of the clips that gets bins of equal width; the last bin holds the longest ones whatever their length."""


def duration_histogram(durations_s: Array) -> dict[str, list[float]]:
    """Returns `edges_s`, `samples` and `hours`: at most 17 bins of a round width from 0 that hold all durations.

    durations_s: float64 [num_samples], 0 or more. A clip is in exactly one bin [edges_s[i], edges_s[i + 1]), the last
    one closed. Bins are chosen for all but the longest hundredth of the clips, so that one clip of an hour does not
    push all others into one bar.
    """
    edges_s = _edges_s(durations_s)
    bins, count = _bins_of(durations_s, edges_s), len(edges_s) - 1
    hours = np.bincount(bins, weights=durations_s, minlength=count) / 3600
    return {
        "edges_s": edges_s.tolist(),
        "samples": np.bincount(bins, minlength=count).tolist(),
        "hours": hours.tolist(),
    }


def count_histogram(lengths: Array) -> dict[str, list[int]]:
    """Returns `edges` and `samples`: at most 18 bins [edges[i], edges[i + 1]) of a round width, the last one closed.

    lengths: integers [num_samples], 0 or more. As of durations the longest hundredth shares the last bin; the first
    edge is near the shortest one.
    """
    if not len(lengths):
        return {"edges": [0, 1], "samples": [0]}
    low, high = int(lengths.min()), int(lengths.max())
    body = int(np.quantile(lengths, _BODY, method="higher"))
    width = next(w for w in _round_widths() if body - low < w * _MAX_BINS)
    edges = [*range(low // width * width, body + 1, width), body // width * width + width]
    if width == 1 and high >= edges[-1]:
        edges.append(high + 1)  # no bin of one number holds the next one too
    elif high > edges[-1]:
        edges.append(high)
    return {"edges": edges, "samples": np.bincount(_bins_of(lengths, edges), minlength=len(edges) - 1).tolist()}


def range_text(low: int, high: int, *, is_exact: bool) -> str:
    """Returns what a bin [low, high) is called. is_exact: bins of its histogram have a width of 1."""
    if not is_exact:
        return f"{low:,} - {high:,}"
    return f"{low:,}" if high - low == 1 else f"{low:,} - {high - 1:,}"


def _bins_of(values: Array, edges: Array | list[int]) -> Array:
    # Not np.histogram: it takes a duration on an edge of 0.1 s to either side, as the edge was rounded.
    return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)


def _round_widths() -> Iterator[int]:
    for power in itertools.count():
        yield from (digit * 10**power for digit in (1, 2, 5))


def _edges_s(durations_s: Array) -> Array:
    longest_s = float(durations_s.max(initial=0.0))
    body_s = float(np.quantile(durations_s, _BODY, method="higher")) if len(durations_s) else 0.0
    width_s = next((w for w in _WIDTHS_S if body_s <= w * _MAX_BINS), None)
    if width_s is None:
        width_s = 3600.0 * np.ceil(body_s / 3600 / _MAX_BINS)
    count = max(1, int(np.ceil(body_s / width_s)))
    edges_s = np.round(np.arange(count + 1) * width_s, 6)
    return np.append(edges_s, longest_s) if longest_s > edges_s[-1] else edges_s
