"""`audio.speeds`: what is stored of recordings at other speeds, planned by the longest, one of them handed out."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli import main
from forebay.config import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.measure.batch_search import bucket_cases
from forebay.plan.make import plan_of, samples_of
from forebay.steps.audio.log_mel import LogMel, Qwen3Asr
from forebay.steps.audio.speeds import Speeds, faster
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from tests.preprocess.corpus import Corpus, file_bytes, speech_corpus, tone
from tests.preprocess.here_pool import build_here
from tests.train.test_packs_of_clips import config_of

SPEEDS = "audio.speeds=[0.9, 1.0, 1.1]"
QWEN = 'audio.features="qwen3_asr"'
NAMES = ("", "~0.9", "~1.1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    corpus = speech_corpus(tmp_path_factory.mktemp("variants"))
    build_here(corpus.config(QWEN, SPEEDS))
    return corpus


def cache_of(config: Config) -> Cache:
    source = make_loader(config).source
    assert isinstance(source, Cache)
    return source


def drawn(cache: Cache, loader: Any) -> dict[str, str]:
    """Returns which variant of each sample an epoch hands out; asserts that it is one, whole, and nothing else."""
    rows, found = {cache.sample_id(i): cache.read(i) for i in range(len(cache))}, {}
    for batch, ids in loader:
        for place, name in enumerate(ids):
            mask = batch["input_features_mask"][place].bool()
            values = batch["input_features"][place][:, mask].T.numpy()
            equal = [v for v in NAMES if np.array_equal(rows[name][f"input_features{v}"].astype(np.float32), values)]
            (found[name],) = equal
    return found


def test_variants_are_the_features_of_the_recording_at_that_speed(corpus: Corpus) -> None:
    cache = cache_of(corpus.config(QWEN, SPEEDS))
    for index in range(len(cache)):
        clip = corpus.audio[cache.sample_id(index)].astype(np.float32) / 32768
        sample = cache.read(index)
        for name, factor in zip(NAMES, (1.0, 0.9, 1.1), strict=True):
            wave = clip if factor == 1 else soxr.resample(clip, factor, 1.0, quality="HQ")
            (wanted,) = Qwen3Asr().compute([wave])
            assert np.array_equal(sample[f"input_features{name}"], wanted["input_features"])


def test_every_epoch_draws_the_same_on_any_rank_and_after_any_resume(corpus: Corpus) -> None:
    config = corpus.config(QWEN, SPEEDS)
    cache, loader = cache_of(config), make_loader(config, with_ids=True)
    whole, second = drawn(cache, loader), drawn(cache, loader)
    assert len(whole) == len(second) == 17
    assert whole != second
    counts = Counter(itertools.chain(whole.values(), second.values()))
    assert set(counts) == set(NAMES)
    assert min(counts.values()) >= 5
    for world in (2, 3):
        ranks = [make_loader(config, with_ids=True, dp_rank=rank, dp_world_size=world) for rank in range(world)]
        found = [item for rank in ranks for item in drawn(cache, rank).items()]
        assert dict(found) == whole  # a filler's sample comes again, and as it was
    head = make_loader(config, with_ids=True)
    first = [ids for _, ids in itertools.islice(head, 2)]
    resumed = make_loader(config, with_ids=True)
    resumed.load_state_dict(head.state_dict())
    assert drawn(cache, resumed) == {name: v for name, v in whole.items() if name not in {*first[0], *first[1]}}


def test_uncached_steps_hand_out_what_the_cache_does(corpus: Corpus) -> None:
    cached = make_loader(corpus.config(QWEN, SPEEDS))
    uncached = make_loader(corpus.config(QWEN, SPEEDS, 'loader.cache="off"'))
    assert uncached.plan_key == cached.plan_key
    for one, other in zip(uncached, cached, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_evaluation_and_readers_have_recordings_as_they_are(corpus: Corpus) -> None:
    config = corpus.config(QWEN, SPEEDS)
    assert set(drawn(cache_of(config), make_loader(config, with_ids=True, shuffle=False)).values()) == {""}


def test_plans_and_trials_are_of_the_longest_variant(corpus: Corpus) -> None:
    config = corpus.config(QWEN, SPEEDS)
    cache = cache_of(config)
    clips = [len(corpus.audio[cache.sample_id(i)]) for i in range(len(cache))]
    assert cache.lengths["num_audio_samples"].tolist() == clips
    samples = samples_of(cache)
    assert samples.durations is not None
    assert samples.durations.tolist() == np.ceil(np.array(clips) / 0.9).tolist()
    longest = [max(len(cache.read(i)[f"input_features{name}"]) for name in NAMES) for i in range(len(cache))]
    assert cache.lengths["num_frames"].tolist() == longest
    plan = plan_of(config, cache).plan
    assert sorted(itertools.chain(*(batch.tolist() for batch in epoch(plan)))) == list(range(17))
    assert config.plan is not None
    cases = bucket_cases(cache, dataclasses.replace(config.plan))  # type: ignore[arg-type]
    for case in filter(None, cases.values()):
        assert case.batch(config, cache, 2)["input_features"].shape[2] >= longest[case.index]


def epoch(plan: Any) -> list[Any]:
    order = plan.order(0, 0)
    return [order.batch(position) for position in range(len(order))]


def test_ragged_batches_and_packs_have_one_variant(corpus: Corpus, tmp_path: Path) -> None:
    ragged: Any = make_loader(corpus.config(QWEN, SPEEDS, 'loader.form="ragged"'))
    padded = make_loader(corpus.config(QWEN, SPEEDS))
    for one, other in zip(ragged, padded, strict=True):
        assert [name for name in one.fields if "~" in name] == []
        assert len(one["input_features"]) == int(other["input_features_mask"].sum())
    packs = config_of(speech_corpus(tmp_path), "log_mel", SPEEDS)
    cache = open_cache(build_here(packs).cache)
    loader = make_loader(packs)
    seen: list[str] = []
    for batch in loader:
        values, at = batch["input_features"].numpy(), 0
        for index in loader.indices:  # one behind the other
            rows = {name: cache.read(index)[f"input_features{name}"].astype(np.float32) for name in NAMES}
            equal = [name for name in NAMES if np.array_equal(values[at : at + len(rows[name])], rows[name])]
            (name,) = equal
            seen, at = [*seen, name], at + len(rows[name])
        assert at == len(values)
    assert len(seen) == 17
    assert set(seen) == set(NAMES)


def test_the_zarr_form_gives_the_cache_again(corpus: Corpus, tmp_path: Path) -> None:
    folder = cache_of(corpus.config(QWEN, SPEEDS)).folder
    assert main(["export", str(folder), "--form", "zarr", "--out", str(tmp_path / "zarr"), "--no-progress"]) == 0
    assert main(["cache", "pull", str(tmp_path / "zarr"), str(tmp_path / "back"), "--no-progress"]) == 0
    assert file_bytes(tmp_path / "back") == file_bytes(folder)


def test_a_recording_that_is_too_long_at_a_speed_is_handed_out_as_it_is(tmp_path: Path) -> None:
    corpus = speech_corpus(tmp_path)
    config = corpus.config('audio.features="log_mel"', SPEEDS)
    clip = tone(1, duration_s=28)
    features = Speeds.of((0.9, 1.0, 1.1), [LogMel()], rate_hz=16_000)
    (made,) = features.made([clip.astype(np.float32) / 32768], lambda clips: LogMel().compute(clips))
    assert [len(made[f"input_features{name}"]) for name in NAMES[:2]] == [len(made["input_features"]), 0]
    assert len(made["pad_value~0.9"]) == 0
    assert len(made["input_features~1.1"]) == 2547
    assert features.num_missing(np.array([28 * 16_000, 26 * 16_000, 100])) == 1
    cache = open_cache(build_here(config).cache)
    assert cache.metadata["without_variant"] == 0
    assert cache.constants["variants"] == ["0.9", "1.1"]


@given(num_samples=st.integers(1, 40_000), factor=st.sampled_from([0.5, 0.8, 0.9, 1.03, 1.1, 1.25, 2.0]))
def test_lengths_are_known_without_resampling(num_samples: int, factor: float) -> None:
    speeds = Speeds((factor,), 1, None)
    length = len(faster(np.zeros(num_samples, np.float32), factor))
    assert speeds.longest(np.array([num_samples])).tolist() == [max(length, num_samples)]
    assert Speeds((factor,), length + 1).longest(np.array([num_samples])).tolist() == [num_samples]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("audio.speeds=[0.9, 1.1]",), r"speeds is \[0.9, 1.1\], wanted numbers from 0.5 to 2, and 1.0 among them"),
        (("audio.speeds=[1.0, 3.0]",), r"wanted numbers from 0.5 to 2"),
        ((SPEEDS,), r'features is "waveform"; set \[\[augment\]\] kind = "speed"'),
    ],
)
def test_speeds_that_cannot_be_are_refused(corpus: Corpus, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        corpus.config(*overrides)


def test_caches_of_other_speeds_stand_in_no_batch_together(corpus: Corpus) -> None:
    plain = corpus.config(QWEN)
    build_here(plain)
    entries = [f'{{cache="{cache_of(corpus.config(QWEN, *more)).folder}"}}' for more in ((), (SPEEDS,))]
    with pytest.raises(CacheMismatchError, match=r"variants|input_features~0\.9|longest_variant"):
        make_loader(corpus.config(QWEN, f"mixture={{source=[{', '.join(entries)}]}}"))
    apart = f'mixture={{batches="per_source", source=[{", ".join(entries)}]}}'
    assert sum(len(batch["input_features"]) for batch in make_loader(corpus.config(QWEN, apart), shuffle=False)) == 34
