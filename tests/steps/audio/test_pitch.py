from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.audio.mel import Mel
from forebay.steps.audio.pitch import Pitch
from tests.steps.audio.clips import recordings
from tests.steps.audio.make_librosa import PITCH_CLIPS, recording

GOLDEN = Path(__file__).with_name("librosa.npz")
FRAMES: dict[str, Any] = {"n_fft": 1024, "hop_length": 256, "win_length": 1024, "center": True, "pad_mode": "reflect"}


def one(clip: np.ndarray, **changed: Any) -> np.ndarray:
    return Pitch(**{"rate_hz": 16_000, **FRAMES, **changed}).compute([clip])[0]["pitch"]


def yin(clip: np.ndarray, middle: int, step: Pitch) -> float:
    """Returns the pitch at one place by the paper's words: eqs. 6 and 8, the first dip, and a parabola, in loops."""
    longest, shortest = int(np.ceil(step.rate_hz / step.min_hz)), max(2, int(step.rate_hz / step.max_hz))
    window = max(round(0.025 * step.rate_hz), longest)
    length = window + longest + 1
    padded = np.pad(clip.astype(np.float64), (length, 2 * length))
    x = padded[length + middle - length // 2 :][:length]
    difference = [float(((x[:window] - x[lag : lag + window]) ** 2).sum()) for lag in range(longest + 2)]
    normalized = [1.0]
    for lag in range(1, longest + 2):
        mean = sum(difference[1 : lag + 1]) / lag
        normalized.append(difference[lag] / mean if mean > 0 else 1.0)
    if max(difference) <= 1e-10 * window:
        return 0.0
    for lag in range(shortest, longest + 1):
        before, here, behind = normalized[lag - 1 : lag + 2]
        if here < step.threshold and here < before and here <= behind:
            a, b, c = difference[lag - 1 : lag + 2]
            shift = (a - c) / (2 * (a + c - 2 * b)) if a + c > 2 * b else 0.0
            return step.rate_hz / (lag + min(max(shift, -1.0), 1.0))
    return 0.0


@given(data=st.data())
def test_it_is_what_the_paper_says(data: st.DataObject) -> None:
    clip = recordings()[data.draw(st.integers(0, len(recordings()) - 1))][1]
    start = data.draw(st.integers(0, max(0, len(clip) - 6000)))
    clip = clip[start : start + 6000]
    step = Pitch(
        rate_hz=16_000,
        **{**FRAMES, "center": data.draw(st.sampled_from([True, False, "hop"]))},
        min_hz=data.draw(st.sampled_from([50.0, 80.0])),
        max_hz=data.draw(st.sampled_from([300.0, 600.0])),
        threshold=data.draw(st.sampled_from([0.1, 0.2, 0.4])),
    )
    made = step.compute([clip])[0]["pitch"]
    first = {True: 0, False: 512, "hop": 128}[step.center]
    for frame in data.draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=4)):
        np.testing.assert_allclose(made[frame], yin(clip, first + 256 * frame, step), rtol=1e-6)


@pytest.mark.parametrize("hz", [70.0, 110.0, 196.0, 261.63, 440.0, 590.0])
def test_a_voice_of_one_pitch_has_that_pitch(hz: float) -> None:
    seconds = np.arange(22_050) / 22_050
    voice = np.sum([np.sin(2 * np.pi * hz * k * seconds + k) / k for k in range(1, 8)], axis=0)
    made = one((0.1 * voice).astype(np.float32), rate_hz=22_050)[8:-8]
    np.testing.assert_allclose(made, hz, rtol=2e-3)


def test_silence_and_noise_have_no_voice() -> None:
    assert not one(np.zeros(8000, np.float32)).any()
    assert not one(np.full(8000, 0.25, np.float32))[8:-8].any()
    noise = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    assert (one(0.1 * noise) > 0).mean() < 0.02


def test_speech_has_the_pitch_that_pyin_and_world_hear() -> None:
    golden = np.load(GOLDEN)
    for theirs, voiced_alike in (("pyin", 0.76), ("world", 0.81)):
        pairs = []
        for sample_id in PITCH_CLIPS:
            made, want = one(recording(sample_id)), golden[f"{theirs}_{sample_id}"]
            length = min(len(made), len(want))
            assert abs(len(made) - len(want)) <= 1
            pairs.append(np.stack([made[:length], want[:length]]))
        made, want = np.concatenate(pairs, axis=1)
        both = (made > 0) & (want > 0)
        assert both.mean() > 0.4
        assert ((made > 0) == (want > 0)).mean() > voiced_alike
        error = np.abs(made[both] / want[both] - 1)
        assert np.median(error) < 0.015
        assert (error > 0.2).mean() < 0.02


def test_a_clip_has_as_many_pitches_as_mel_frames_whatever_stands_beside_it() -> None:
    clips = [clip[:n] for (_, clip), n in zip(recordings(), (600, 5000, 5001, 16_000), strict=False)]
    mel = Mel.of(preset="hifigan")
    step = Pitch(
        rate_hz=22_050,
        n_fft=1024,
        hop_length=256,
        win_length=1024,
        center=mel.center,
        pad_mode=mel.pad_mode,
    )
    together = step.compute(clips)
    assert [len(fields["pitch"]) for fields in together] == [len(fields["mel"]) for fields in mel.compute(clips)]
    for clip, fields in zip(clips, together, strict=True):
        assert fields["pitch"].dtype == np.float32
        np.testing.assert_array_equal(fields["pitch"], step.compute([clip])[0]["pitch"])


def test_frames_behind_the_first_chunk_are_those_of_the_rest_of_the_clip() -> None:
    clip = np.concatenate([samples for _, samples in recordings()[:20]])
    whole, rest = one(clip), one(clip[256 * 250 :])
    np.testing.assert_allclose(whole[250 + 8 :], rest[8:], rtol=1e-9)
    assert len(whole) > 1000
