"""Random crops: drawn by (seed, epoch, sample id) alone, bit for bit what the cropped waveform by itself would give."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import SeamlessM4TFeatureExtractor

from forebay import load_config
from forebay.config import BucketConfig, Config
from forebay.errors import CacheCorruptError, ConfigError
from forebay.plan.make import Planned
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_key
from forebay.steps.audio.framing import BLOCK_ROWS, HOP_SAMPLES
from forebay.steps.audio.w2v_bert import W2vBert, output_frames, w2v_bert_input
from forebay.steps.step import Batch
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import FieldSpec
from forebay.store.source import SampleSource
from forebay.train.collate.collator import Collator, Crop, CropDraws
from forebay.train.dataset import PlanSampler, SampleDataset
from forebay.train.loader import Loader
from forebay.train.select import make_loader, select
from tests.flat_constants import flat
from tests.preprocess.here_pool import build_here
from tests.processes import python
from tests.steps.audio.clips import recordings
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of as plan_loader

ROOT = Path(__file__).parents[3]
CROP_S = 6.0
CROP_SAMPLES = 96_000
GRID_SAMPLES = W2vBert.grid_samples or 0
Array = np.ndarray[Any, Any]
crops = st.builds(Crop, num_samples=st.integers(1, 10**7), grid_samples=st.integers(1, 10**5))
draws = st.integers(0, 2**63 - 1)


# Which crop


@given(crop=crops, clip_samples=st.integers(1, 2**31 - 1), draw=draws)
def test_a_crop_starts_on_the_grid_and_lies_inside(crop: Crop, clip_samples: int, draw: int) -> None:
    start = crop.start(clip_samples, draw=draw)
    assert start % crop.grid_samples == 0
    assert start >= 0
    assert start + crop.num_samples <= clip_samples or start == 0


@given(crop=crops, clip_samples=st.integers(1, 10**8))
def test_first_and_last_start_are_reached(crop: Crop, clip_samples: int) -> None:
    last = crop.start(clip_samples, draw=2**63 - 1)
    assert crop.start(clip_samples, draw=0) == 0
    assert last == (crop.num_starts(clip_samples) - 1) * crop.grid_samples
    assert last + crop.grid_samples + crop.num_samples > clip_samples  # none further on would fit


@pytest.mark.parametrize("num_starts", [2, 7, 13, 64])
def test_starts_are_uniform_over_samples_and_over_epochs(num_starts: int) -> None:
    crop = Crop(num_samples=1000, grid_samples=160)
    clip_samples = 1000 + (num_starts - 1) * 160
    epoch = CropDraws(seed=17, epoch=3)
    by_sample = [crop.start(clip_samples, draw=epoch.draw(f"clip-{i}")) // 160 for i in range(6400)]
    by_epoch = [
        crop.start(clip_samples, draw=CropDraws(seed=17, epoch=i).draw("clip")) // 160 for i in range(num_starts * 100)
    ]
    for starts in (by_sample, by_epoch):
        counts = np.bincount(starts, minlength=num_starts)
        expected = len(starts) / num_starts
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        freedom = num_starts - 1
        assert chi_squared < freedom + 4 * np.sqrt(
            2 * freedom
        )  # mean and 4 deviations; seeds are fixed, so it cannot flake


def test_draws_of_epochs_seeds_and_samples_are_unrelated() -> None:
    ids = [f"clip-{i}" for i in range(4000)]

    def uniform(seed: int, epoch: int) -> Array:
        return np.array([CropDraws(seed=seed, epoch=epoch).draw(name) for name in ids]) / 2.0**63

    first = uniform(0, 0)
    for other in (uniform(0, 1), uniform(1, 0), np.roll(first, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 4 / np.sqrt(len(ids))


def test_draws_are_those_of_version_1() -> None:
    # What ran with these seeds must go on with the same crops: a change here is a new CROP_VERSION.
    found = [CropDraws(seed=s, epoch=e).draw(i) for s, e, i in [(0, 0, "a"), (17, 3, "a"), (-1, 0, "\u0928\udcff")]]
    assert found == [359080587591429822, 2919274378552929492, 2864940924144013557]


def test_the_grid_is_the_feature_engines() -> None:
    assert GRID_SAMPLES > 0
    assert GRID_SAMPLES % (BLOCK_ROWS * HOP_SAMPLES) == 0


# What a crop holds


def own_features(waveform: Array, *, dtype: str = "float32") -> Array:
    """Returns forebay's features [T, 160] of a waveform by itself, as an uncropped sample of it would have them."""
    (fields,) = W2vBert(dtype=dtype).compute([waveform])  # type: ignore[arg-type]
    banks = fields["fbanks"][: int(fields["valid_frames"][0])].astype(np.float32)
    out = np.full((int(output_frames(len(banks))), 160), np.nan, np.float32)
    w2v_bert_input(banks, out, np.empty(len(out), np.int32))
    return out


