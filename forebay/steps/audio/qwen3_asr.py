"""`qwen3_asr`: the log-mel of transformers' `Qwen3ASRFeatureExtractor` for a clip alone, valid frames only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.config.steps import Qwen3Asr
from forebay.steps.audio.ragged import HOP_SAMPLES, Ragged
from forebay.steps.audio.spectrum import stored
from forebay.steps.audio.whisper_mel import log10_mels, normalize, write_centred
from forebay.store.layout import FieldSpec

N_MELS = 128


MIN_SAMPLES = 8000
"""Shorter clips are padded with zeros to this, and the padding counts as valid: the extractor's `min_length`."""


def field_specs(step: Qwen3Asr) -> tuple[FieldSpec, ...]:
    """Returns the field: `input_features` [frames, 128]."""
    return (FieldSpec(name="input_features", dtype=step.dtype, shape=(N_MELS,)),)


def num_frames(num_samples: np.ndarray) -> np.ndarray:
    """Returns the frames of clips, int64: floor(max(n, 8000) / 160), as many as the extractor's mask marks."""
    return np.where(num_samples > 0, np.maximum(num_samples, MIN_SAMPLES) // HOP_SAMPLES, 0)


def compute(step: Qwen3Asr, waveforms: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns the fields of clips: what the extractor returns for each by itself with `padding=True`, where its mask is 1.

    The clip's end is mirrored, not followed by zeros, and its maximum is the clip's own; in a batch the extractor would
    pad the audio first and change both. Padding to a multiple of 100 frames is below the cut.

    waveforms: float32 [num_samples] at 16 kHz, not empty, finite. Within 1e-6 of the extractor in float32.
    """
    sizes = [w.size for w in waveforms]
    ragged = Ragged.zeros(num_frames(np.array(sizes, np.int64)).tolist())
    for index, waveform in enumerate(waveforms):
        write_centred(waveform, ragged.samples(index), reference_samples=max(waveform.size, MIN_SAMPLES))
    mels = log10_mels(ragged, n_mels=N_MELS)
    for rows in ragged.rows:
        normalize(mels[rows])
    return [{"input_features": stored(mels[rows], step.dtype)} for rows in ragged.rows]
