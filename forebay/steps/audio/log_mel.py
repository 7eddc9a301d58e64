"""Log-mels of 16 kHz clips: `log_mel`, Whisper's without the padding to 30 seconds, and `qwen3_asr`.

`log_mel` keeps one number from which the padding is rebuilt. `qwen3_asr` is what `Qwen3ASRFeatureExtractor` makes of a
clip alone. Both have valid frames only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.steps.audio.framing import CENTRE_SAMPLES, HOP_SAMPLES, Ragged
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec

MAX_FRAMES = 3000
MAX_SAMPLES = MAX_FRAMES * HOP_SAMPLES


@dataclass(frozen=True, kw_only=True, slots=True)
class LogMel(AudioStep):
    """Whisper's log-mel, valid frames only: `input_features` [frames, n_mels] and the scalar `pad_value` float32 [1].

    16 kHz, n_fft 400, hop 160, slaney mel 0 to 8000 Hz; at most the first 30 s of the clip.
    """

    name: ClassVar[str] = "log_mel"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "forebay.steps.audio.spectrum")
    axes: ClassVar[dict[str, str | int]] = {"input_features": "frames", "pad_value": 1}
    max_s: ClassVar[float | None] = 30.0

    n_mels: Literal[80, 128] = 80
    """Bins of a frame: 128 for large-v3, 80 for the models before it."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the stored features."""
    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields: `input_features` [frames, n_mels] and `pad_value` float32 [1]."""
        return (
            FieldSpec(name="input_features", dtype=self.dtype, shape=(self.n_mels,)),
            FieldSpec(name="pad_value", dtype="float32"),
        )

    @property
    def constants(self) -> dict[str, Any]:
        return {"n_mels": self.n_mels}

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the frames whose window reaches a sample, int64: min(3000, ceil((n + 200) / 160))."""
        frames = -(-(num_samples + CENTRE_SAMPLES) // HOP_SAMPLES)
        return np.where(num_samples > 0, np.minimum(frames, MAX_FRAMES), 0)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns what `WhisperFeatureExtractor` makes of each clip's first 30 s in 30 s of zeros, as fields.

        Every further frame of the extractor's [n_mels, 3000] is silence, which its cut at 2 below the clip's maximum
        (in normalised units) turns into one value: pad_value = max(clip_max - 2, -1.5). It is computed in the
        extractor's own order of roundings, from log10 and not from clip_max, so it equals a frame that was cut bit for
        bit; for quiet clips (clip_max below 1) the formula can give the next float32.

        waveforms: float32 [num_samples] at 16 kHz, not empty, finite. Within 1e-6 of the extractor in float32.
        """
        from forebay.steps.audio.spectrum import log10_mels, normalize, stored, write_centred

        ragged = Ragged.zeros(self.num_frames(np.array([w.size for w in waveforms], np.int64)).tolist())
        for index, waveform in enumerate(waveforms):
            write_centred(waveform[:MAX_SAMPLES], ragged.samples(index), reference_samples=MAX_SAMPLES)
        mels = log10_mels(ragged, n_mels=self.n_mels)
        fields = []
        for rows in ragged.rows:
            pad_value = normalize(mels[rows])
            fields.append(
                {"input_features": stored(mels[rows], self.dtype), "pad_value": np.array([pad_value], np.float32)}
            )
        return fields

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form `input_features` [B, n_mels, 3000]: a clip's frames, then its silence to 30 s.

        Bit for bit what `WhisperFeatureExtractor` returns where the frames are; float16 frames are its to float16
        rounding. Always 30 s, so that there is no mask.
        """
        spec = stored.fields["input_features"]
        frames = FieldForm.frames(spec, is_moved=True, length=MAX_FRAMES, pad_of="pad_value")
        return BatchForm.exact(cls.name, frames)


N_MELS = 128
MIN_SAMPLES = 8000
"""Shorter clips are padded with zeros to this, and the padding counts as valid: the extractor's `min_length`."""
CHUNK_FRAMES = 100
"""Frames of a chunk of the encoder, 2 * `n_window`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Asr(AudioStep):
    """The values of `Qwen3ASRFeatureExtractor` for a clip alone, valid frames only: `input_features` [frames, 128]."""

    name: ClassVar[str] = "qwen3_asr"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "forebay.steps.audio.spectrum")
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

        ragged = Ragged.zeros(self.num_frames(np.array([w.size for w in waveforms], np.int64)).tolist())
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
