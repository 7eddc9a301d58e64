from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import SeamlessM4TFeatureExtractor

from forebay.steps.audio.w2v_bert import FLOOR, W2vBert, valid_frames
from tests.steps.audio.clips import recordings, waveforms


def test_frames_are_those_of_the_clip_and_400_zeros() -> None:
    extractor = SeamlessM4TFeatureExtractor()
    clips = waveforms()
    worst = 0.0
    for clip, fields in zip(clips, W2vBert().compute(clips), strict=True):
        want = extractor._extract_fbank_features(np.pad(clip, (0, 400)))
        assert fields["fbanks"].shape == want.shape
        worst = max(worst, float(np.abs(fields["fbanks"] - want).max()))
        alone = extractor._extract_fbank_features(clip)
        assert fields["valid_frames"].tolist() == [len(alone)]
    assert worst <= 1e-5  # values reach 25; float32 has 2e-6 there


@given(st.data())
def test_a_crop_on_a_hop_boundary_is_a_slice(data: st.DataObject) -> None:
    clip = recordings()[data.draw(st.integers(0, len(recordings()) - 1))][1]
    start = data.draw(st.integers(0, (len(clip) - 560) // 160))
    size = data.draw(st.integers(560, len(clip) - 160 * start))
    crop = clip[160 * start : 160 * start + size]
    whole, cropped = W2vBert().compute([clip, crop])
    rows = int(cropped["valid_frames"][0])
    assert rows == valid_frames(size)
    piece, own = whole["fbanks"][start : start + rows], cropped["fbanks"][:rows]
    if start % 32 == 0:
        np.testing.assert_array_equal(piece, own)
    # BLAS may round a row by its place among the 32 of a product: with AVX-512 it does not, with AVX2 the last bits of
    # an energy move. Four of them are 2^-21 of its logarithm, however near to 0 that is; its own last bit comes on top.
    np.testing.assert_allclose(piece, own, rtol=2**-23, atol=2**-21)


def test_zeros_behind_the_clip_add_only_silence() -> None:
    clip = recordings()[3][1]
    padded = np.pad(clip, (0, 5000))
    short, long = (fields["fbanks"] for fields in W2vBert().compute([clip, padded]))
    np.testing.assert_array_equal(long[: len(short)], short)
    assert (long[len(short) :] == np.log(np.float32(FLOOR))).all()


def test_a_constant_offset_changes_little() -> None:
    clip = recordings()[0][1]
    plain, shifted = W2vBert().compute([clip, clip + np.float32(0.25)])
    rows = int(plain["valid_frames"][0])
    assert np.abs(plain["fbanks"][:rows] - shifted["fbanks"][:rows]).mean() < 1e-2


@pytest.mark.parametrize(("num_samples", "frames"), [(399, 0), (400, 1), (559, 1), (560, 2), (16_000, 98)])
def test_valid_frames_lie_inside(num_samples: int, frames: int) -> None:
    assert valid_frames(num_samples) == frames
