"""Whisper's log-mel in the part that `log_mel` and `qwen3_asr` share."""

from __future__ import annotations

from functools import cache

import numpy as np

from forebay.steps.audio.ragged import FRAME_SAMPLES, Ragged, frames
from forebay.steps.audio.spectrum import Spectrum, log_filter_banks, slaney_filters

CENTRE_SAMPLES = FRAME_SAMPLES // 2
"""Frame i is centred on sample i * HOP_SAMPLES: its window begins this many samples earlier."""


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
