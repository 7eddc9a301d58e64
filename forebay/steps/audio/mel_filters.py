"""Triangular mel filters of any sample rate, FFT and range, in the two mel scales that speech synthesis uses."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import numpy as np

from forebay.steps.audio.spectrum import FilterBank, triangles
from forebay.store.layout import Array

logger = logging.getLogger(__name__)

MelScale = Literal["slaney", "htk"]
MelNorm = Literal["slaney", "none"]

_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0
_HZ_A_MEL = 200.0 / 3.0
_LOG_STEP = np.log(6.4) / 27.0


@cache
def mel_filters(
    *, rate_hz: int, n_fft: int, n_mels: int, f_min: float, f_max: float, mel_scale: MelScale, norm: MelNorm
) -> FilterBank:
    """Returns filters [n_fft // 2 + 1, n_mels]: triangles at equal distances on the mel scale, f_min to f_max Hz.

    mel_scale: `slaney`: Auditory Toolbox (1998), linear below 1000 Hz, logarithmic above. `htk`: The HTK Book,
    2595 log10(1 + f / 700). norm: `slaney`: each filter times 2 / (high - low), so that all have equal area; `none`:
    each has the height 1. A filter between two bins sees none of them and gives 0, which is logged.
    """
    low, high = hz_to_mel(np.array([f_min, f_max]), scale=mel_scale)
    edges_hz = mel_to_hz(np.linspace(low, high, n_mels + 2), scale=mel_scale)
    filters = triangles(np.linspace(0.0, rate_hz / 2, n_fft // 2 + 1), edges_hz)
    if norm == "slaney":
        filters *= 2.0 / (edges_hz[2:] - edges_hz[:-2])
    empty = int((~filters.any(axis=0)).sum())
    if empty:
        logger.warning(
            "audio: %d of n_mels = %d filters lie between two bins of n_fft = %d and are always 0; "
            "lower n_mels, or raise n_fft",
            empty,
            n_mels,
            n_fft,
        )
    return FilterBank.of(filters)


def hz_to_mel(hz: Array, *, scale: MelScale) -> Array:
    """Returns mels of frequencies, float64."""
    if scale == "htk":
        return np.asarray(2595.0 * np.log10(1.0 + hz / 700.0))
    above = _BREAK_MEL + np.log(np.maximum(hz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hz < _BREAK_HZ, hz / _HZ_A_MEL, above)


def mel_to_hz(mel: Array, *, scale: MelScale) -> Array:
    """Returns frequencies of mels, float64."""
    if scale == "htk":
        return np.asarray(700.0 * (10.0 ** (mel / 2595.0) - 1.0))
    return np.where(mel < _BREAK_MEL, mel * _HZ_A_MEL, _BREAK_HZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL)))
