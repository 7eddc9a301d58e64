"""Triangular mel filter banks in the two conventions that our features need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from forebay.preprocess.features.ragged import BLOCK_ROWS

_NYQUIST_HZ = 8000
_BAND_MELS = 16
"""Filters of one product. Triangles are narrow: 16 neighbours see a quarter of the bins or less, so most of a dense product
is zeros (its time falls to 0.31 for 128 mels, to 0.44 for 80). In the bits."""
_SLANEY_BREAK_HZ = 1000.0
_SLANEY_BREAK_MEL = 15.0
_SLANEY_LOG_STEP = float(np.log(6.4)) / 27.0


@dataclass(frozen=True, slots=True)
class FilterBank:
    """Filters [bins, mels] cut into bands of neighbouring mels with the bins that any of them sees.

    matrix: float32 [bins, mels], read-only; bands: (bins, mels, contiguous copy of that part of the matrix).
    """

    matrix: np.ndarray
    bands: tuple[tuple[slice, slice, np.ndarray], ...]

    @classmethod
    def of(cls, filters: np.ndarray) -> FilterBank:
        """Returns the bank of a matrix, rounded to float32."""
        matrix = filters.astype(np.float32)
        matrix.flags.writeable = False
        bands = []
        for first in range(0, matrix.shape[1], _BAND_MELS):
            mels = slice(first, first + _BAND_MELS)
            seen = np.flatnonzero(matrix[:, mels].any(axis=1))
            bins = slice(int(seen[0]), int(seen[-1]) + 1)
            bands.append((bins, mels, np.ascontiguousarray(matrix[bins, mels])))
        return cls(matrix, tuple(bands))

    def multiply(self, power: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` [rows, mels] with power [rows, bins] times the filters, BLOCK_ROWS rows a product.

        Both are float32 and C-contiguous, rows a multiple of BLOCK_ROWS.
        """
        power, out = (x.reshape(-1, BLOCK_ROWS, x.shape[1]) for x in (power, out))
        for bins, mels, weights in self.bands:
            np.matmul(power[:, :, bins], weights, out=out[:, :, mels])


@cache
def slaney_filters(n_mels: int) -> FilterBank:
    """Returns the filters of Whisper's log-mel, [201, n_mels]: 0 to 8000 Hz, each of equal area.

    Slaney, Auditory Toolbox (1998): linear below 1000 Hz, logarithmic above; area normalisation 2 / (high - low).
    """
    edges_hz = _slaney_to_hz(np.linspace(0.0, _hz_to_slaney(_NYQUIST_HZ), n_mels + 2))
    filters = _triangles(np.linspace(0, _NYQUIST_HZ, 201), edges_hz)
    return FilterBank.of(filters * (2.0 / (edges_hz[2:] - edges_hz[:-2])))


@cache
def kaldi_filters() -> FilterBank:
    """Returns the filters of Kaldi's fbank, [257, 80]: 20 to 8000 Hz, triangles in the mel domain.

    Kaldi, feat/mel-computations.h: mel(f) = 1127 ln(1 + f / 700), no area normalisation.
    """
    bins_mel = _hz_to_kaldi(_NYQUIST_HZ / 256 * np.arange(257))
    low, high = _hz_to_kaldi(np.array([20.0, _NYQUIST_HZ]))
    return FilterBank.of(_triangles(bins_mel, np.linspace(low, high, 82)))


def _triangles(bins: np.ndarray, edges: np.ndarray) -> np.ndarray:
    widths = np.diff(edges)
    distance = edges[None, :] - bins[:, None]
    rising, falling = -distance[:, :-2] / widths[:-1], distance[:, 2:] / widths[1:]
    return np.asarray(np.maximum(0.0, np.minimum(rising, falling)))


def _hz_to_slaney(hz: float) -> float:
    return float(_SLANEY_BREAK_MEL + np.log(hz / _SLANEY_BREAK_HZ) / _SLANEY_LOG_STEP)


def _slaney_to_hz(mel: np.ndarray) -> np.ndarray:
    above = _SLANEY_BREAK_HZ * np.exp(_SLANEY_LOG_STEP * (mel - _SLANEY_BREAK_MEL))
    return np.where(mel < _SLANEY_BREAK_MEL, 200.0 * mel / 3.0, above)


def _hz_to_kaldi(hz: np.ndarray) -> np.ndarray:
    return np.asarray(1127.0 * np.log(1.0 + hz / 700.0))
