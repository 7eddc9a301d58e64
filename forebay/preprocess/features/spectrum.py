"""The engine under every spectral feature: frames, one rfft, power, mel product and logarithm, chunk by chunk.

torch does the rfft and the logarithm, numpy the rest. Whisper's reference is itself torch.stft in float32, and bins 60 to
80 dB below a frame's loudest carry the rounding of that very FFT: numpy's and scipy's, even in float64, end 3e-5 away from
it (1e-7 with torch's), and take 1.3 to 2 times as long. The product stays out of torch because
`torch.set_float32_matmul_precision` or autocast, set for training, would change the bits of the uncached path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forebay.preprocess.features.mel import FilterBank
from forebay.preprocess.features.ragged import BLOCK_ROWS, FRAME_SAMPLES, Ragged

CHUNK_ROWS = 16 * BLOCK_ROWS
"""Rows that go through all stages together: 2.5 MB. Fewer fit the L2 cache, but pay more in calls; not in the bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """What distinguishes one log filter bank from another.

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
        spectrum.filters.multiply(_power(bins), mels)
        np.maximum(mels, np.float32(spectrum.floor), out=mels)
        log = torch.from_numpy(mels)
        _ = log.log10_() if spectrum.log == "log10" else log.log_()
    return banks


def _power(bins: np.ndarray) -> np.ndarray:
    """Returns |x|^2, float32, of a complex64 spectrum, which it overwrites: half the time of two strided products."""
    pairs = bins.view(np.float32)
    np.multiply(pairs, pairs, out=pairs)
    return pairs[:, 0::2] + pairs[:, 1::2]


def stored(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Returns a contiguous copy of float32 rows in the dtype of the store, rounded to nearest even."""
    import torch

    # torch rounds to float16 ten times as fast as numpy, to the same bits
    return torch.from_numpy(rows).half().numpy() if dtype == "float16" else rows.copy()
