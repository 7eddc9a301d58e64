"""How long samples are: bins of a round width, and their bars."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)
_MAX_BINS = 16
_BODY = 0.99
"""Share of the clips that gets bins of equal width; the last bin holds the longest ones whatever their length."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Durations in bins [edges_s[i], edges_s[i + 1]), the last one closed. Every clip is in exactly one.

    edges_s: float64 [bins + 1], rising. samples: int64 [bins]. hours: float64 [bins].
    """

    edges_s: Array
    samples: Array
    hours: Array

    def to_json(self) -> dict[str, Any]:
        """Returns the `histogram` part of `forebay inspect --json`."""
        return {name: getattr(self, name).tolist() for name in ("edges_s", "samples", "hours")}


def duration_histogram(durations_s: Array) -> Histogram:
    """Returns at most 17 bins of a round width from 0 that hold all durations.

    durations_s: float64 [num_samples], 0 or more. Bins are chosen for all but the longest hundredth of the clips, so
    that one clip of an hour does not push all others into one bar.
    """
    edges_s = _edges_s(durations_s)
    # Not np.histogram: it takes a duration on an edge of 0.1 s to either side, as the edge was rounded.
    bins = np.clip(np.searchsorted(edges_s, durations_s, side="right") - 1, 0, len(edges_s) - 2)
    count = len(edges_s) - 1
    return Histogram(
        edges_s=edges_s,
        samples=np.bincount(bins, minlength=count),
        hours=np.bincount(bins, weights=durations_s, minlength=count) / 3600,
    )


def count_histogram(lengths: Array) -> dict[str, list[int]]:
    """Returns `edges` and `samples`: at most 18 bins [edges[i], edges[i + 1]) of a round width, the last one closed.

    lengths: integers [num_samples], 0 or more. As of durations the longest hundredth shares the last bin; the first edge is
    near the shortest one.
    """
    if not len(lengths):
        return {"edges": [0, 1], "samples": [0]}
    low, high = int(lengths.min()), int(lengths.max())
    body = int(np.quantile(lengths, _BODY, method="higher"))
    width = next(w for w in _round_widths() if body - low < w * _MAX_BINS)
    edges = [*range(low // width * width, body + 1, width), body // width * width + width]
    edges += [high] if high > edges[-1] else []
    bins = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, len(edges) - 2)
    return {"edges": edges, "samples": np.bincount(bins, minlength=len(edges) - 1).tolist()}


def bars(counts: Array, *, width: int) -> list[str]:
    """Returns one bar of `#` a count, the largest `width` long; what is not zero has at least one."""
    top = max(int(counts.max(initial=0)), 1)
    return ["#" * (max(1, round(width * int(n) / top)) if n else 0) for n in counts]


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
