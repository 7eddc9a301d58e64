from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.steps.audio.waveform import Waveform


def converted(clip: np.ndarray, dtype: str) -> np.ndarray:
    (fields,) = Waveform(dtype=dtype).compute([clip])  # type: ignore[arg-type]
    assert fields["waveform"].dtype == dtype
    return fields["waveform"]


def test_every_int16_survives_float32() -> None:
    values = np.arange(-32768, 32768).astype(np.int16)
    as_float = converted(values, "float32")
    assert as_float.min() == -1.0
    np.testing.assert_array_equal(as_float.astype(np.float64) * 32768, values)
    np.testing.assert_array_equal(converted(as_float, "int16"), values)


@given(hnp.arrays(np.int16, st.integers(1, 100)))
def test_int16_passes_unchanged(clip: np.ndarray) -> None:
    np.testing.assert_array_equal(converted(clip, "int16"), clip)


@given(hnp.arrays(np.float32, st.integers(1, 100), elements=st.floats(-1e9, 1e9, width=32)))
def test_float32_rounds_half_to_even_and_clips(clip: np.ndarray) -> None:
    want = np.clip(np.round(clip.astype(np.float64) * 32768), -32768, 32767)
    np.testing.assert_array_equal(converted(clip, "int16"), want)
    np.testing.assert_array_equal(converted(clip, "float32"), clip)


def test_ties() -> None:
    clip = (np.array([0.5, 1.5, 2.5, -0.5, -1.5, 32766.5, 40000.0, -40000.0]) / 32768).astype(np.float32)
    assert converted(clip, "int16").tolist() == [0, 2, 2, 0, -2, 32766, 32767, -32768]