class CropSource(SampleSource):
    """Clips with the fields that a build stores: int16 waveform, filter banks."""

    def __init__(self, clips: Mapping[str, Array], *, dtype: str = "float32") -> None:
        self.key = self.recipe_key = "c" * 64
        self._ids = list(clips)
        floats = [clip.astype(np.float32) / np.float32(32768) for clip in clips.values()]
        made = W2vBert(dtype=dtype).compute(floats)  # type: ignore[arg-type]
        self._samples = [{**a, "waveform": clip} for a, clip in zip(made, clips.values(), strict=True)]
        for array in (array for sample in self._samples for array in sample.values()):
            array.flags.writeable = False
        self.fields = {
            "fbanks": FieldSpec(name="fbanks", dtype=dtype, shape=(80,)),
            "waveform": FieldSpec(name="waveform", dtype="int16"),
        }
        self.constants = flat(features="w2v_bert", sample_rate_hz=16_000)
        sizes = [len(clip) for clip in floats]
        self.lengths: Mapping[str, Array] = {"num_audio_samples": np.array(sizes, np.int32)}

    def __len__(self) -> int:
        return len(self._ids)

    def sample_id(self, index: int) -> str:
        return self._ids[index]

    def ids_digest(self) -> str:
        return self.key

    def read(self, index: int) -> dict[str, Array]:
        return dict(self._samples[index])


