from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DecodeError
from forebay.steps import step as step_module
from forebay.steps.audio import spectrum
from forebay.steps.audio.log_mel import LogMel, Qwen3Asr
from forebay.steps.audio.mel import Mel
from forebay.steps.audio.w2v_bert import W2vBert
from forebay.steps.audio.waveform import Waveform
from forebay.steps.step import AudioStep
from tests.strategies import waveform_lists

STEPS: tuple[AudioStep, ...] = (
    LogMel(dtype="float32"),
    LogMel(n_mels=128),
    Qwen3Asr(),
    W2vBert(),
    W2vBert(dtype="float16"),
    Mel.of(preset="hifigan"),
    Mel(rate_hz=16_000, n_fft=250, hop_length=70, n_mels=23, pad_mode="constant", log="db", dtype="float16"),
    Waveform(),
    Waveform(dtype="float32"),
)


every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{type(step).__name__}-{step.dtype}")


def digest(step: AudioStep, clips: Sequence[np.ndarray]) -> list[str]:
    """Returns a hash of names, shapes and bytes for each clip."""
    found = []
    for fields in step.compute(clips):
        state = hashlib.sha256()
        for name, values in fields.items():
            state.update(f"{name}{values.dtype}{values.shape}".encode() + values.tobytes())
        found.append(state.hexdigest())
    return found


def usable(step: AudioStep, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
    least = step.framing.least_samples if isinstance(step, Mel) else step.min_samples
    return [clip for clip in clips if clip.size >= least]


@every_step
@settings(max_examples=20)
@given(data=st.data())
@pytest.mark.few("LogMel-float16", "Mel-float32", "Qwen3Asr-float16", "W2vBert-float16", "Waveform-int16")
def test_a_clip_does_not_depend_on_its_neighbours(step: AudioStep, data: st.DataObject) -> None:
    clips = usable(step, data.draw(waveform_lists()))
    together = digest(step, clips)
    assert together == [digest(step, [clip])[0] for clip in clips]
    order = data.draw(st.permutations(range(len(clips))))
    assert digest(step, [clips[i] for i in order]) == [together[i] for i in order]


def noise_clips() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (560, 1, 561, 16_000, 40_001, 720, 300, 160_000, 8000, 7999)
    return [(rng.standard_normal(n) * 10 ** rng.uniform(-5, 0)).astype(np.float32) for n in sizes]


def all_digests() -> list[list[str]]:
    """Returns the hashes of all steps; asserts that each clip alone gives the same. Other processes run it, too."""
    found = []
    for step in STEPS:
        clips = usable(step, noise_clips())
        found.append(digest(step, clips))
        assert found[-1] == [digest(step, [clip])[0] for clip in clips], f"{step} depends on neighbours"
    return found


def in_another_process(**environment: str) -> list[list[str]]:
    program = (
        "import json, torch; from tests.steps.audio.test_features import all_digests;print(json.dumps(all_digests()))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer: list[list[str]] = json.loads(done.stdout)
    return answer


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    want = all_digests()
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert all_digests() == want
    finally:
        torch.set_num_threads(before)


@pytest.mark.wide
def test_bytes_do_not_depend_on_the_number_of_threads_that_a_process_starts_with() -> None:
    assert in_another_process(OPENBLAS_NUM_THREADS="5", OMP_NUM_THREADS="5", MKL_NUM_THREADS="5") == all_digests()


def test_neighbours_do_not_matter_with_the_kernels_of_another_cpu() -> None:
    # OpenBLAS's AVX2 kernels round a row by its place in the product; where this CPU cannot choose, they are its own.
    assert len(in_another_process(OPENBLAS_CORETYPE="Haswell")) == len(STEPS)


def test_bytes_do_not_depend_on_chunks_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    want = all_digests()
    monkeypatch.setattr(spectrum, "CHUNK_ROWS", 64)
    monkeypatch.setattr(step_module, "_GROUP_SAMPLES", 20_000)
    assert all_digests() == want


def test_settings_of_training_do_not_change_bytes() -> None:
    clips = noise_clips()
    want = [digest(step, usable(step, clips)) for step in STEPS]
    precision, default = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            assert [digest(step, usable(step, clips)) for step in STEPS] == want
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(default)
        torch.set_default_device(None)


@every_step
@given(waveform_lists())
@settings(max_examples=10)
@pytest.mark.few("LogMel-float32", "Mel-float16", "Qwen3Asr-float16", "W2vBert-float16", "Waveform-int16")
def test_fields_are_what_was_announced(step: AudioStep, clips: list[np.ndarray]) -> None:
    clips = usable(step, clips)
    lengths = step.num_frames(np.array([clip.size for clip in clips], np.int32))
    for clip, fields, length in zip(clips, step.compute(clips), lengths.tolist(), strict=True):
        specs = step.fields()
        assert list(fields) == [spec.name for spec in specs]
        for spec in specs:
            assert fields[spec.name].dtype == spec.numpy_dtype
            assert fields[spec.name].shape[1:] == spec.shape
            assert fields[spec.name].flags.c_contiguous
            assert np.isfinite(fields[spec.name]).all()
        assert len(fields[specs[0].name]) == length == step.num_frames(np.array(clip.size))
        assert all(len(fields[spec.name]) == 1 for spec in specs[1:])


@every_step
def test_no_clips_give_no_fields_and_no_samples_no_frames(step: AudioStep) -> None:
    assert step.compute([]) == []
    assert step.num_frames(np.array(0)) == 0
    assert step.num_frames(np.array([], np.int64)).tolist() == []


@every_step
def test_a_clip_without_samples_is_refused(step: AudioStep) -> None:
    with pytest.raises(DecodeError, match="no samples") as caught:
        step.compute([np.ones(1000, np.float32), np.zeros(0, np.float32)])
    assert caught.value.reason == "empty_audio"


@every_step
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_sample_that_is_no_number_is_refused(step: AudioStep, value: float) -> None:
    clip = np.zeros(3000, np.float32)
    clip[[1234, 2000]] = value
    with pytest.raises(DecodeError, match=r"2 of 3000 samples are NaN, .* at 1234") as caught:
        step.compute([clip])
    assert caught.value.reason == "not_finite"


@every_step
def test_loud_clips_are_not_refused(step: AudioStep) -> None:
    clip = np.random.default_rng(0).standard_normal(20_000).astype(np.float32) * np.float32(1e9)
    (fields,) = step.compute([clip])
    assert all(np.isfinite(values).all() for values in fields.values())


def test_w2v_bert_refuses_less_than_two_frames() -> None:
    W2vBert().check(np.ones(560, np.float32))
    with pytest.raises(DecodeError, match="559 samples, w2v_bert needs 560") as caught:
        W2vBert().check(np.ones(559, np.float32))
    assert caught.value.reason == "too_short"


@pytest.mark.parametrize("clip", [np.ones(1000), np.ones((2, 1000), np.float32), np.ones(1000, np.int16)])
def test_another_kind_of_array_is_a_mistake_of_the_caller(clip: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"takes float32 \[num_samples\]"):
        LogMel().check(clip)
