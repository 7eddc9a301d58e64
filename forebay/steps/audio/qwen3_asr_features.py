"""`qwen3_asr`: the log-mel of transformers' `Qwen3ASRFeatureExtractor` for a clip alone, valid frames only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from forebay.steps.audio.ragged import HOP_SAMPLES, Ragged
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec

N_MELS = 128

MIN_SAMPLES = 8000
"""Shorter clips are padded with zeros to this, and the padding counts as valid: the extractor's `min_length`."""

CHUNK_FRAMES = 100
"""Frames of a chunk of the encoder, 2 * `n_window`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Asr(AudioStep):
    """The values of `Qwen3ASRFeatureExtractor` for a clip alone, valid frames only: `input_features` [frames, 128]."""

    name: ClassVar[str] = "qwen3_asr"
    axes: ClassVar[dict[str, str | int]] = {"input_features": "frames"}

    dtype: Literal["float16", "float32"] = "float16"
    """Type of the stored features."""
    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the field: `input_features` [frames, 128]."""
        return (FieldSpec(name="input_features", dtype=self.dtype, shape=(N_MELS,)),)

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the frames of clips, int64: floor(max(n, 8000) / 160), as many as the extractor's mask marks."""
        return np.where(num_samples > 0, np.maximum(num_samples, MIN_SAMPLES) // HOP_SAMPLES, 0)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns what the extractor returns for each clip by itself with `padding=True`, where its mask is 1.

        The clip's end is mirrored, not followed by zeros, and its maximum is the clip's own; in a batch the extractor
        would pad the audio first and change both. Padding to a multiple of 100 frames is below the cut.

        waveforms: float32 [num_samples] at 16 kHz, not empty, finite. Within 1e-6 of the extractor in float32.
        """
        from forebay.steps.audio.spectrum import log10_mels, normalize, stored, write_centred

        sizes = [w.size for w in waveforms]
        ragged = Ragged.zeros(self.num_frames(np.array(sizes, np.int64)).tolist())
        for index, waveform in enumerate(waveforms):
            write_centred(waveform, ragged.samples(index), reference_samples=max(waveform.size, MIN_SAMPLES))
        mels = log10_mels(ragged, n_mels=N_MELS)
        for rows in ragged.rows:
            normalize(mels[rows])
        return [{"input_features": stored(mels[rows], self.dtype)} for rows in ragged.rows]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form `input_features` [B, 128, T] and `input_features_mask` int32 [B, T], T a multiple of 100.

        Each row is what `Qwen3ASRFeatureExtractor` returns for the clip alone, followed by masked zeros.
        """
        frames = FieldForm.frames(stored.fields["input_features"], is_moved=True, multiple=CHUNK_FRAMES)
        return BatchForm.exact(cls.name, frames, frames.mask("input_features_mask"))
