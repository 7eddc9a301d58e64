from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from forebay.steps.audio.log_mel import LogMel
from tests.steps.audio.clips import nearly_30_s, recordings, waveforms


def test_recordings_are_enough_and_cover_all_languages() -> None:
    assert len(recordings()) >= 50
    assert {language for language, _ in recordings()} >= {"en", "es", "fr", "it", "ru"}


def extract(clip: np.ndarray, n_mels: int) -> np.ndarray:
    extractor = WhisperFeatureExtractor(feature_size=n_mels)
    return np.asarray(extractor(clip, sampling_rate=16_000, return_tensors="np").input_features[0].T)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_frames_and_padding_are_whispers(n_mels: Literal[80, 128]) -> None:
    clips = (*waveforms()[:: 1 if n_mels == 80 else 4], *nearly_30_s())
    for clip, fields in zip(clips, LogMel(n_mels=n_mels, dtype="float32").compute(clips), strict=True):
        want, frames = extract(clip, n_mels), fields["input_features"]
        assert len(frames) == min(3000, -(-(len(clip) + 200) // 160))
        np.testing.assert_allclose(frames, want[: len(frames)], rtol=0, atol=1e-6)
        silence = want[len(frames) :]
        assert silence.size == 0 or silence.min() == silence.max()
        np.testing.assert_allclose(silence, np.full_like(silence, fields["pad_value"][0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_samples", [1, 2, 39, 40, 41, 200, 201, 399, 400, 401])
def test_very_short_clips_are_whispers(num_samples: int) -> None:
    clip = recordings()[0][1][4000 : 4000 + num_samples]
    (fields,) = LogMel(dtype="float32").compute([clip])
    want = extract(clip, 80)
    frames = fields["input_features"]
    np.testing.assert_allclose(frames, want[: len(frames)], rtol=0, atol=1e-6)
    np.testing.assert_allclose(want[len(frames) :], fields["pad_value"][0], rtol=0, atol=1e-6)


def test_no_frame_behind_the_stored_ones_sees_a_sample() -> None:
    for num_samples in (1, 119, 120, 121, 280, 281, 1000):
        frames = LogMel().num_frames(np.array(num_samples))
        assert 160 * (frames - 1) - 200 < num_samples <= 160 * frames - 200


def test_digital_silence_is_the_floor() -> None:
    (fields,) = LogMel(dtype="float32").compute([np.zeros(1000, np.float32)])
    assert fields["pad_value"].tolist() == [-1.5]
    assert (fields["input_features"] == -1.5).all()


def test_pad_value_is_the_value_of_frames_that_were_cut() -> None:
    clip = np.concatenate([recordings()[0][1], np.zeros(4000, np.float32)])
    for gain in (1.0, 1e-2, 1e-4):
        (fields,) = LogMel(dtype="float32").compute([clip * np.float32(gain)])
        frames, pad_value = fields["input_features"], fields["pad_value"]
        assert frames.min() == pad_value[0]
        assert pad_value[0] == pytest.approx(max(float(frames.max()) - 2, -1.5), abs=2e-7)


def test_only_the_first_30_seconds_count() -> None:
    clip = np.concatenate([samples for _, samples in recordings()])[: 35 * 16_000]
    loud = clip.copy()
    loud[480_000:] *= 3
    whole, cut, other = LogMel().compute([clip, clip[:480_000], loud])
    for name in whole:
        np.testing.assert_array_equal(whole[name], cut[name])
        np.testing.assert_array_equal(whole[name], other[name])
    assert len(whole["input_features"]) == 3000


def test_float16_is_float32_rounded() -> None:
    clips = [samples for _, samples in recordings()[:5]]
    for half, full in zip(LogMel().compute(clips), LogMel(dtype="float32").compute(clips), strict=True):
        assert half["input_features"].dtype == np.float16
        np.testing.assert_array_equal(half["input_features"], full["input_features"].astype(np.float16))
        np.testing.assert_array_equal(half["pad_value"], full["pad_value"])
