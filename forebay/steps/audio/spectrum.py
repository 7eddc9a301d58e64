"""The engine under every spectral feature: frames, one rfft, power, mel product and logarithm, chunk by chunk.

torch does the rfft and the logarithm, numpy the rest. Whisper's reference is itself torch.stft in float32, and bins 60
to 80 dB below a frame's loudest carry the rounding of that very FFT: numpy's and scipy's, even in float64, end 3e-5
away from it (1e-7 with torch's), and take 1.3 to 2 times as long. The product stays out of torch because
`torch.set_float32_matmul_precision` or autocast, set for training, would change the bits of the uncached path.

Below the engine stand the triangular mel filter banks in the two conventions that our features need, and Whisper's
log-mel in the part that `log_mel` and `qwen3_asr` share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from forebay.steps.audio.framing import BLOCK_ROWS, CENTRE_SAMPLES, FRAME_SAMPLES, Ragged, frames, power_of
from forebay.store.layout import Array

CHUNK_ROWS = 16 * BLOCK_ROWS
"""Rows that go through all stages together: 2.5 MB. Fewer fit the L2 cache, but pay more in calls; not in the bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """The settings that distinguish one log filter bank from another.

    write_frames: fills [rows, 400] of `dtype` with the weighted frames of a float32 signal [(rows - 1) * 160 + 400].
    dtype: of frames and rfft, as in the reference; everything behind them is float32.
    filters: of [fft_samples // 2 + 1, mels]. floor: what a smaller mel power becomes before the logarithm.
    """

    write_frames: Callable[[np.ndarray, np.ndarray], None]
    dtype: Literal["float32", "float64"]
    fft_samples: int
    filters: FilterBank
    floor: float
    log: Literal["log10", "ln"]


def log_filter_banks(spectrum: Spectrum, ragged: Ragged) -> np.ndarray:
    """Returns the log filter banks of all rows, float32 [num_rows, mels].

    A row depends on its own 400 samples and on its place in its block of BLOCK_ROWS, on nothing else.
    """
    import torch

    num_rows = ragged.num_rows
    banks = np.empty((num_rows, spectrum.filters.matrix.shape[1]), np.float32)
    padded = np.zeros((min(CHUNK_ROWS, num_rows), spectrum.fft_samples), spectrum.dtype)
    for start in range(0, num_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, num_rows)
        rows = padded[: stop - start]
        spectrum.write_frames(ragged.chunk(start, stop), rows[:, :FRAME_SAMPLES])
        bins = torch.fft.rfft(torch.from_numpy(rows)).to(torch.complex64).numpy()
        mels = banks[start:stop]
        spectrum.filters.multiply(power_of(bins), mels)
        np.maximum(mels, np.float32(spectrum.floor), out=mels)
        log = torch.from_numpy(mels)
        _ = log.log10_() if spectrum.log == "log10" else log.log_()
    return banks


