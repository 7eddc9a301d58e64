from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import SeamlessM4TFeatureExtractor, WhisperFeatureExtractor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from forebay.steps.audio.log_mel import LogMel, Qwen3Asr
from forebay.steps.audio.w2v_bert import W2vBert, output_frames, w2v_bert_input
from forebay.steps.audio.waveform import Waveform
from forebay.steps.batch import collate, fresh
from forebay.steps.step import AudioStep, Stored
from tests.flat_constants import flat
from tests.steps.audio.clips import nearly_30_s, recordings, waveforms


def batch_of(step: AudioStep, samples: Sequence[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Returns the batch of stored fields by the form of a step."""
    form = step.batch(Stored("", flat(), {spec.name: spec for spec in step.fields()}))
    return collate(form, list(map(form.items, samples)), dtype=torch.float32, allocate=fresh, are_rows=True)


HALF = 2.0**-11
"""Relative rounding of float16."""


def whisper(clip: np.ndarray) -> np.ndarray:
    out = WhisperFeatureExtractor()(clip, sampling_rate=16_000, return_tensors="np")
    return np.asarray(out.input_features[0])


def qwen3_asr(clip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out: Any = Qwen3ASRFeatureExtractor()(
        clip, sampling_rate=16_000, padding=True, return_attention_mask=True, return_tensors="np"
    )
    return out["input_features"][0], out["attention_mask"][0]


def w2v_bert(clips: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    out = SeamlessM4TFeatureExtractor()(list(clips), sampling_rate=16_000, return_tensors="np")
    return out.input_features, out.attention_mask


def finish_whisper(frames: np.ndarray, pad_value: float) -> np.ndarray:
    frames.flags.writeable = False
    sample = {"input_features": frames, "pad_value": np.array([pad_value], np.float32)}
    return batch_of(LogMel(), [sample])["input_features"][0].numpy()


def finish_qwen3_asr(*clips: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    for frames in clips:
        frames.flags.writeable = False
    samples = [{"input_features": frames} for frames in clips]
    batch = batch_of(Qwen3Asr(), samples)
    return list(zip(batch["input_features"].numpy(), batch["input_features_mask"].numpy(), strict=True))


def finish_w2v_bert(fbanks: np.ndarray, *, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    fbanks.flags.writeable = False
    length = output_frames(len(fbanks)) if length is None else length
    out, mask = np.full((length, 160), np.nan, np.float32), np.full(length, 7, np.int32)
    w2v_bert_input(fbanks, out, mask)
    return out, mask


def silence_under(loudest: np.float32) -> np.float32:
    """Returns the extractor's padding for a clip with this maximum, by its own sequence of float32 roundings.

    It is max(loudest - 2, -1.5) but for quiet clips (loudest below 1), where that can be the next float32.
    """
    log10 = loudest * np.float32(4) - np.float32(4)
    return max((log10 - np.float32(8) + np.float32(4)) * np.float32(0.25), np.float32(-1.5))


def test_whisper_input_from_its_own_frames_is_bit_for_bit() -> None:
    for clip in (*waveforms()[::2], *nearly_30_s()):
        want = whisper(clip)
        frames = np.ascontiguousarray(want.T[: LogMel().num_frames(np.array(len(clip)))])
        np.testing.assert_array_equal(finish_whisper(frames, float(silence_under(frames.max()))), want)
        if frames.max() >= 1:
            assert silence_under(frames.max()) == max(frames.max() - np.float32(2), np.float32(-1.5))


def test_whisper_input_from_a_cache() -> None:
    clips = [samples for _, samples in recordings()[::6]]
    full, half = LogMel(dtype="float32").compute(clips), LogMel().compute(clips)
    for clip, exact, rounded in zip(clips, full, half, strict=True):
        want = whisper(clip)
        out = finish_whisper(exact["input_features"], float(exact["pad_value"][0]))
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)
        out = finish_whisper(rounded["input_features"], float(rounded["pad_value"][0]))
        np.testing.assert_allclose(out, want, rtol=HALF, atol=1e-6)


def test_qwen3_asr_input_from_a_cache() -> None:
    clips = [samples for _, samples in recordings()[::2]]
    full, half = Qwen3Asr(dtype="float32").compute(clips), Qwen3Asr().compute(clips)
    for clip, exact, rounded in zip(clips, full, half, strict=True):
        want, want_mask = qwen3_asr(clip)
        for fields, rtol in ((exact, 0.0), (rounded, HALF)):
            ((out, mask),) = finish_qwen3_asr(fields["input_features"])
            np.testing.assert_allclose(out, want, rtol=rtol, atol=1e-6)
            np.testing.assert_array_equal(mask, want_mask)
            assert mask.dtype == want_mask.dtype


def test_qwen3_asr_input_in_a_longer_batch_is_followed_by_masked_zeros() -> None:
    (out, mask), _ = finish_qwen3_asr(np.ones((130, 128), np.float32), np.ones((601, 128), np.float32))
    assert out.shape == (128, 700)
    assert (out[:, :130] == 1).all()
    assert not out[:, 130:].any()
    assert mask.tolist() == [1] * 130 + [0] * 570


def test_w2v_bert_input_from_a_cache() -> None:
    clips = waveforms()
    full, half = W2vBert().compute(clips), W2vBert(dtype="float16").compute(clips)
    differences = []
    for clip, exact, rounded in zip(clips, full, half, strict=True):
        (want,), (want_mask,) = w2v_bert([clip])
        rows = int(exact["valid_frames"][0])
        out, mask = finish_w2v_bert(exact["fbanks"][:rows])
        assert out.shape == want.shape
        np.testing.assert_array_equal(mask, want_mask)
        assert mask.dtype == want_mask.dtype
        differences.append(np.abs(out - want).ravel())
        out, mask = finish_w2v_bert(rounded["fbanks"][:rows])
        # Values up to 26 in 32 steps a unit of 16: half a step is 2^-7, and bins that vary deviate by 0.2 or more.
        assert np.quantile(np.abs(out - want), 0.999) < 2.0**-7 / 0.2
    assert np.quantile(np.concatenate(differences), 0.999) <= 5e-6


def test_w2v_bert_input_of_a_batch_is_the_extractors() -> None:
    clips = [samples for _, samples in recordings()[:6]]
    want, want_mask = w2v_bert(clips)
    for index, fields in enumerate(W2vBert().compute(clips)):
        out, mask = finish_w2v_bert(fields["fbanks"][: int(fields["valid_frames"][0])], length=want.shape[1])
        np.testing.assert_allclose(out, want[index], rtol=0, atol=2e-5)
        np.testing.assert_array_equal(mask, want_mask[index])


@pytest.mark.parametrize(("start", "num_samples"), [(0, 16_000), (7, 4001), (33, 2000), (64, 12_345)])
def test_w2v_bert_input_of_a_crop_is_the_extractors(start: int, num_samples: int) -> None:
    for clip in [samples for _, samples in recordings() if len(samples) > 33_000][:8]:
        (fields,) = W2vBert().compute([clip])
        rows = 1 + (num_samples - 400) // 160
        out, mask = finish_w2v_bert(fields["fbanks"][start : start + rows])
        (want,), (want_mask,) = w2v_bert([clip[160 * start : 160 * start + num_samples]])
        assert np.quantile(np.abs(out - want), 0.999) <= 5e-5
        np.testing.assert_array_equal(mask, want_mask)


def test_w2v_bert_input_does_not_depend_on_alignment() -> None:
    fbanks = W2vBert().compute([recordings()[2][1]])[0]["fbanks"]
    want, _ = finish_w2v_bert(fbanks)
    for offset in (1, 3, 4, 8):
        room = np.empty(fbanks.size + want.size + offset, np.float32)
        moved = room[offset : offset + fbanks.size].reshape(fbanks.shape)
        moved[:] = fbanks
        out = room[-want.size :].reshape(want.shape)
        w2v_bert_input(moved, out, np.empty(len(out), np.int32))
        np.testing.assert_array_equal(out, want)


@given(hnp.arrays(np.int16, st.integers(0, 50)), st.integers(0, 9))
def test_waveform_input_divides_int16_exactly(clip: np.ndarray, padding: int) -> None:
    clip.flags.writeable = False
    clips = [{"waveform": clip}, {"waveform": np.zeros(len(clip) + padding, np.int16)}]
    out = batch_of(Waveform(), clips)["input_values"][0].numpy()
    assert len(out) == len(clip) + padding
    assert (out[: len(clip)].astype(np.float64) * 32768 == clip).all()
    assert not out[len(clip) :].any()


def test_waveform_input_is_the_same_from_both_dtypes() -> None:
    clip = recordings()[0][1]
    for dtype in ("int16", "float32"):
        (fields,) = Waveform(dtype=dtype).compute([clip])
        [out] = batch_of(Waveform(dtype=dtype), [fields])["input_values"].numpy()
        np.testing.assert_array_equal(out, clip)


@given(st.integers(1, 5000))
def test_lengths(num_frames: int) -> None:
    form = Qwen3Asr.batch(Stored("", flat(), {spec.name: spec for spec in Qwen3Asr().fields()}))
    assert form.main.room(num_frames) == next(n for n in range(num_frames, num_frames + 100) if n % 100 == 0)
    assert output_frames(num_frames) == len(range(0, num_frames, 2))
    many = np.arange(num_frames, num_frames + 3)
    assert output_frames(many).tolist() == [output_frames(int(n)) for n in many]


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (lambda e: w2v_bert_input(e(1, 80), e(1, 160), e(1)), "have 1 frames; their variance needs 2"),
        (lambda e: w2v_bert_input(e(5, 80), e(2, 160), e(2)), "the sample needs 3"),
        (lambda e: w2v_bert_input(e(4, 80), e(2, 80), e(2)), r"out is \[2, 80\]"),
        (lambda e: w2v_bert_input(e(4, 80), e(2, 320)[:, ::2], e(2)), "wanted C-contiguous"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(finish: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        finish(lambda *shape: np.zeros(shape, np.float32))
