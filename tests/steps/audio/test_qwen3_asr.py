from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from forebay.steps.audio.log_mel import Qwen3Asr
from tests.steps.audio.clips import recordings, waveforms


def extract(clip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out: Any = Qwen3ASRFeatureExtractor()(
        clip, sampling_rate=16_000, padding=True, return_attention_mask=True, return_tensors="np"
    )
    return out["input_features"][0].T, out["attention_mask"][0]


def test_frames_are_the_valid_ones_of_the_clip_alone() -> None:
    clips = waveforms()
    for clip, fields in zip(clips, Qwen3Asr(dtype="float32").compute(clips), strict=True):
        want, mask = extract(clip)
        frames = fields["input_features"]
        assert mask.tolist() == [1] * len(frames) + [0] * (len(want) - len(frames))
        np.testing.assert_allclose(frames, want[: len(frames)], rtol=0, atol=1e-6)
        assert not want[len(frames) :].any()


@pytest.mark.parametrize("num_samples", [1, 2, 200, 201, 400, 7999])
def test_short_clips_are_padded_to_half_a_second(num_samples: int) -> None:
    clip = recordings()[0][1][4000 : 4000 + num_samples]
    (fields,) = Qwen3Asr(dtype="float32").compute([clip])
    assert fields["input_features"].shape == (50, 128)
    np.testing.assert_allclose(fields["input_features"], extract(clip)[0][:50], rtol=0, atol=1e-6)


def test_float16_is_float32_rounded() -> None:
    clips = [samples for _, samples in recordings()[:5]]
    for half, full in zip(Qwen3Asr().compute(clips), Qwen3Asr(dtype="float32").compute(clips), strict=True):
        assert half["input_features"].dtype == np.float16
        np.testing.assert_array_equal(half["input_features"], full["input_features"].astype(np.float16))