def noise(sizes: list[int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {f"clip-{i}": (rng.standard_normal(n) * 2000).astype(np.int16) for i, n in enumerate(sizes)}


@settings(max_examples=15)
@given(data=st.data())
def test_a_crop_is_bit_for_bit_the_cropped_waveforms_own(data: st.DataObject) -> None:
    crop_samples = data.draw(st.sampled_from([560, 561, 720, 8000, 16_000, 16_160, 20_001]))
    near = [crop_samples + d for d in (-161, -160, -1, 0, 1, GRID_SAMPLES - 1, GRID_SAMPLES, GRID_SAMPLES + 1)]
    size = st.one_of(st.sampled_from([n for n in near if n >= 560]), st.integers(560, 60_000))
    source = CropSource(noise(data.draw(st.lists(size, min_size=1, max_size=4))))
    epoch = CropDraws(seed=data.draw(st.integers()), epoch=data.draw(st.integers(0, 1000)))
    samples = [epoch.beside(source.read(i), source.sample_id(i)) for i in range(len(source))]
    batch = Collator(source, crop_s=crop_samples / 16_000)(samples)
    for index, (wav, feats) in enumerate(zip(batch["wav"].numpy(), batch["feats"].numpy(), strict=True)):
        clip = source.read(index)["waveform"]
        start = Crop(num_samples=crop_samples, grid_samples=GRID_SAMPLES).start(
            len(clip), draw=epoch.draw(source.sample_id(index))
        )
        piece = clip[start : start + crop_samples].astype(np.float32) / np.float32(32768)
        np.testing.assert_array_equal(wav, np.pad(piece, (0, crop_samples - len(piece))))
        np.testing.assert_array_equal(feats[0], own_features(wav))


def assert_slices_are_exact() -> None:
    """Crops of recordings all over the grid equal their own features bit for bit. Also run in other processes."""
    clips = {str(i): (clip * 32768).astype(np.int16) for i, (_, clip) in enumerate(recordings()) if len(clip) > 64_000}
    source = CropSource(clips)
    collate = Collator(source, crop_s=2.0)
    starts = set()
    for epoch in range(3):
        epoch_draws = CropDraws(seed=5, epoch=epoch)
        samples = [epoch_draws.beside(source.read(i), source.sample_id(i)) for i in range(len(source))]
        starts |= {
            Crop(num_samples=32_000, grid_samples=GRID_SAMPLES).start(len(s["waveform"]), draw=int(s["crop_draw"][0]))
            for s in samples
        }
        batch = collate(samples)
        for wav, feats in zip(batch["wav"].numpy(), batch["feats"].numpy(), strict=True):
            np.testing.assert_array_equal(feats[0], own_features(wav))
    assert len(starts) > 10


@pytest.mark.wide
def test_slices_are_exact_with_the_kernels_of_another_cpu() -> None:
    # OpenBLAS's AVX2 kernels round a row by its place in a product; where this CPU cannot choose, they are its own.
    program = "from tests.train.collate.test_crop import assert_slices_are_exact; assert_slices_are_exact()"
    done = python("-c", program, OPENBLAS_CORETYPE="Haswell")
    assert done.returncode == 0, done.stderr


def test_silence_behind_a_clip_counts_in_mean_and_variance() -> None:
    source = CropSource(noise([20_000]))
    draw = CropDraws(seed=0, epoch=0)
    sample = draw.beside(source.read(0), "clip-0")
    batch = Collator(source, crop_s=CROP_S)([sample])
    feats = batch["feats"].numpy().reshape(598, 80)
    assert np.abs(feats.mean(axis=0)).max() < 1e-5
    np.testing.assert_allclose(feats.std(axis=0, ddof=1), 1.0, atol=1e-5)
    silent = feats[20_000 // 160 + 1 :]
    assert (silent == silent[0]).all()
    assert not batch["wav"][0, 20_000:].any()


@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_are_the_same_arithmetic_rounded_at_the_end(stored: str, dtype: torch.dtype) -> None:
    source = CropSource(noise([9000, 20_000, 40_000]), dtype=stored)
    epoch = CropDraws(seed=1, epoch=0)
    samples = [epoch.beside(source.read(i), source.sample_id(i)) for i in range(3)]
    wide = Collator(source, crop_s=1.0)(samples)
    batch = Collator(source, crop_s=1.0, dtype=dtype)(samples)
    for name in ("wav", "feats"):
        assert batch[name].dtype == dtype
        assert torch.equal(batch[name], wide[name].to(dtype))
    for wav, feats in zip(wide["wav"].numpy(), wide["feats"].numpy(), strict=True):
        np.testing.assert_array_equal(feats[0], own_features(wav, dtype=stored))


# The same crop everywhere


@cache
def many_clips() -> CropSource:
    sizes = np.random.default_rng(3).integers(560, 30_000, 37).tolist()
    return CropSource(noise(sizes))


PLAN = BucketConfig(edges_s=(0.5, 1.0, 2.0), batch_size=3, lockstep=2)


def loader_of(source: CropSource, **changes: Any) -> Loader:
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=PLAN)
    return plan_loader(source, plan, **{"plan_key": plan_key(source.key, PLAN), "seed": 7, "crop_s": 0.5, **changes})


def found(batches: Any) -> set[tuple[bytes, bytes]]:
    """Returns the crops of batches, without their order."""
    return {
        (w.numpy().tobytes(), f.numpy().tobytes()) for b in batches for w, f in zip(b["wav"], b["feats"], strict=True)
    }


@cache
def wanted(epoch: int, *, seed: int = 7) -> set[tuple[bytes, bytes]]:
    """Returns the crops of an epoch, each made by itself."""
    source, draws_of = many_clips(), CropDraws(seed=seed, epoch=epoch)
    collate = Collator(source, crop_s=0.5)
    samples = [draws_of.beside(source.read(i), source.sample_id(i)) for i in range(len(source))]
    return found(collate([sample]) for sample in samples)


@settings(max_examples=12)
@given(
    world_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    num_threads=st.integers(0, 3),
    steps=st.integers(0, 4),
    epoch=st.integers(0, 3),
)
def test_crops_do_not_depend_on_ranks_threads_or_a_resume(
    world_sizes: tuple[int, int], num_threads: int, steps: int, epoch: int
) -> None:
    source, before, after = many_clips(), *world_sizes
    crops_seen: set[tuple[bytes, bytes]] = set()
    for rank in range(before):
        loader = loader_of(source, dp_rank=rank, dp_world_size=before, num_threads=num_threads)
        loader.set_epoch(epoch)
        crops_seen |= found(batch for _, batch in zip(range(min(steps, len(loader) - 1)), loader, strict=False))
        state = loader.state_dict()
    for rank in range(after):
        loader = loader_of(source, dp_rank=rank, dp_world_size=after, num_threads=num_threads)
        loader.load_state_dict(state)
        crops_seen |= found(loader)
    assert crops_seen == wanted(epoch)


def test_every_epoch_and_seed_has_its_own_crops() -> None:
    loader = loader_of(many_clips(), num_threads=0)
    first, second = found(loader), found(loader)
    assert first == wanted(0)
    assert second == wanted(1)
    assert found(loader_of(many_clips(), seed=8)) == wanted(0, seed=8)
    clips_with_a_choice = 37 - len(first & second)
    assert clips_with_a_choice > 10
    assert wanted(0) != wanted(0, seed=8)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.few("2")
def test_a_dataloader_has_the_same_crops(num_workers: int) -> None:
    source = many_clips()
    loader = loader_of(source, num_threads=0)
    dataset = SampleDataset(source, crop_seed=7)
    sampler = PlanSampler(Planned(plan=loader.plan, key="0"), seed=7)
    theirs: Any = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=Collator(source, crop_s=0.5), num_workers=num_workers
    )
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        sampler.set_epoch(epoch)
        for one, other in zip(loader, theirs, strict=True):
            assert one.keys() == other.keys() == {"wav", "feats"}
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_padding_is_counted_in_frames_of_the_crop() -> None:
    source = CropSource(noise([4000, 20_000]))
    loader = loader_of(source, num_threads=0)
    list(loader)
    report = loader.report()
    room, short = 1 + (8000 - 400) // 160, 1 + (4000 - 400) // 160
    assert (report["frames"], report["padded_frames"]) == (room + short, room - short)


def test_samples_without_a_draw_are_refused() -> None:
    source = many_clips()
    with pytest.raises(ConfigError, match="field crop_draw beside each sample; pass crop_seed to SampleDataset"):
        Collator(source, crop_s=0.5)([source.read(0)])


def test_sources_that_cannot_be_cropped_are_refused() -> None:
    source = FakeSource([100], features="w2v_bert", dtype="float32", prompt=None)
    with pytest.raises(ConfigError, match="lacks features or sample_rate_hz"):
        Collator(source, crop_s=6.0)
    source.constants = flat(**source.constants, sample_rate_hz=16_000)
    with pytest.raises(ConfigError, match=r"set audio\.keep_waveform = true"):
        Collator(source, crop_s=6.0)
    source = FakeSource([100], features="qwen3_asr", prompt=None)
    source.constants = flat(**source.constants, sample_rate_hz=16_000)
    with pytest.raises(ConfigError, match=r'audio\.features is "qwen3_asr"'):
        Collator(source, crop_s=6.0)


# The demo recordings, cached and not


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


def load(name: str, root: Path, *overrides: str) -> Config:
    config = load_config(
        ROOT / "configs" / name,
        overrides=[f'run.cache_root="{root}"', "loader.num_threads=1", f"loader.crop_s={CROP_S}", *overrides],
    )
    build_here(config)
    return config


def clones(loader: Loader) -> list[Batch]:
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]


