"""`log_mel`: Whisper's features without the padding to 30 seconds, and the one number from which it is rebuilt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.config.steps import LogMel
from forebay.steps.audio.ragged import HOP_SAMPLES, Ragged
from forebay.steps.audio.spectrum import stored
from forebay.steps.audio.whisper_mel import CENTRE_SAMPLES, log10_mels, normalize, write_centred
from forebay.store.layout import FieldSpec

MAX_FRAMES = 3000


MAX_SAMPLES = MAX_FRAMES * HOP_SAMPLES


def field_specs(step: LogMel) -> tuple[FieldSpec, ...]:
    """Returns the fields: `input_features` [frames, n_mels] and `pad_value` float32 [1]."""
    return (
        FieldSpec(name="input_features", dtype=step.dtype, shape=(step.n_mels,)),
        FieldSpec(name="pad_value", dtype="float32"),
    )


def num_frames(num_samples: np.ndarray) -> np.ndarray:
    """Returns the frames of clips, int64: every one whose window reaches a sample, K = min(3000, ceil((n + 200) / 160))."""
    frames = -(-(num_samples + CENTRE_SAMPLES) // HOP_SAMPLES)
    return np.where(num_samples > 0, np.minimum(frames, MAX_FRAMES), 0)


def compute(step: LogMel, waveforms: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns the fields of clips, as `WhisperFeatureExtractor` makes them of each clip's first 30 s in its 30 s of zeros.

    Every further frame of the extractor's [n_mels, 3000] is silence, which its cut at 2 below the clip's maximum (in
    normalised units) turns into one value: pad_value = max(clip_max - 2, -1.5). It is computed in the extractor's own
    order of roundings, from log10 and not from clip_max, so it equals a frame that was cut bit for bit; for quiet clips
    (clip_max below 1) the formula can give the next float32.

    waveforms: float32 [num_samples] at 16 kHz, not empty, finite. Within 1e-6 of the extractor in float32.
    """
    counts = num_frames(np.array([w.size for w in waveforms], np.int64)).tolist()
    ragged = Ragged.zeros(counts)
    for index, waveform in enumerate(waveforms):
        write_centred(waveform[:MAX_SAMPLES], ragged.samples(index), reference_samples=MAX_SAMPLES)
    mels = log10_mels(ragged, n_mels=step.n_mels)
    fields = []
    for rows in ragged.rows:
        pad_value = normalize(mels[rows])
        fields.append(
            {"input_features": stored(mels[rows], step.dtype), "pad_value": np.array([pad_value], np.float32)}
        )
    return fields
