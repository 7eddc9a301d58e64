"""CUDA finishes what crosses over as its twin on the CPU does: batches, changes, features, whole loaders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.tree import DeviceFeaturesConfig
from forebay.steps.audio.w2v_bert import FLOOR
from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import Stored
from forebay.train import make_loader
from forebay.train.augment.changes import Change, Gain, Masks, Noise, Reverb
from forebay.train.augment.draws import EpochDraws
from forebay.train.collate.collator import Collator
from forebay.train.collate.device_features import DeviceFeatures
from forebay.train.collate.ragged import Crossing, RaggedBatch
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.steps.audio.clips import recordings
from tests.train.augment.test_augmentation import all_changes, by_id
from tests.train.augment.test_changes import clips_of, noises, waves
from tests.train.collate.test_collator import ragged
from tests.train.collate.test_device_features import source_of
from tests.train.collate.test_ragged import DTYPES, fields
from tests.train.fake_source import FakeSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; each has a twin on the CPU"),
]


def on_cuda(crossed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in crossed.items()}


@given(source=ragged(), dtype=st.sampled_from(DTYPES))
def test_batches_are_those_of_the_host(source: FakeSource, dtype: torch.dtype) -> None:
    wanted = Collator(source, dtype=dtype)(source.samples)
    device = Collator(source, dtype=dtype, on_device=True)
    found = device.finish(on_cuda(device(source.samples)))
    assert set(found) == set(wanted)
    is_normalised = source.constants.get("features") == "w2v_bert"
    for name, value in wanted.items():
        assert found[name].is_cuda
        assert found[name].dtype == value.dtype
        if is_normalised and value.is_floating_point():
            rounded = 2e-6 + value.abs().max().item() * torch.finfo(dtype).eps * (dtype != torch.float32)
            assert (found[name].cpu() - value).abs().max() <= rounded, name
        else:
            assert torch.equal(found[name].cpu(), value), name


@given(drawn=fields(), dtype=st.sampled_from(DTYPES))
def test_declared_fields_are_those_of_the_host(
    drawn: tuple[FieldForm, list[np.ndarray[Any, Any]]], dtype: torch.dtype
) -> None:
    field, lines = drawn
    mask = FieldForm(name="mask", dtype="int32", shape=(None,), stored_dtype="uint8", mask_of="values")
    form, columns = BatchForm.exact("a test", field, mask, field.lengths()), [(line,) for line in lines]
    rows = [{"values": line} for line in columns]
    wanted = collate(form, rows, dtype=dtype, allocate=fresh, are_rows=True)
    crossing = Crossing(form, dtype)
    found = crossing.finish(on_cuda(crossing.collate({"values": columns}, allocate=fresh)))
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].cpu(), value), name


@pytest.mark.parametrize(
    ("change", "within"),
    [
        (Gain(probability=0.6, db=(-9, 9)), 0.0),
        (Noise(probability=0.6, clips=clips_of(noises([5000, 700])), snr_db=(0, 20)), 1e-6),
        (Reverb(probability=0.6, clips=clips_of(noises([1200]))), 1e-6),
    ],
)
def test_changes_of_waveforms_are_those_of_the_host(change: Change, within: float) -> None:
    lengths = [4000, 9000, 300, 16_000, 777, 12_345]
    values, _ = waves(lengths)
    drawn = change.draw(EpochDraws(1, 0).of([str(i) for i in range(6)], 0), lengths)
    tensors = {name: torch.from_numpy(array) for name, array in drawn.items()}
    wanted = change.apply(values.clone(), torch.tensor(lengths), tensors)
    found = change.apply(values.cuda(), torch.tensor(lengths).cuda(), on_cuda(tensors))
    assert not torch.equal(wanted, values)
    assert (found.cpu() - wanted).abs().max() <= within


def test_masks_are_those_of_the_host() -> None:
    lengths, rng = [3000, 40, 700], np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(3, 3000, 80)).astype(np.float32))
    masks = Masks(probability=1.0, time=(0.05, 10, 2), bins=(0.1, 10, 1), num_bins=80)
    drawn = masks.draw(EpochDraws(1, 0).of(["a", "b", "c"], 0), lengths)
    tensors = {name: torch.from_numpy(array) for name, array in drawn.items()}
    wanted = masks.apply(values.clone(), torch.tensor(lengths), tensors)
    found = masks.apply(values.cuda(), torch.tensor(lengths).cuda(), on_cuda(tensors))
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    "made",
    [
        DeviceFeaturesConfig(features="log_mel"),
        DeviceFeaturesConfig(features="log_mel", n_mels=128),
        DeviceFeaturesConfig(features="qwen3_asr"),
        DeviceFeaturesConfig(features="w2v_bert"),
    ],
    ids=["log_mel 80", "log_mel 128", "qwen3_asr", "w2v_bert"],
)
@pytest.mark.few
def test_features_are_the_cached_ones(made: DeviceFeaturesConfig, precision: str) -> None:
    """Whatever precision of products a user has chosen, and under autocast."""
    clips = [np.clip(np.rint(clip * 32768), -32768, 32767).astype(np.int16) for _, clip in recordings()[:3]]
    clips += [np.zeros(16_000, np.int16), clips[0][:561], np.tile(clips[0], 20)[: 30 * 16_000 + 777]]
    features = DeviceFeatures.of(made, Stored.of(source_of(clips)))
    lengths = [len(clip) for clip in clips]
    counts = features.num_frames(lengths)
    values = np.zeros((len(clips), max(lengths)), np.float32)
    for row, clip in zip(values, clips, strict=True):
        row[: len(clip)] = clip / np.float32(32768)
    stored = features.step.make([clip.astype(np.float32) / 32768 for clip in clips])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "high"):
            places = torch.tensor(lengths).cuda(), torch.tensor(counts).cuda()
            found = features.make(torch.from_numpy(values).cuda(), *places, counts).lines.cpu().numpy()
    finally:
        torch.set_float32_matmul_precision(before)
    name = features.step.fields()[0].name
    wanted = np.concatenate([each[name][:count] for each, count in zip(stored, counts, strict=True)])
    assert found.shape == wanted.shape
    if made.features != "w2v_bert":
        # Whole numbers are decades of power times 4: float32 knows bins below a millionth of the loudest less well.
        is_weak = wanted < wanted.max() - 6 / 4
        assert np.abs(found - wanted)[~is_weak].max() <= 1e-5
        assert np.abs(found - wanted).max() <= 6e-5
        return
    above = wanted > np.log(FLOOR) + 1e-3
    assert np.abs(np.exp(found[above].astype(np.float64) - wanted[above]) - 1).max() <= 1e-3


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    corpus = speech_corpus(tmp_path_factory.mktemp("cuda"))
    build_here(corpus.config('audio.features="waveform"'))
    return corpus


def test_a_loader_changes_clips_on_the_device_as_on_the_host(spoken: Corpus, tmp_path: Path) -> None:
    config = spoken.config(all_changes(spoken))
    wanted = by_id(make_loader(config, with_ids=True))
    loader: Any = make_loader(config, with_ids=True, device="cuda", device_prefetch=2)
    found = {}
    for batch, ids in loader:
        torch.cuda._sleep(10_000_000)  # the step is slower than the copies
        assert all(value.is_cuda for value in batch.values())
        for place, name in enumerate(ids):
            mask = batch["attention_mask"][place].bool()
            found[name] = batch["input_values"][place][mask].cpu().numpy()
    assert set(found) == set(wanted)
    assert all(np.abs(values - wanted[name]).max() < 2e-6 for name, values in found.items())


def test_a_loader_makes_features_and_masks_on_the_device(spoken: Corpus) -> None:
    made = 'loader.device_features={features="log_mel"}'
    changes = 'augment=[{kind="gain", db=[-6, 6]}, {kind="spec_augment", time_prob=0.5, time_length=3}]'
    config = spoken.config(made, changes)
    for one, other in zip(make_loader(config, device="cuda"), make_loader(config), strict=True):
        assert set(one) == set(other)
        for name, value in other.items():
            assert one[name].is_cuda
            assert (one[name].cpu() - value).abs().max() <= (1e-5 if value.is_floating_point() else 0), name


def test_ragged_batches_are_those_of_the_host(spoken: Corpus) -> None:
    config = spoken.config('loader.form="ragged"')
    for one, other in zip(make_loader(config, device="cuda"), make_loader(config), strict=True):
        assert isinstance(one, RaggedBatch)
        assert all(one[name].is_cuda and torch.equal(one[name].cpu(), other[name]) for name in other.fields)
