"""Clips end to end in one signal, without padding to a common length: what the engine frames and transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FRAME_SAMPLES = 400

HOP_SAMPLES = 160

CENTRE_SAMPLES = FRAME_SAMPLES // 2
"""A centred frame i is centred on sample i * HOP_SAMPLES: its window begins this many samples earlier."""

BLOCK_ROWS = 32
"""Rows of one matrix product, and the grid on which clips start. In the bits of every feature.

BLAS rounds a row by the number of rows in its product and, with some kernels (OpenBLAS on AVX2), by its place among
them. A clip that starts a block has every row at a place that depends on the clip alone.
"""

_TAIL_ROWS = 2
"""Rows behind a clip's last that still see its samples; they are computed and thrown away."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Clips in one float32 signal, each at a whole block of rows; row r has FRAME_SAMPLES samples from r * HOP_SAMPLES.

    signal: float32 [num_rows * HOP_SAMPLES + FRAME_SAMPLES - HOP_SAMPLES], zero where no clip wrote.
    rows: which rows are a clip's frames, in the order of the clips.
    """

    signal: np.ndarray
    rows: tuple[slice, ...]

    @classmethod
    def zeros(cls, num_frames: Sequence[int]) -> Ragged:
        """Returns the empty layout of clips with these frame counts."""
        rows, start = [], 0
        for count in num_frames:
            rows.append(slice(start, start + count))
            start += -(-(count + _TAIL_ROWS) // BLOCK_ROWS) * BLOCK_ROWS
        return cls(np.zeros(start * HOP_SAMPLES + FRAME_SAMPLES - HOP_SAMPLES, np.float32), tuple(rows))

    @property
    def num_rows(self) -> int:
        """All rows, between clips too: a multiple of BLOCK_ROWS."""
        return self.signal.size // HOP_SAMPLES - 1

    def samples(self, index: int) -> np.ndarray:
        """Returns the samples under a clip's frames, to be written: float32 [HOP_SAMPLES * (n - 1) + FRAME_SAMPLES]."""
        rows = self.rows[index]
        return self.signal[rows.start * HOP_SAMPLES : (rows.stop - 1) * HOP_SAMPLES + FRAME_SAMPLES]

    def chunk(self, start: int, stop: int) -> np.ndarray:
        """Returns the samples under rows [start, stop), without a copy."""
        return self.signal[start * HOP_SAMPLES : (stop - 1) * HOP_SAMPLES + FRAME_SAMPLES]


def frames(signal: np.ndarray) -> np.ndarray:
    """Returns the overlapping frames of a contiguous signal [n] as a read-only view [(n - 400) // 160 + 1, 400]."""
    (step,) = signal.strides
    shape = ((signal.size - FRAME_SAMPLES) // HOP_SAMPLES + 1, FRAME_SAMPLES)
    return np.ndarray(shape, signal.dtype, signal.data, strides=(HOP_SAMPLES * step, step))
