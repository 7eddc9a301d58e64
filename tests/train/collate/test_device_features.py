"""Features made of a cache of waveforms below the cut are the cached ones of the same waveforms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import load_config
from forebay.config import Config
from forebay.config.tree import DeviceFeaturesConfig
from forebay.errors import ConfigError
from forebay.steps.audio.log_mel import LogMel, Qwen3Asr
from forebay.steps.audio.w2v_bert import FLOOR, W2vBert
from forebay.steps.step import AudioStep, Stored
from forebay.train import loader as loader_module
from forebay.train import make_loader
from forebay.train.collate.collator import Collator
from forebay.train.collate.device_features import DeviceFeatures, stored_as
from forebay.train.loop.run import run
from tests.flat_constants import flat
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.steps.audio.clips import recordings
from tests.train.fake_source import FakeSource
from tests.train.test_device import FakeStream

STEPS: list[tuple[AudioStep, DeviceFeaturesConfig]] = [
    (LogMel(dtype="float32"), DeviceFeaturesConfig(features="log_mel")),
    (LogMel(n_mels=128, dtype="float32"), DeviceFeaturesConfig(features="log_mel", n_mels=128)),
    (Qwen3Asr(dtype="float32"), DeviceFeaturesConfig(features="qwen3_asr")),
    (W2vBert(dtype="float32"), DeviceFeaturesConfig(features="w2v_bert")),
]
IDS = ["log_mel 80", "log_mel 128", "qwen3_asr", "w2v_bert"]


def source_of(clips: list[np.ndarray[Any, Any]]) -> FakeSource:
    source = FakeSource([len(clip) for clip in clips], features="waveform", prompt=None, dtype="int16")
    source.constants = flat(features="waveform", sample_rate_hz=16_000)
    source.samples = [{"waveform": clip} for clip in clips]
    return source


def batches(
    step: AudioStep, made: DeviceFeaturesConfig, clips: list[np.ndarray[Any, Any]]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the batch of clips below the cut, and that of a cache of the features."""
    source = source_of(clips)
    found = Collator(source, features=DeviceFeatures.of(made, Stored.of(source)))(source.samples)
    cached = source_of(clips)
    seen = stored_as(step, Stored.of(source))
    cached.constants, cached.fields = seen.constants, seen.fields
    stored = step.make([clip.astype(np.float32) / 32768 for clip in clips])
    return found, Collator(cached)(stored)