def test_w2v_bert_batches_are_the_extractors_of_the_cropped_recordings(root: Path) -> None:
    extractor = SeamlessM4TFeatureExtractor()
    loader = make_loader(load("demo_w2v_bert.toml", root))
    differences, num_clips, num_short = [], 0, 0
    for epoch in range(2):
        for batch in loader:
            assert batch.keys() == {"wav", "feats"}
            size = len(batch["wav"])
            assert (batch["wav"].shape, batch["feats"].shape) == ((size, 96_000), (size, 1, 299, 160))
            assert batch["wav"].dtype == batch["feats"].dtype == torch.float32
            for wav, (feats,) in zip(batch["wav"].numpy(), batch["feats"].numpy(), strict=True):
                np.testing.assert_array_equal(feats, own_features(wav))
                num_clips += 1
                num_short += not wav[-1600:].any()
                if epoch == 0 or wav[-1600:].any():
                    (want,) = extractor(wav, sampling_rate=16_000, return_tensors="np").input_features
                    differences.append(np.abs(feats - want).ravel())
    assert num_clips == 2 * len(loader.source) > 100
    assert 0 < num_short < num_clips
    assert all(np.quantile(difference, 0.999) <= 5e-6 for difference in differences)
    assert max(difference.max() for difference in differences) <= 1e-5


