"""`[[augment]]` as a user has it: the same on any rank and after any resume, off for evaluation; refusals."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
import torch

from forebay.config import Config
from forebay.config.data import SourceConfig
from forebay.config.train import AugmentConfig
from forebay.errors import ConfigError
from forebay.steps.audio.speeds import faster
from forebay.steps.form import BatchForm, FieldForm
from forebay.store.cache import Cache, open_cache
from forebay.store.source import SourceUnion
from forebay.train import loader as loader_module
from forebay.train import make_loader
from forebay.train.augment.augmentation import Augmentation
from forebay.train.augment.changes import Gain
from forebay.train.augment.own_function import OwnFunction
from forebay.train.collate.collator import Collator
from forebay.train.select import _augment
from tests.images.processors import TinyCorpus, tiny, tiny_corpus
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.train.fake_source import FakeSource
from tests.train.test_device import FakeStream

CONFIG = Config(name="a", source=SourceConfig(kind="tar", manifest="a.parquet"))
GAIN = '{kind="gain", db=[-6, 6]}'
CODE = "augment.py"


def augmented(*changes: str) -> str:
    return f"augment=[{', '.join(changes)}]"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus with caches of waveforms, of log-mels and, by its configs, of noise."""
    corpus = speech_corpus(tmp_path_factory.mktemp("augment"))
    for features in ("waveform", "log_mel"):
        build_here(corpus.config(f'audio.features="{features}"'))
    return corpus


def noise_of(corpus: Corpus) -> str:
    (cache,) = [path for path in corpus.root.iterdir() if path.is_dir() and "waveform" in kind(path)]
    return str(cache)


def kind(path: Path) -> str:
    return str(open_cache(path).constants["features"]) if (path / "metadata.json").is_file() else ""