def stored(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Returns a contiguous copy of float32 rows in the dtype of the store, rounded to nearest even."""
    import torch

    # torch rounds to float16 ten times as fast as numpy, to the same bits
    return torch.from_numpy(rows).half().numpy() if dtype == "float16" else rows.copy()


_NYQUIST_HZ = 8000
_BAND_MELS = 16
"""Filters of one product. Triangles are narrow: 16 neighbours see a quarter of the bins or less, so most of a dense
product is zeros (its time falls to 0.31 for 128 mels, to 0.44 for 80). In the bits."""

_SLANEY_BREAK_HZ = 1000.0
_SLANEY_BREAK_MEL = 15.0
_SLANEY_LOG_STEP = float(np.log(6.4)) / 27.0
_SLANEY_HZ_A_MEL = 200.0 / 3.0
_log = logging.getLogger(__name__)
MelScale = Literal["slaney", "htk"]


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
            bins = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
            bands.append((bins, mels, np.ascontiguousarray(matrix[bins, mels])))
        return cls(matrix, tuple(bands))

    def multiply(self, power: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` [rows, mels] with power [rows, bins] times the filters, BLOCK_ROWS rows a product.

        Both are float32 and C-contiguous, rows a multiple of BLOCK_ROWS.
        """
        power, out = (x.reshape(-1, BLOCK_ROWS, x.shape[1]) for x in (power, out))
        for bins, mels, weights in self.bands:
            np.matmul(power[:, :, bins], weights, out=out[:, :, mels])


def slaney_filters(n_mels: int) -> FilterBank:
    """Returns the filters of Whisper's log-mel, [201, n_mels]: 0 to 8000 Hz, each of equal area."""
    return mel_filters(
        rate_hz=2 * _NYQUIST_HZ,
        n_fft=FRAME_SAMPLES,
        n_mels=n_mels,
        f_min=0.0,
        f_max=_NYQUIST_HZ,
        mel_scale="slaney",
        norm="slaney",
    )


@cache
def kaldi_filters() -> FilterBank:
    """Returns the filters of Kaldi's fbank, [257, 80]: 20 to 8000 Hz, triangles in the mel domain.

    Kaldi, feat/mel-computations.h: mel(f) = 1127 ln(1 + f / 700), no area normalisation.
    """
    bins_mel = _hz_to_kaldi(_NYQUIST_HZ / 256 * np.arange(257))
    low, high = _hz_to_kaldi(np.array([20.0, _NYQUIST_HZ]))
    return FilterBank.of(triangles(bins_mel, np.linspace(low, high, 82)))


@cache
def mel_filters(
    *,
    rate_hz: int,
    n_fft: int,
    n_mels: int,
    f_min: float,
    f_max: float,
    mel_scale: MelScale,
    norm: Literal["slaney", "none"],
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
        _log.warning(
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
    above = _SLANEY_BREAK_MEL + np.log(np.maximum(hz, _SLANEY_BREAK_HZ) / _SLANEY_BREAK_HZ) / _SLANEY_LOG_STEP
    return np.where(hz < _SLANEY_BREAK_HZ, hz / _SLANEY_HZ_A_MEL, above)


def mel_to_hz(mel: Array, *, scale: MelScale) -> Array:
    """Returns frequencies of mels, float64."""
    if scale == "htk":
        return np.asarray(700.0 * (10.0 ** (mel / 2595.0) - 1.0))
    return np.where(
        mel < _SLANEY_BREAK_MEL,
        mel * _SLANEY_HZ_A_MEL,
        _SLANEY_BREAK_HZ * np.exp(_SLANEY_LOG_STEP * (mel - _SLANEY_BREAK_MEL)),
    )


def triangles(bins: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns triangular filters [bins, mels]: filter m rises from edge m to 1 at edge m + 1 and falls to edge m + 2.

    bins, edges: rising, [bins] and [mels + 2], in one unit.
    """
    widths = np.diff(edges)
    distance = edges[None, :] - bins[:, None]
    rising, falling = -distance[:, :-2] / widths[:-1], distance[:, 2:] / widths[1:]
    return np.asarray(np.maximum(0.0, np.minimum(rising, falling)))


def _hz_to_kaldi(hz: np.ndarray) -> np.ndarray:
    return np.asarray(1127.0 * np.log(1.0 + hz / 700.0))


_RANGE = 8.0
"""Decades below the loudest bin of the clip at which the logarithm is cut."""


def write_centred(clip: np.ndarray, out: np.ndarray, *, reference_samples: int) -> None:
    """Fills zeroed `out` with the clip as `torch.stft(center=True)` sees it in a signal of `reference_samples`.

    clip: float32 [n], n <= reference_samples; behind it that signal is zero. Both of its ends are mirrored, without the
    end sample itself. out: float32 [m], from CENTRE_SAMPLES before the clip's first sample on.
    """
    head = clip[1 : CENTRE_SAMPLES + 1]
    out[CENTRE_SAMPLES - head.size : CENTRE_SAMPLES] = head[::-1]
    body = min(clip.size, out.size - CENTRE_SAMPLES)
    out[CENTRE_SAMPLES : CENTRE_SAMPLES + body] = clip[:body]
    end = CENTRE_SAMPLES + reference_samples
    if out.size > end:
        out[end:] = out[end - 2 : end - 2 - (out.size - end) : -1]


def log10_mels(ragged: Ragged, *, n_mels: int) -> np.ndarray:
    """Returns log10 mel power, float32 [num_rows, n_mels], at least -10.

    Periodic Hann window, 400 point rfft, power, Slaney filters, floor 1e-10: Whisper's `log_mel_spectrogram`.
    """
    spectrum = Spectrum(
        write_frames=_write_frames,
        dtype="float32",
        fft_samples=FRAME_SAMPLES,
        filters=slaney_filters(n_mels),
        floor=1e-10,
        log="log10",
    )
    return log_filter_banks(spectrum, ragged)


def normalize(log_mels: np.ndarray) -> float:
    """Cuts a clip's log10 mels [frames, n_mels] at 8 below their maximum, maps x to (x + 4) / 4 in place.

    Returns the value of a frame of silence under the same cut, which is what padding with zeros gives.
    """
    cut = max(np.float32(log_mels.max() - np.float32(_RANGE)), np.float32(-10.0))
    np.maximum(log_mels, cut, out=log_mels)
    np.add(log_mels, np.float32(4.0), out=log_mels)
    np.multiply(log_mels, np.float32(0.25), out=log_mels)
    return float((cut + np.float32(4.0)) * np.float32(0.25))


def _write_frames(signal: np.ndarray, out: np.ndarray) -> None:
    import torch

    torch.mul(torch.from_numpy(frames(signal)), torch.from_numpy(_hann()), out=torch.from_numpy(out))


@cache
def _hann() -> np.ndarray:
    # torch's own float32 window: one that is a last bit away moves quiet bins by as much as another FFT does.
    import torch

    return torch.hann_window(FRAME_SAMPLES, dtype=torch.float32, device="cpu").numpy()