def check(step: AudioStep, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        if value.dtype != torch.float32:
            assert torch.equal(found[name], value), name
        elif not isinstance(step, W2vBert):
            assert (found[name] - value).abs().max() <= 1e-5, name


@pytest.mark.parametrize(("step", "made"), STEPS, ids=IDS)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(600, 40_000), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_features_of_noise_are_the_cached_ones(
    step: AudioStep, made: DeviceFeaturesConfig, lengths: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    clips = [(rng.normal(size=length) * rng.uniform(1, 9000)).astype(np.int16) for length in lengths]
    check(step, *batches(step, made, clips))


@pytest.mark.parametrize(("step", "made"), STEPS, ids=IDS)
def test_features_of_recordings_are_the_cached_ones(step: AudioStep, made: DeviceFeaturesConfig) -> None:
    clips = [np.clip(np.rint(clip * 32768), -32768, 32767).astype(np.int16) for _, clip in recordings()[:3]]
    edges = [np.zeros(16_000, np.int16), clips[0][:561], np.tile(clips[0], 20)[: 30 * 16_000 + 777]]
    edges.append(np.tile(clips[0], 20)[: 30 * 16_000 - 40])
    check(step, *batches(step, made, [*clips[:3], *edges]))


@pytest.mark.parametrize(("step", "made"), STEPS, ids=IDS)
def test_features_are_of_float32_under_autocast(step: AudioStep, made: DeviceFeaturesConfig) -> None:
    clips = [(np.random.default_rng(0).normal(size=9000) * 3000).astype(np.int16)]
    with torch.autocast("cpu", torch.bfloat16):
        check(step, *batches(step, made, clips))


def test_filter_banks_are_within_a_thousandth_of_a_bins_power() -> None:
    clips = [np.clip(np.rint(clip * 32768), -32768, 32767).astype(np.int16) for _, clip in recordings()[:3]]
    made = DeviceFeatures.of(DeviceFeaturesConfig(features="w2v_bert"), Stored.of(source_of(clips)))
    lengths = [len(clip) for clip in clips]
    counts = made.num_frames(lengths)
    waves = np.zeros((len(clips), max(lengths)), np.float32)
    for row, clip in zip(waves, clips, strict=True):
        row[: len(clip)] = clip / np.float32(32768)
    found = made.make(torch.from_numpy(waves), torch.tensor(lengths), torch.tensor(counts), counts).lines.numpy()
    stored = W2vBert().make([clip.astype(np.float32) / 32768 for clip in clips])
    wanted = np.concatenate([each["fbanks"][: each["valid_frames"][0]] for each in stored])
    assert found.shape == wanted.shape
    above = wanted > np.log(FLOOR) + 1e-3
    assert above.mean() > 0.9
    assert np.abs(np.exp(found[above].astype(np.float64) - wanted[above]) - 1).max() <= 1e-3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    corpus = speech_corpus(tmp_path_factory.mktemp("features"))
    for features in ("waveform", "log_mel", "qwen3_asr"):
        build_here(config_of(corpus, f'audio.features="{features}"'))
    return corpus


def config_of(corpus: Corpus, *overrides: str) -> Config:
    corpus.config()
    return load_config(Path(corpus.folder) / "config.toml", overrides=overrides)


@pytest.mark.parametrize("features", ["log_mel", "qwen3_asr"])
@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.few
def test_a_cache_of_waveforms_gives_the_batches_of_a_cache_of_features(
    corpus: Corpus, features: str, monkeypatch: pytest.MonkeyPatch, *, is_on_device: bool
) -> None:
    plain = config_of(corpus, f'audio.features="{features}"')
    made = config_of(corpus, f'loader.device_features={{features="{features}"}}')
    if is_on_device:
        monkeypatch.setattr(loader_module, "side_stream", lambda device: FakeStream())
    where: dict[str, Any] = {"device": "fake"} if is_on_device else {}
    for one, other in zip(make_loader(made, **where), make_loader(plain), strict=True):
        assert list(one) == list(other) or set(one) == set(other)
        for name, value in other.items():
            assert one[name].dtype == value.dtype
            # float16 in the cache of features: half of its last place beside values below 2.
            assert (one[name] - value).abs().max() <= (6e-4 if value.is_floating_point() else 0), name


def test_another_number_of_bins_needs_no_other_cache_and_masks_come_behind(corpus: Corpus) -> None:
    wide = 'loader.device_features={features="log_mel", n_mels=128}'
    plain = list(make_loader(config_of(corpus, wide)))
    assert {tuple(batch["input_features"].shape[1:]) for batch in plain} == {(128, 3000)}
    changes = 'augment=[{kind="gain", db=[-6, 6]}, {kind="spec_augment", time_prob=0.5, time_length=3}]'
    for one, other in zip(make_loader(config_of(corpus, wide, changes)), plain, strict=True):
        assert (one["input_features"] == 0).all(1).any(1).all()  # every clip has frames that are masked
        assert not torch.equal(one["input_features"], other["input_features"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ('audio.features="log_mel"', 'loader.device_features={features="log_mel"}'),
            r"holds 'log_mel' at 16000 Hz; build a cache of audio\.features = \"waveform\"",
        ),
        (
            (
                'loader.device_features={features="log_mel"}',
                'augment=[{kind="spec_augment"}, {kind="gain", db=[0, 1]}]',
            ),
            "put spec_augment last",
        ),
        (('loader.device_features={features="log_mel"}', 'loader.form="ragged"'), "makes padded batches"),
        (('loader.device_features={features="qwen3_asr", n_mels=80}',), "n_mels is of features"),
        (('loader.device_features={features="mel"}',), "Input should be 'log_mel', 'qwen3_asr' or 'w2v_bert'"),
    ],
)
def test_what_cannot_be_made_is_refused(corpus: Corpus, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(config_of(corpus, *overrides))


def demo_wave(folder: Path, *overrides: str) -> Config:
    """Returns the demo as a config of waveforms, 6 clips of it, trained on and evaluated as log-mels."""
    root = Path(__file__).parents[3]
    text = (root / "configs" / "demo_speech.toml").read_text()
    text = text.replace('features = "log_mel"', 'features = "waveform"').replace("n_mels = 80", "")
    text = text.replace('dtype = "float16"  ', "").replace("../demo", str(root / "demo"))
    path = folder / "wave.toml"
    path.write_text(text.replace("demo_speech.toml", "wave.toml").replace("max_samples = 16", "max_samples = 2"))
    few = ("source.max_samples=6", "source.max_duration_s=4.0", "loader.cache=off", "train.max_steps=2")
    made = 'loader.device_features={features="log_mel"}'
    return load_config(path, overrides=[*few, made, f"train.output_dir={folder / 'runs'}", *overrides])


@pytest.mark.wide
def test_a_run_trains_on_features_of_changed_waveforms_and_evaluates_plain_ones(tmp_path: Path) -> None:
    changes = 'augment=[{kind="speed", factors=[0.9, 1.1]}, {kind="gain", db=[-9, 9]}, {kind="spec_augment"}]'
    AcceleratorState._reset_state(reset_partial_state=True)
    report = run(demo_wave(tmp_path, changes), log=lambda line: None)
    assert report is not None
    assert (report.steps, report.evaluations_failed) == (2, 0)
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = run(demo_wave(tmp_path, f"train.output_dir={tmp_path / 'plain'}"), log=lambda line: None)
    assert plain is not None
    assert plain.steps == 2
    (folder,) = (tmp_path / "plain").iterdir()
    before = json.loads((folder / "eval.jsonl").read_text().splitlines()[0])
    assert lines[0]["num_samples"] == before["num_samples"] == 2


def test_a_model_that_takes_other_features_is_refused_with_them(tmp_path: Path) -> None:
    config = demo_wave(tmp_path, 'loader.device_features={features="qwen3_asr"}')
    with pytest.raises(ConfigError, match=r'audio\.features is "qwen3_asr", but .* takes "log_mel"'):
        run(config, log=lambda line: None)
    wide = demo_wave(tmp_path, 'loader.device_features={features="log_mel", n_mels=128}')
    with pytest.raises(ConfigError, match=r"n_mels is 128, but the model in .* takes 80 mel bins"):
        run(wide, log=lambda line: None)
