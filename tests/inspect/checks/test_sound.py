"""Levels, clipping and bands of clips that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.measured import band_db, measured_sound

RATE_HZ = 16_000


def sine(level_dbfs: float, *, hz: float = 440, seconds: float = 1.0) -> np.ndarray:
    peak = math.sqrt(2) * 10 ** (level_dbfs / 20)
    return (peak * np.sin(2 * np.pi * hz * np.arange(int(seconds * RATE_HZ)) / RATE_HZ)).astype(np.float32)


@pytest.mark.parametrize("level", [-6.0, -40.0, -70.0])
def test_the_level_of_a_sine_is_its_effective_value(level: float) -> None:
    found = measured_sound(sine(level, hz=500), RATE_HZ, Limits())
    assert found.loudest_dbfs == pytest.approx(level, abs=0.1)
    assert found.quiet == (1.0 if level < -55 else 0.0)


def test_pieces_are_quiet_each_for_itself_and_an_offset_is_no_sound() -> None:
    clip = np.concatenate([sine(-20), np.full(3 * RATE_HZ, 0.2, np.float32)])
    assert measured_sound(clip, RATE_HZ, Limits()).quiet == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_both_ends_of_the_scale_are_full_scale(dtype: type) -> None:
    clip = np.array([0, 32767, -32768, 100, -32767, 32000, 1, 2, 3, 4], np.int16)
    given_ = clip if dtype is np.int16 else clip.astype(np.float32) / np.float32(32768)
    assert measured_sound(given_, RATE_HZ, Limits()).clipped == pytest.approx(0.3)


def test_a_band_ends_where_nothing_is_above() -> None:
    assert band_db(sine(-20, hz=3_000)) < -60
    assert band_db(sine(-20, hz=6_000)) > -1
    assert math.isnan(band_db(np.zeros(5_000, np.int16)))
    assert math.isnan(band_db(sine(-20, seconds=0.01)))


@given(arrays.arrays(np.int16, st.integers(1, 3_000)), st.sampled_from([8_000, 16_000, 44_100]))
def test_any_clip_is_measured(clip: np.ndarray, rate_hz: int) -> None:
    found = measured_sound(clip, rate_hz, Limits())
    assert 0 <= found.quiet <= 1
    assert 0 <= found.clipped <= 1
    assert found.loudest_dbfs <= 0.1
    band = band_db(clip)
    assert math.isnan(band) or band <= 0.01
