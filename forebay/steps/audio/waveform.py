"""`waveform`: the samples themselves, as int16 or float32; and how audio is decoded to them, for every feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import AudioStep, ClipDtype, Fields, Step, Stored
from forebay.store.layout import Array, FieldSpec

_INT16_SCALE = np.float32(32768.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode(Step):
    """Mono float32 at `sample_rate_hz`: mean of channels, soxr HQ; then the first `clip_s` seconds if that is set."""

    libraries: ClassVar[tuple[str, ...]] = ("soundfile", "soxr")

    sample_rate_hz: int = 16_000
    clip_s: float | None = None
    max_sample_bytes: int = 256 * 1024 * 1024
    """Encoded bytes, and decoded float32 bytes, above which a sample fails instead of filling memory."""
    version: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Waveform(AudioStep):
    """Field `waveform` [num_samples]: int16 (lossless from 16-bit sources at the same rate) or float32."""

    name: ClassVar[str] = "waveform"
    axes: ClassVar[dict[str, str | int]] = {"waveform": "samples"}
    sample_rate_hz: ClassVar[int | None] = None
    clip_dtypes: ClassVar[tuple[ClipDtype, ...]] = ("float32", "int16")
    grid_samples: ClassVar[int | None] = 160

    dtype: Literal["int16", "float32"] = "int16"
    """Type of the stored samples. `int16` loses nothing of 16-bit sources at the same rate."""
    version: int = 1

    @property
    def clip_dtype(self) -> ClipDtype:
        """The dtype that is stored, so that nothing is converted twice."""
        return self.dtype

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the field: `waveform` [num_samples]."""
        return (FieldSpec(name="waveform", dtype=self.dtype),)

    def num_frames(self, num_samples: Array) -> Array:
        return num_samples

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the fields of clips; int16 is the samples of a 16-bit source, float32 is those over 32768.

        waveforms: int16, or float32 in [-1, 1); [num_samples]. What has the stored dtype already is passed on, not
        copied. float32 to int16 is round-half-even(x * 32768), clipped: the inverse of the division for every int16.
        """
        convert = _to_int16 if self.dtype == "int16" else _to_float32
        return [{"waveform": convert(waveform)} for waveform in waveforms]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns the form `input_values` [B, N] and `attention_mask` int32 [B, N], to the length of the longest."""
        samples = samples_form("input_values", stored)
        return BatchForm.exact(cls.name, samples, samples.mask("attention_mask"))

    @classmethod
    def crop(cls, stored: Stored, *, num_samples: int) -> BatchForm:
        """Returns the form `wav` [B, num_samples]."""
        return BatchForm.exact(cls.name, samples_form("wav", stored, length=num_samples))


def samples_form(name: str, stored: Stored, **more: Any) -> FieldForm:
    """Returns the form of the stored `waveform` as floats, int16 divided by 32768 (exact), followed by zeros."""
    spec = stored.fields["waveform"]
    return FieldForm.frames(spec, name=name, scale=2.0**-15 if spec.dtype == "int16" else None, **more)


def _to_int16(waveform: np.ndarray) -> np.ndarray:
    if waveform.dtype == np.int16:
        return waveform
    scaled = waveform * _INT16_SCALE
    np.rint(scaled, out=scaled)
    np.clip(scaled, -32768.0, 32767.0, out=scaled)
    return scaled.astype(np.int16)


def _to_float32(waveform: np.ndarray) -> np.ndarray:
    return waveform if waveform.dtype == np.float32 else waveform / _INT16_SCALE
