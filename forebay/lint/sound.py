"""What is measured of a decoded clip: how quiet, how clipped, how wide its band is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forebay.lint.limits import Limits
from forebay.store.layout import Array

_PIECE_S = 0.02
_WINDOW = 512
_WINDOWS = 32
"""The loudest ones are enough to see where a band ends."""
_ABOVE = 0.6
"""Of the band. Half of it would meet the slope of a filter that ends there: torchaudio's reaches to 0.58."""


class Sound(NamedTuple):
    """What a clip is like.

    loudest_dbfs: level of its loudest piece of 20 ms. quiet: share of pieces below `quiet_dbfs`. clipped: share of
    samples at full scale. offset: magnitude of its mean, 1.0 being full scale.
    """

    loudest_dbfs: float
    quiet: float
    clipped: float
    offset: float


def measured_sound(clip: Array, rate_hz: int, limits: Limits) -> Sound:
    """Returns what a clip is like. clip: int16 or float32 (1.0 is full scale) [num_samples], at least one."""
    samples = _as_float(clip)
    levels = _levels(samples, max(1, round(_PIECE_S * rate_hz)))
    return Sound(
        loudest_dbfs=float(levels.max()),
        quiet=float(np.mean(levels < limits.quiet_dbfs)),
        clipped=_clipped(samples, limits.full_scale),
        offset=abs(float(samples.mean(dtype=np.float64))),
    )


def _as_float(clip: Array) -> Array:
    samples = clip.astype(np.float32)
    return samples * np.float32(2**-15) if clip.dtype == np.int16 else samples


def _levels(samples: Array, size: int) -> Array:
    """Returns the level of each piece in dBFS: of its deviation from its mean, so that an offset is no sound."""
    count = max(1, len(samples) // size)
    pieces = samples[: count * size].reshape(count, -1)
    power = np.einsum("ij,ij->i", pieces, pieces) / pieces.shape[1] - pieces.mean(axis=1) ** 2
    return np.asarray(10 * np.log10(np.maximum(power, 1e-20)))


def _clipped(samples: Array, full_scale: float) -> float:
    # The extremes cost half of the comparison, and most clips end here.
    if samples.max() < full_scale and samples.min() > -full_scale:
        return 0.0
    return float(np.mean(np.abs(samples) >= full_scale))


def band_db(clip: Array) -> float:
    """Returns the power in the upper part of a clip's band over all of its power, in dB; NaN where that cannot be told.

    clip: int16 or float32 [num_samples]. It is seen in the 32 loudest of its windows of 512 samples.
    """
    count = len(clip) // _WINDOW
    if not count:
        return float("nan")
    windows = _as_float(clip[: count * _WINDOW]).reshape(count, _WINDOW)
    power = np.einsum("ij,ij->i", windows, windows)
    loudest = windows[np.argpartition(-power, _WINDOWS - 1)[:_WINDOWS]] if count > _WINDOWS else windows
    spectrum = (np.abs(np.fft.rfft(loudest * np.hanning(_WINDOW), axis=1)) ** 2).sum(axis=0)
    total = float(spectrum.sum())
    if total < 1e-6:
        return float("nan")
    return float(10 * np.log10(max(float(spectrum[int(_ABOVE * len(spectrum)) :].sum()) / total, 1e-20)))
