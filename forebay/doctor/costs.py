"""What a batch takes by its samples and their frames, from batches that were timed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ENOUGH_FOR_ONE, _ENOUGH_FOR_TWO = 3, 8
"""Batches from which on it is told whether samples or frames count, and how much of each; before that frames do."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One batch, and the seconds in which a worker filled it."""

    samples: int
    frames: int
    seconds: float


def costs(timed: Sequence[Timed]) -> tuple[float, float]:
    """Returns the seconds of a sample and of a frame, neither below 0, that say best what the batches took.

    Together they give the seconds that all batches took: what an epoch takes counts, more than any one batch.
    """
    seconds = np.array([each.seconds for each in timed])
    parts = np.array([[each.samples, each.frames] for each in timed], np.float64)
    total, sums = float(seconds.sum()), parts.sum(axis=0)
    if not len(timed) or not sums[1]:
        return (total / float(sums[0]) if len(timed) and sums[0] else 0.0), 0.0
    if len(timed) >= _ENOUGH_FOR_TWO:
        found, *_ = np.linalg.lstsq(parts, seconds, rcond=None)
        if (found >= 0).all() and (guess := float(sums @ found)) > 0:
            return float(found[0]) * total / guess, float(found[1]) * total / guess
    if len(timed) >= _ENOUGH_FOR_ONE:
        by_samples, by_frames = (float(np.abs(seconds - parts[:, i] * total / sums[i]).sum()) for i in (0, 1))
        if by_samples < by_frames:
            return total / float(sums[0]), 0.0
    return 0.0, total / float(sums[1])
