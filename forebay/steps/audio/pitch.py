"""`pitch`: the fundamental frequency of the voice at each frame of `mel`, a field beside it.

`energy`: how loud each frame of `mel` is, a field beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from forebay.steps.audio.framing import CHUNK_ROWS, AtFrames
from forebay.steps.step import Fields
from forebay.store.layout import Array, FieldSpec

_WINDOW_S = 0.025
"""Seconds over which a period is compared with the next, as in the paper; the longest period where that is more."""
_SILENCE = 1e-10
"""The mean square of what a frame changes by, at some lag, below which it is silent: -100 dB of full scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pitch(AtFrames):
    """Field `pitch` float32 [frames] in Hz, 0 where there is no voice. The frames' middles are those of `mel`.

    YIN: de Cheveigne and Kawahara, "YIN, a fundamental frequency estimator for speech and music", JASA 111(4), 2002,
    steps 1 to 5: the squared difference of the signal and itself a lag later (eq. 6), over its mean at all shorter lags
    (eq. 8); the first dip below `threshold` is the period; a parabola through the difference of eq. 6 places it between
    samples. A frame without such a dip has no voice; the paper leaves that to its reader.
    """

    name: ClassVar[str] = "pitch"

    rate_hz: int
    min_hz: float = 65.0
    max_hz: float = 600.0
    threshold: float = 0.25
    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the field `pitch` [frames]."""
        return (FieldSpec(name="pitch", dtype="float32"),)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the pitch of every frame, computed in float64. waveforms: float32 [num_samples], `mel` took them."""
        return [{"pitch": self._pitches(waveform)} for waveform in waveforms]

    @property
    def _periods(self) -> tuple[int, int]:
        """The shortest and the longest period, in samples."""
        return max(2, int(self.rate_hz / self.max_hz)), ceil(self.rate_hz / self.min_hz)

    def _pitches(self, clip: Array) -> Array:
        first, last = self._periods
        window = max(round(_WINDOW_S * self.rate_hz), last)
        pitches = np.zeros(int(self.num_frames(np.array(clip.size))), np.float32)
        for frames, rows in self._rows(clip, len(pitches), window + last + 1):
            difference = _differences(rows, window, last + 2)
            period = _periods(difference, first=first, last=last, threshold=self.threshold)
            voiced = (period > 0) & (difference.max(axis=1) > _SILENCE * window)
            np.divide(self.rate_hz, period, out=pitches[frames], where=voiced, casting="same_kind")
        return pitches

    def _rows(self, clip: Array, num_frames: int, length: int) -> Iterator[tuple[slice, Array]]:
        """Yields which frames come, and `length` samples around the middle of each, float64; zeros beyond the clip."""
        middles = self.centre(np.arange(num_frames))
        before = length // 2
        signal = np.pad(clip.astype(np.float64), (before, length))
        rows = np.lib.stride_tricks.sliding_window_view(signal, length)
        for start in range(0, num_frames, CHUNK_ROWS):
            taken = middles[start : start + CHUNK_ROWS]
            yield slice(start, start + len(taken)), rows[taken]


def _differences(rows: Array, window: int, lags: int) -> Array:
    """Returns eq. 6, float64 [frames, lags]: the sum of (x[j] - x[j + lag])^2 over the `window` first samples j."""
    size = 1 << (rows.shape[1] - 1).bit_length()
    spectrum = np.fft.rfft(rows, size)
    head = np.fft.rfft(rows[:, :window], size)
    products = np.fft.irfft(spectrum * head.conj(), size)[:, :lags]
    energies = np.cumsum(np.pad(np.square(rows), ((0, 0), (1, 0))), axis=1)
    moved = energies[:, window : window + lags] - energies[:, :lags]
    difference = moved[:, :1] + moved - 2 * products
    difference[:, 0] = 0.0
    return np.asarray(np.maximum(difference, 0.0))


def _periods(difference: Array, *, first: int, last: int, threshold: float) -> Array:
    """Returns the period of every frame in samples, float64 [frames], 0 where no lag of first to last is one.

    difference: of lags 0 to last + 1.
    """
    sums = np.cumsum(difference[:, 1:], axis=1)
    lags = np.arange(1, difference.shape[1])
    with np.errstate(invalid="ignore", divide="ignore"):
        normalized = np.where(sums > 0, difference[:, 1:] * lags / sums, 1.0)  # eq. 8; column i is lag i + 1
    here = normalized[:, first - 1 : last]
    is_dip = (here < threshold) & (here <= normalized[:, first : last + 1])
    if first > 1:
        is_dip &= here < normalized[:, first - 2 : last - 1]
    lag = is_dip.argmax(axis=1) + first
    rows = np.arange(len(difference))
    before, at, behind = (difference[rows, lag + step] for step in (-1, 0, 1))
    curve = before + behind - 2 * at
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = np.where(curve > 0, (before - behind) / (2 * curve), 0.0)
    return np.where(is_dip.any(axis=1), lag + np.clip(shift, -1.0, 1.0), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy(AtFrames):
    """Field `energy` float32 [frames]: the L2 norm of the magnitudes of a frame's spectrum.

    FastSpeech 2 (Ren et al. 2020, section 2.3): "the L2-norm of the amplitude of each STFT frame". The frames are those
    of `mel`.
    """

    name: ClassVar[str] = "energy"

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the field `energy` [frames]."""
        return (FieldSpec(name="energy", dtype="float32"),)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the energy of every frame. waveforms: float32 [num_samples] that `mel` accepted."""
        return [{"energy": self._energies(waveform)} for waveform in waveforms]

    def _energies(self, clip: Array) -> Array:
        energies = np.empty(int(self.num_frames(np.array(clip.size))), np.float32)
        for frames, power in self.power(clip):
            energies[frames] = np.sqrt(power.sum(axis=1, dtype=np.float64))[: frames.stop - frames.start]
        return energies
