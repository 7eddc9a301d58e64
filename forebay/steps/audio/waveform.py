"""`waveform`: the samples themselves, as int16 or float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.config.steps import Waveform
from forebay.store.layout import FieldSpec

_INT16_SCALE = np.float32(32768.0)


def field_specs(step: Waveform) -> tuple[FieldSpec, ...]:
    """Returns the field: `waveform` [num_samples]."""
    return (FieldSpec(name="waveform", dtype=step.dtype),)


def compute(step: Waveform, waveforms: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns the fields of clips; int16 is the samples of a 16-bit source, float32 is those over 32768.

    waveforms: int16, or float32 in [-1, 1); [num_samples]. What has the stored dtype already is passed on, not copied.
    float32 to int16 is round-half-even(x * 32768), clipped: the inverse of the division for every int16.
    """
    convert = _to_int16 if step.dtype == "int16" else _to_float32
    return [{"waveform": convert(waveform)} for waveform in waveforms]


def _to_int16(waveform: np.ndarray) -> np.ndarray:
    if waveform.dtype == np.int16:
        return waveform
    scaled = waveform * _INT16_SCALE
    np.rint(scaled, out=scaled)
    np.clip(scaled, -32768.0, 32767.0, out=scaled)
    return scaled.astype(np.int16)


def _to_float32(waveform: np.ndarray) -> np.ndarray:
    return waveform if waveform.dtype == np.float32 else waveform / _INT16_SCALE