@pytest.mark.parametrize("name", ["demo_w2v_bert.toml", "demo_waveform.toml"])
@pytest.mark.few("demo_waveform.toml")
def test_cached_crops_equal_uncached_ones(name: str, root: Path) -> None:
    cached = make_loader(load(name, root))
    online = make_loader(load(name, root, 'loader.cache="off"'))
    assert isinstance(cached.source, Cache)
    assert not isinstance(online.source, Cache)
    ids = [cached.source.sample_id(i) for i in range(len(cached.source))]
    assert ids == cached.source.samples["sample_id"].to_pylist()
    assert ids == [online.source.sample_id(i) for i in range(len(online.source))]
    for _ in range(2):
        for one, other in zip(clones(cached), clones(online), strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_waveform_caches_have_wav_alone_and_start_on_any_hop(root: Path) -> None:
    config = load("demo_waveform.toml", root)
    source = select(config)
    crop = Crop(num_samples=CROP_SAMPLES, grid_samples=HOP_SAMPLES)
    pieces: dict[bytes, tuple[int, int]] = {}
    for epoch in range(2):
        epoch_draws = CropDraws(seed=config.loader.seed, epoch=epoch)
        for index in range(len(source)):
            samples = source.read(index)["waveform"].astype(np.float32) / np.float32(32768)
            start = crop.start(len(samples), draw=epoch_draws.draw(source.sample_id(index)))
            piece = samples[start : start + CROP_SAMPLES]
            pieces[np.pad(piece, (0, CROP_SAMPLES - len(piece))).tobytes()] = (epoch, start)
    seen = set()
    loader = make_loader(config)
    for _ in range(2):
        for batch in loader:
            assert batch.keys() == {"wav"}
            seen |= {row.numpy().tobytes() for row in batch["wav"]}
    assert seen == set(pieces)
    starts = [start for _, start in pieces.values()]
    assert any(start % GRID_SAMPLES for start in starts)


def test_damaged_ids_are_not_drawn_by(root: Path, tmp_path: Path) -> None:
    selected = select(load("demo_waveform.toml", root))
    assert isinstance(selected, Cache)
    folder = tmp_path / selected.folder.name
    shutil.copytree(selected.folder, folder)
    sample_id = selected.sample_id(0).encode()
    path = folder / "text" / "00000.tdz"
    data = bytearray(path.read_bytes())
    at = data.index(sample_id)
    data[at] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))
    with pytest.raises(CacheCorruptError, match=r"values/sample_id.memmap: stored CRC-32 .*, computed"):
        open_cache(folder).sample_id(0)