def by_id(loader: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the values of an epoch's samples, without padding."""
    found = {}
    for batch, ids in loader:
        for place, name in enumerate(ids):
            mask = batch["attention_mask"][place].bool()
            found[name] = batch["input_values"][place][mask].numpy().copy()
    return found


def test_texts_alone_of_a_mixture_are_left_as_they_are() -> None:
    clips, texts = FakeSource([300, 400], features="log_mel"), FakeSource([9, 9], features="none", prompt="plain")
    settings = AugmentConfig(kind="spec_augment")
    config = dataclasses.replace(CONFIG, augment=(settings,))
    makes = _augment(config, SourceUnion([clips, texts], ["clips", "texts"], shares_batches=False))
    assert makes is not None
    assert [len(makes(part).of_batches) for part in (clips, texts)] == [1, 0]
    with pytest.raises(ConfigError, match="augment changes clips and images, and the samples are texts alone"):
        _augment(config, texts)


def all_changes(corpus: Corpus) -> str:
    noise = noise_of(corpus)
    return augmented(
        '{kind="speed", factors=[0.9, 1.0, 1.1]}',
        GAIN,
        f'{{kind="noise", cache="{noise}", snr_db=[5, 20], probability=0.7}}',
        f'{{kind="reverb", cache="{noise}", probability=0.4}}',
    )


def test_changes_are_the_same_on_any_rank_and_after_any_resume(spoken: Corpus) -> None:
    config = spoken.config(all_changes(spoken))
    whole = by_id(make_loader(config, with_ids=True))
    plain = by_id(make_loader(spoken.config(), with_ids=True))
    assert len(whole) == 17
    assert sum(len(whole[name]) != len(plain[name]) for name in whole) > 5  # other speeds
    for world in (2, 3):
        ranks = [by_id(make_loader(config, dp_rank=rank, dp_world_size=world, with_ids=True)) for rank in range(world)]
        assert {name for found in ranks for name in found} == set(whole)
        for found in ranks:
            for name, values in found.items():
                # A sample that stands in another batch there is padded to another length, by which a Fourier
                # transform rounds: reverberation alone knows it.
                assert np.abs(values - whole[name]).max() < 1e-6, name
    loader = make_loader(config, with_ids=True)
    steps = iter(loader)
    first = [ids for _, ids in itertools.islice(steps, 2)]
    resumed = make_loader(config, with_ids=True)
    resumed.load_state_dict(loader.state_dict())
    rest = by_id(resumed)
    assert set(rest) == set(whole) - {name for ids in first for name in ids}
    assert all(np.array_equal(rest[name], whole[name]) for name in rest)
    second = by_id(resumed)  # the next epoch
    assert set(second) == set(whole)
    assert all(not np.array_equal(second[name], whole[name]) for name in whole)


def test_threads_and_a_device_change_nothing(spoken: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_id(make_loader(spoken.config(all_changes(spoken)), with_ids=True))
    alone = by_id(make_loader(spoken.config(all_changes(spoken), "loader.num_threads=0"), with_ids=True))
    monkeypatch.setattr(loader_module, "side_stream", lambda device: FakeStream())
    device = by_id(make_loader(spoken.config(all_changes(spoken)), with_ids=True, device="fake"))
    for name, values in whole.items():
        assert np.array_equal(values, alone[name])
        assert np.array_equal(values, device[name])


def test_the_uncached_steps_are_changed_as_the_cache_is(spoken: Corpus) -> None:
    cached = by_id(make_loader(spoken.config(all_changes(spoken)), with_ids=True))
    uncached = by_id(make_loader(spoken.config(all_changes(spoken), 'loader.cache="off"'), with_ids=True))
    assert all(np.array_equal(values, uncached[name]) for name, values in cached.items())


def test_an_evaluation_and_a_config_without_changes_have_todays_batches(spoken: Corpus) -> None:
    in_order = list(make_loader(spoken.config(all_changes(spoken)), shuffle=False))
    plain = list(make_loader(spoken.config(), shuffle=False))
    for one, other in zip(in_order, plain, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_values_of_a_gain_are_those_of_the_clip(spoken: Corpus) -> None:
    plain = by_id(make_loader(spoken.config(), with_ids=True))
    found = by_id(make_loader(spoken.config(augmented(GAIN)), with_ids=True))
    factors = {name: found[name] @ plain[name] / (plain[name] @ plain[name]) for name in plain}
    assert all(np.allclose(found[name], plain[name] * factors[name], atol=1e-7) for name in plain)
    assert len({round(float(factor), 5) for factor in factors.values()}) == 17
    assert all(0.5 <= factor <= 2.0 for factor in factors.values())


def test_frames_are_masked_inside_the_clip_with_the_models_numbers(spoken: Corpus, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"mask_time_prob": 0.3, "mask_time_length": 2, "mask_time_min_masks": 1}')
    base = ('audio.features="log_mel"',)
    plain = list(make_loader(spoken.config(*base)))
    masks = augmented('{kind="spec_augment", feature_prob=0.2, feature_length=8}')
    found = list(make_loader(spoken.config(*base, masks, f'train.model="{tmp_path}"')))
    seen = 0
    for one, other in zip(found, plain, strict=True):
        differs = one["input_features"] != other["input_features"]
        assert not one["input_features"][differs].any()  # what changed is 0
        frames = differs.all(1).sum(1)  # whole frames of a clip
        assert ((frames >= 2) & (frames < 30)).all()
        bins = differs.all(2).sum(1)  # through the padding too, as in transformers
        assert ((bins >= 8) & (bins <= 16)).all()
        seen += len(bins)
    assert seen == 17


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
@pytest.mark.parametrize("factor", [0.9, 1.1, 2.0])
def test_a_speed_is_that_of_the_resampler(dtype: Any, factor: float) -> None:
    rng = np.random.default_rng(0)
    clip = (rng.normal(size=8000) * 3000).astype(np.int16)
    wave = clip if dtype == np.int16 else (clip / np.float32(32768))
    found = faster(wave, factor)
    wanted = soxr.resample(clip.astype(np.float32) / 32768, 16_000 * factor, 16_000, quality="HQ")
    assert found.dtype == dtype
    assert abs(len(found) - 8000 / factor) <= 1
    scale = 32768 if dtype == np.int16 else 1
    assert np.abs(found / scale - np.clip(wanted, -1, 1)).max() <= (0.6 / 32768 if dtype == np.int16 else 1e-6)


def test_crops_are_changed_too(spoken: Corpus) -> None:
    crop = "loader.crop_s=0.08"
    plain, found = list(make_loader(spoken.config(crop))), list(make_loader(spoken.config(crop, augmented(GAIN))))
    for one, other in zip(found, plain, strict=True):
        ratio = (one["wav"] * other["wav"]).sum(1) / other["wav"].square().sum(1)
        assert torch.allclose(one["wav"], other["wav"] * ratio[:, None], atol=1e-6)
        assert ((ratio - 1).abs() > 1e-4).all()


@pytest.mark.usefixtures(tiny.__name__)
def test_images_are_mirrored_exactly(tmp_path: Path) -> None:
    corpus: TinyCorpus = tiny_corpus(tmp_path, kind="stack")
    config = corpus.config('augment=[{kind="flip", probability=0.5}]')
    cache = open_cache(build_here(config).cache)
    assert isinstance(cache, Cache)
    mirrored = 0
    for one, other in zip(make_loader(config), make_loader(corpus.config()), strict=True):
        for image, plain in zip(one["pixel_values"], other["pixel_values"], strict=True):
            assert torch.equal(image, plain) or torch.equal(image, plain.flip(-1))
            mirrored += int(not torch.equal(image, plain))
    assert mirrored > 0


OWN = """
import numpy as np

def quieter(fields, rng):
    factor = rng.uniform(0.1, 0.5)
    return {**fields, "waveform": (fields["waveform"] * factor).astype(np.int16)}

def shorter(fields, rng):
    return {**fields, "waveform": fields["waveform"][:-5]}

def wrong(fields, rng):
    return {"wave": fields["waveform"]}

def other(fields, rng):
    return {**fields, "waveform": fields["waveform"].astype(np.float32)}

def raising(fields, rng):
    raise ValueError("nothing to be done")
"""


@pytest.fixture
def own(spoken: Corpus) -> Iterator[Any]:
    """Makes configs with a function of the user, of a file that allows code."""
    (spoken.folder / CODE).write_text(OWN)

    def config(name: str, more: str = "", *, allow: bool = True) -> Config:
        from forebay import load_config

        spoken.config()
        path = spoken.folder / "own.toml"
        text = (spoken.folder / "config.toml").read_text().replace("[run]", f"[run]\nallow_code = {str(allow).lower()}")
        path.write_text(f'{text}\n[[augment]]\nkind = "function"\nfunction = "{CODE}:{name}"\n{more}')
        return load_config(path)

    yield config
    (spoken.folder / CODE).unlink(missing_ok=True)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.few("2")
def test_a_function_of_the_user_changes_samples_in_threads_or_processes(own: Any, processes: int) -> None:
    found = by_id(make_loader(own("quieter", f"processes = {processes}"), with_ids=True))
    plain = by_id(make_loader(own("quieter"), with_ids=True))
    assert all(np.array_equal(found[name], plain[name]) for name in found)
    assert all(0 < np.abs(values).max() < 0.3 for values in found.values())


def test_an_interrupt_is_left_to_the_process_that_trains(own: Any) -> None:
    change = OwnFunction.of(own("quieter", "processes = 1"), own("quieter", "processes = 1").augment[0], "augment.0")
    assert change._pool is not None
    pid = change._pool.submit(os.getpid).result()
    os.kill(pid, signal.SIGINT)
    assert change._pool.submit(os.getpid).result() == pid


def test_a_function_may_change_lengths_where_the_config_says_so(own: Any, spoken: Corpus) -> None:
    plain = by_id(make_loader(spoken.config(), with_ids=True))
    found = by_id(make_loader(own("shorter", "changes_length = true"), with_ids=True))
    assert all(len(values) == len(plain[name]) - 5 for name, values in found.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shorter", r"augment\.0\.function \(augment\.py:shorter\): sample \w+: waveform had \d+ rows and has \d+"),
        ("wrong", r"sample \w+: it returned wave, wanted waveform"),
        ("other", r"sample \w+: waveform became float32 \[\d+\], wanted int16"),
        ("raising", r"sample \w+: it raised ValueError: nothing to be done \(line \d+\)"),
    ],
)
def test_what_a_function_may_not_do_is_said_with_sample_and_step(own: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(iter(make_loader(own(name))))


def test_code_that_is_not_allowed_or_not_there_is_refused(own: Any) -> None:
    with pytest.raises(ConfigError, match=r"which is code, and run\.allow_code is false"):
        make_loader(own("quieter", allow=False))
    with pytest.raises(ConfigError, match=r"it has no function nothing; its functions: other, quieter"):
        make_loader(own("nothing"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('{kind="echo"}', r"augment\.0\.kind: Input should be 'spec_augment', 'gain'"),
        ('{kind="gain"}', r'augment\.0: kind "gain" needs db'),
        ('{kind="gain", db=[3, -3]}', r"db is \[3.*, -3.*\], wanted \[lowest, highest\]"),
        ('{kind="gain", db=[-3, 3], snr_db=[1, 2]}', r'snr_db is of kind noise, and kind is "gain"'),
        ('{kind="speed", factors=[3.0]}', r"factors is \[3.0\], wanted numbers from 0.5 to 2"),
        ('{kind="spec_augment", time_prob=2.0}', r"time_prob is 2.0, wanted at most 1"),
        ('{kind="flip", probability=0.0}', r"probability is 0.0, wanted more than 0, at most 1"),
        ('{kind="gain", db=[-3, 3], louder=1}', r"augment\.0\.louder: unknown field"),
    ],
)
def test_wrong_settings_are_named(spoken: Corpus, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spoken.config(augmented(change))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (('audio.features="log_mel"', augmented(GAIN)), r"gain changes waveforms, .* audio\.features = 'log_mel'"),
        ((augmented('{kind="spec_augment"}'),), r"spec_augment is of frames, and audio\.features is 'waveform'"),
        ((augmented('{kind="flip"}'),), r"flip is exact for patches of packs, or one field of \[3"),
        ((augmented(GAIN, '{kind="speed", factors=[0.9]}'),), r"speed changes samples as they are stored.*put speed"),
        ((augmented('{kind="noise", cache="none", snr_db=[1, 2]}'),), r"augment\.0\.cache: .*none is not a"),
    ],
)
def test_changes_that_cannot_be_made_of_a_source_are_refused(
    spoken: Corpus, overrides: tuple[str, ...], message: str
) -> None:
    from forebay.errors import ForebayError

    with pytest.raises(ForebayError, match=message):
        make_loader(spoken.config(*overrides))


def test_a_cache_of_noise_counts_as_used(spoken: Corpus, tmp_path: Path) -> None:
    shutil.copytree(noise_of(spoken), tmp_path / "noise")
    make_loader(spoken.config(augmented(f'{{kind="noise", cache="{tmp_path / "noise"}", snr_db=[1, 2]}}')))
    assert os.listdir(tmp_path / ".used") == ["noise"]


def test_packs_and_ragged_batches_are_not_changed(spoken: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"loader\.form is \"ragged\"; leave one of both out"):
        spoken.config(augmented(GAIN), 'loader.form="ragged"')


def test_what_cannot_be_changed_where_batches_lie_is_never_passed_over() -> None:
    source = FakeSource([300, 400], features="log_mel")
    collator = Collator(source, augmentation=Augmentation((), ((0, Gain(probability=1.0, db=(1.0, 1.0))),)))
    several = FieldForm(name="x", dtype="float32", shape=(None, None), stored_dtype="float32")
    form = BatchForm.exact("a class of several axes", several)
    collator._items = (dataclasses.replace(collator._items[0], form=form),)
    with pytest.raises(ConfigError, match="one axis that grows, and a class of several axes gives others"):
        collator._changed_crossings()


def test_a_function_keeps_the_images_of_a_sample(own: Any) -> None:
    change = OwnFunction.of(own("quieter"), own("quieter").augment[0], "augment.0")
    images = (np.zeros((2, 3), np.uint8), np.zeros((4, 3), np.uint8))
    assert change._checked({"pixels": images}, {"pixels": images}, "a") == {"pixels": images}
    for made in (images[:1], images[0], None):
        with pytest.raises(ConfigError, match="sample a: pixels is no longer a tuple of 2 arrays"):
            change._checked({"pixels": images}, {"pixels": made}, "a")
