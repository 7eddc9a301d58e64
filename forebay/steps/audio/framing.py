"""Frames of clips: of many end to end in one signal, and of one clip at any length and hop.

The engine of `spectrum.py` transforms the first. `mel`, `energy` and `pitch` share the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, TypeVar

import numpy as np

from forebay.steps.step import AudioStep
from forebay.store.layout import Array

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


Count = TypeVar("Count", int, np.ndarray)
Center = Literal[True, False, "hop"]
PadMode = Literal["reflect", "constant"]
CHUNK_ROWS = 8 * BLOCK_ROWS
"""Frames that are transformed together. Not in the bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """Where the frames of a clip lie. All lengths are in audio samples.

    A clip is framed by itself, so its frames cannot depend on other clips.
    """

    n_fft: int
    hop_length: int
    win_length: int
    center: Center
    pad_mode: PadMode

    @property
    def padding(self) -> int:
        """Samples that stand before the clip and behind it."""
        if self.center == "hop":
            return (self.n_fft - self.hop_length) // 2
        return self.n_fft // 2 if self.center else 0

    @property
    def least_samples(self) -> int:
        """Samples of the shortest clip that has a frame, and that can be mirrored where its ends are."""
        mirrored = self.padding + 1 if self.pad_mode == "reflect" else 1
        return max(mirrored, self.n_fft - 2 * self.padding)

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the frames of clips of these lengths, int64; 0 for a clip that is too short."""
        frames = 1 + (num_samples + 2 * self.padding - self.n_fft) // self.hop_length
        return np.where(num_samples >= self.least_samples, frames, 0)

    def centre(self, frame: Count) -> Count:
        """Returns the sample of the clip on which a frame's middle lies."""
        return frame * self.hop_length + self.n_fft // 2 - self.padding

    def power(self, clip: Array) -> Iterator[tuple[slice, Array]]:
        """Yields which frames come, and |X|^2 of their spectrum, float32 [rows, n_fft // 2 + 1].

        rows is a multiple of BLOCK_ROWS, as matrix products want it; rows behind the frames are zero. The transform is
        torch's in float32, as in torch.stft, and the window is its periodic Hann window.
        clip: float32 [num_samples], at least `least_samples`.
        """
        import torch

        frames, window = self._frames(clip), _window(self.n_fft, self.win_length)
        room = min(CHUNK_ROWS, _whole_blocks(len(frames)))
        for start in range(0, len(frames), CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, len(frames))
            rows = torch.zeros((min(room, _whole_blocks(stop - start)), self.n_fft), dtype=torch.float32, device="cpu")
            np.multiply(frames[start:stop], window, out=rows.numpy()[: stop - start])
            yield slice(start, stop), power_of(torch.fft.rfft(rows).numpy())

    def _frames(self, clip: Array) -> Array:
        """Returns the frames of a clip as a read-only view [frames, n_fft] of one padded copy of the clip."""
        signal = np.pad(clip, self.padding, mode=self.pad_mode) if self.padding else np.ascontiguousarray(clip)
        return np.lib.stride_tricks.sliding_window_view(signal, self.n_fft)[:: self.hop_length]


@dataclass(frozen=True, kw_only=True, slots=True)
class AtFrames(Framing, AudioStep):
    """A step whose values stand beside the frames of `mel`, one a frame: their lengths are those of `mel`."""

    sample_rate_hz: ClassVar[int | None] = None
    libraries: ClassVar[tuple[str, ...]] = ("torch",)


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


@cache
def _window(n_fft: int, win_length: int) -> Array:
    """Returns the periodic Hann window of `win_length` samples in the middle of `n_fft`, float32, by torch."""
    import torch

    window = np.zeros(n_fft, np.float32)
    first = (n_fft - win_length) // 2
    window[first : first + win_length] = torch.hann_window(win_length, dtype=torch.float32, device="cpu").numpy()
    window.flags.writeable = False
    return window


def power_of(bins: np.ndarray) -> np.ndarray:
    """Returns |x|^2, float32, of a complex64 spectrum, which it overwrites: half the time of two strided products."""
    pairs = bins.view(np.float32)
    np.multiply(pairs, pairs, out=pairs)
    return pairs[:, 0::2] + pairs[:, 1::2]
