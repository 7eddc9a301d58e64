"""`given`: Whisper's features that a data set holds already, stored as `log_mel` stores its own.

`none`: nothing is read or stored of sound; a sample is its text. `lengths`: nothing of a recording is stored but how
long it is, beside what models make of it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.config.tree import AudioConfig, Config
from forebay.errors import DecodeError
from forebay.steps.audio.framing import HOP_SAMPLES
from forebay.steps.audio.log_mel import MAX_FRAMES, LogMel
from forebay.steps.form import BatchForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec

HOP_S = 0.01
"""Seconds of a frame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given(AudioStep):
    """Features [n_mels, 3000] of a column of the source, as `WhisperFeatureExtractor` makes them; no sound is read.

    Stored are the frames before the padding, and the padding's one value. Batches are those of `log_mel`, and equal
    the column bit for bit in `dtype`.
    """

    name: ClassVar[str] = "given"
    axes: ClassVar[dict[str, str | int]] = LogMel.axes
    stored_as: ClassVar[str] = LogMel.name
    reads_sound: ClassVar[bool] = False

    n_mels: Literal[80, 128] = 80
    """Bins of a frame: the rows of each matrix in the column."""
    dtype: Literal["float16", "float32"] = "float32"
    """Type of the stored features. `float16` loses nothing of a column of float16."""
    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        return LogMel(n_mels=self.n_mels, dtype=self.dtype).fields()

    @property
    def constants(self) -> dict[str, Any]:
        return {"n_mels": self.n_mels}

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the frames that `num_samples` counted: 160 audio samples, 10 ms, stand for each."""
        return num_samples // HOP_SAMPLES

    def num_samples(self, clip: Array) -> int:
        """Returns 160 for every frame before the padding, so that seconds and hours are those of the features."""
        return num_valid(clip) * HOP_SAMPLES

    def opened(self, data: bytes) -> Array:
        """Returns the matrix of a row. Raises DecodeError where it is no such matrix."""
        clip = matrix_of(data)
        self.check(clip)
        return clip

    def check(self, clip: Array) -> None:
        """Returns for float [n_mels, 3000] without NaN and infinity.

        Raises DecodeError otherwise, reason `wrong_shape` or `not_finite`.
        """
        wanted = (self.n_mels, MAX_FRAMES)
        if clip.shape != wanted:
            is_whispers = clip.shape in ((80, MAX_FRAMES), (128, MAX_FRAMES))
            hint = f"; set audio.n_mels = {clip.shape[0]}" if is_whispers else ""
            raise DecodeError("wrong_shape", f"the features are {list(clip.shape)}, wanted {list(wanted)}{hint}")
        if not np.isfinite(clip).all():
            bad = int(np.argmin(np.isfinite(clip)))
            raise DecodeError(
                "not_finite",
                f"{clip.size - int(np.isfinite(clip).sum())} of {clip.size} features are NaN or infinite; the first is "
                f"{clip.flat[bad]} in bin {bad // MAX_FRAMES}, frame {bad % MAX_FRAMES}",
            )

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the frames before the padding and its value. waveforms: float [n_mels, 3000]; see `num_valid`."""
        return [self._stored(clip) for clip in waveforms]

    def _stored(self, clip: Array) -> Fields:
        with np.errstate(over="ignore"):  # a float16 beyond its range is infinite, which the check below names
            frames = np.ascontiguousarray(clip[:, : num_valid(clip)].T, self.dtype)
            pad_value = clip[:1, -1].astype(self.dtype).astype(np.float32)
        if not (np.isfinite(frames).all() and np.isfinite(pad_value).all()):
            raise DecodeError("not_finite", f"a feature is beyond the range of {self.dtype}; set audio.dtype")
        return {"input_features": frames, "pad_value": pad_value}

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns what is for sound, beside where `[source.columns]` has no features."""
        found = super(Given, cls).contradictions(config)
        if config.audio is not None and config.audio.keep_waveform:
            found.append(f'audio: keep_waveform is for sound, and features = "{cls.name}" reads none; leave it out')
        if config.source.overlong == "clip":
            found.append(
                f'source.overlong is "clip", and features = "{cls.name}" are taken whole; set "keep" or "drop"'
            )
        return found

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        return LogMel.batch(stored)


def matrix_of(data: bytes) -> Array:
    """Returns the array whose .npy bytes these are. Raises DecodeError `wrong_shape` where it is no matrix."""
    matrix = np.load(io.BytesIO(data), allow_pickle=False)
    if matrix.ndim != 2 or not matrix.size:
        raise DecodeError("wrong_shape", f"the features are {list(matrix.shape)}, wanted a matrix [bins, frames]")
    return np.asarray(matrix)


def num_valid(clip: Array) -> int:
    """Returns the frames before the padding of float [bins, frames], at least 1.

    The padding is every frame at the end whose bins all hold the one value of the last frame, bit for bit. Whisper's
    padding is of this form (`log_mel.LogMel.make` says why). Silence of that very value before it counts as padding
    too, so the count can be a little below that of the clip's own frames; a clip without padding is stored whole.
    """
    bits = np.ascontiguousarray(clip).view(f"u{clip.dtype.itemsize}")
    differs = np.flatnonzero((bits != bits[0, -1]).any(axis=0))
    return int(differs[-1]) + 1 if len(differs) else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingStored(AudioStep):
    """A step without fields."""

    def fields(self) -> tuple[FieldSpec, ...]:
        return ()

    def num_frames(self, num_samples: Array) -> Array:
        return np.zeros_like(num_samples)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        return [{} for _ in waveforms]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:  # noqa: ARG003
        return BatchForm.exact(cls.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAudio(NothingStored):
    """Nothing is read or stored of the sound: a sample is its text. No media field."""

    name: ClassVar[str] = "none"
    has_audio: ClassVar[bool] = False
    plan: ClassVar[str] = "k = 8 and batch_tokens = 8192"

    version: int = 1

    @classmethod
    def no_prompt(cls, prompt: str | None, prompts: Mapping[str, Any]) -> str:
        given = "no [text] section" if prompt is None else f'text.prompt is "{prompt}"'
        return (
            f'{given} and audio.features is "{cls.name}"; text alone is tokenised: give text.tokenizer and prompt = '
            + " or ".join(f'"{name}"' for name in prompts)
        )

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        source, found = config.source, []
        for setting in ("sample_rate_hz", "keep_waveform", "energy", "pitch"):
            if (value := getattr(config.audio, setting)) != getattr(AudioConfig(), setting):
                found.append(f'audio: {setting} is {value!r} and features = "{cls.name}" has no audio; leave it out')
        if source.duration_tolerance is not None:
            found.append(f'source.duration_tolerance is for audio, and audio.features is "{cls.name}"; leave it out')
        if source.min_duration_s or source.max_duration_s is not None:
            found.append(
                f'source.min_duration_s and max_duration_s are for audio, and audio.features is "{cls.name}"; leave '
                "them out (text.max_label_tokens limits texts)"
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths(NothingStored):
    """No field: `num_audio_samples` alone, by which plans cut batches."""

    name: ClassVar[str] = "lengths"
    sample_rate_hz: ClassVar[int | None] = None
    version: int = 1
