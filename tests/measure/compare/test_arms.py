"""Names of arms: which there are, which go together, which a config can have."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig, MixtureConfig, MixtureSource
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.measure.compared_ways import Block, BlockStep, arms_of, block_plan, dealt, num_blocks, planned_steps
from forebay.plan.cursor import Cursor
from forebay.plan.make_buckets import bucket_plan
from forebay.steps.recipe import load_config, recipe_of
from tests.processes import ROOT


@pytest.fixture(scope="module")
def speech() -> Config:
    return load_config(str(ROOT / "configs/demo_speech.toml"))


def test_the_config_s_own_arm_stands_first_and_no_arm_twice(speech: Config) -> None:
    arms = arms_of("hf, unbucketed+uncached,uncached+unbucketed,uncached", speech)
    assert [arm.name for arm in arms] == ["config", "hf", "uncached+unbucketed", "uncached"]
    assert [(arm.is_uncached, arm.is_unbucketed, arm.is_plain) for arm in arms] == [
        (False, False, False),
        (False, False, True),
        (True, True, False),
        (True, False, False),
    ]


def test_arms_differ_from_the_config_in_their_cache_alone(speech: Config) -> None:
    own, uncached = (arm.config(speech, folder="scratch") for arm in arms_of("uncached", speech))
    assert (own.loader.cache, uncached.loader.cache) == ("require", "off")
    assert dataclasses.replace(uncached, loader=own.loader) == own
    # Nothing of a run of the same config is touched.
    assert (own.train.output_dir, own.train.eval, own.train.trackers) == ("scratch", (), ())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("uncachd", "names 'uncachd', wanted uncached, unbucketed, hf.*did you mean uncached"),
        ("uncached,trainer", "names 'trainer', wanted uncached, unbucketed, hf"),
        ("uncached+bucketed", "names 'bucketed'.*did you mean unbucketed"),
        ("hf+uncached", "hf reads raw data in random batches anyway; name hf alone"),
        (" , ", "--against names no arm; give one or more of uncached, unbucketed, hf"),
    ],
)
def test_a_name_that_is_none_is_refused(speech: Config, names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arms_of(names, speech)


@pytest.mark.parametrize("name", ["hf", "unbucketed", "uncached+unbucketed"])
def test_packs_have_no_random_batches(name: str) -> None:
    config = load_config(str(ROOT / "configs/demo_vision.toml"))
    with pytest.raises(ConfigError, match=r"makes packs.*for packs give --against uncached"):
        arms_of(name, config)


def test_sources_of_a_mixture_have_no_random_batches_in_common(speech: Config, tmp_path: Path) -> None:
    sources = (MixtureSource(config=speech.path), MixtureSource(cache=str(tmp_path)))
    config = dataclasses.replace(speech, mixture=MixtureConfig(source=sources))
    with pytest.raises(ConfigError, match=r"reads several sources by .*; give --against uncached"):
        arms_of("hf", config)
    with pytest.raises(ConfigError, match=r"names the folder of a cache in .*; name the source's config there"):
        arms_of("uncached", config)


@pytest.mark.parametrize("features", ["none", "given"])
def test_hf_needs_sound(speech: Config, features: str) -> None:
    assert speech.audio is not None
    config = dataclasses.replace(speech, audio=dataclasses.replace(speech.audio, features=features))
    with pytest.raises(ConfigError, match=r"has no sound for an extractor; give --against uncached,unbucketed"):
        arms_of("hf", config)


def test_no_extractor_makes_what_code_of_the_user_makes(speech: Config) -> None:
    assert speech.audio is not None
    audio = dataclasses.replace(speech.audio, features="steps/my.py:Bands")
    config = dataclasses.replace(speech, audio=audio)
    with pytest.raises(ConfigError, match=r"is steps/my\.py:Bands, which no extractor of transformers makes; give"):
        arms_of("hf", config)


def test_images_of_a_processor_are_compared_as_they_are() -> None:
    config = load_config(str(ROOT / "configs/demo_any.toml"))
    own, uncached = (arm.config(config, folder="scratch") for arm in arms_of("uncached", config))
    assert (own.loader.pixels, uncached.loader.pixels) == ("float32", "float32")
    assert recipe_of(own) == recipe_of(config)
    packs = load_config(str(ROOT / "configs/demo_vision.toml"))
    assert arms_of("uncached", packs)[0].config(packs, folder="scratch").loader.pixels == "uint8"


RATE_HZ = 100


def steps_of(count: int, *, grad_acc: int = 1, lockstep: int = 4) -> list[BlockStep]:
    durations = np.random.default_rng(3).integers(10, 1000, 300)
    settings = BucketConfig(edges_s=(2.0, 5.0), batch_size=5, lockstep=lockstep)
    plan = bucket_plan(durations, sample_rate_hz=RATE_HZ, settings=settings)
    return list(itertools.islice(planned_steps(plan, seed=1, grad_acc=grad_acc), count))


def test_steps_are_those_of_the_plan_epoch_after_epoch() -> None:
    durations = np.arange(10, 110)
    settings = BucketConfig(edges_s=(0.5,), batch_size=7, lockstep=1)
    plan = bucket_plan(durations, sample_rate_hz=RATE_HZ, settings=settings)
    steps = list(itertools.islice(planned_steps(plan, seed=5, grad_acc=4), 2 * plan.num_batches))
    ends = list(itertools.accumulate(len(step.batches) for step in steps))
    place = ends.index(plan.num_batches)  # no step spans two epochs
    first = [batch for step in steps[: place + 1] for batch in step.batches]
    assert [list(batch) for batch in first] == [b.tolist() for b in plan.order(5, 0).batches(range(plan.num_batches))]
    assert list(steps[place + 1].batches[0]) == plan.order(5, 1).batch(0).tolist()
    assert {len(step.batches) for step in steps[:place]} == {4}


def test_a_calibration_says_how_large_a_step_is() -> None:
    plan = bucket_plan(
        np.arange(10, 110), sample_rate_hz=RATE_HZ, settings=BucketConfig(edges_s=(0.5,), batch_size=7, lockstep=1)
    )
    object.__setattr__(plan, "grad_accs", (1, 3))
    for step in itertools.islice(planned_steps(plan, seed=5, grad_acc=9), 5):
        assert len(step.batches) == (1, 3)[step.bucket]


@given(st.integers(2, 60), st.integers(1, 6))
def test_dealt_steps_are_each_in_one_block_which_has_the_share_of_each_bucket(count: int, blocks: int) -> None:
    steps = steps_of(count)
    found = dealt(steps, blocks)
    assert len(found) == blocks
    assert Counter(step for block in found for step in block.steps) == Counter(steps)
    assert max(len(block.steps) for block in found) - min(len(block.steps) for block in found) <= 1
    for bucket in range(3):
        counts = [sum(step.bucket == bucket for step in block.steps) for block in found]
        assert max(counts) - min(counts) <= 1
    for block in found:
        assert [steps.index(step) for step in block.steps] == sorted(steps.index(step) for step in block.steps)


@given(st.integers(1, 30), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 3)))
def test_random_batches_are_of_the_same_samples_and_of_equal_size(count: int, acc: int, own: int | None) -> None:
    block = Block(tuple(steps_of(count, grad_acc=acc)))
    shuffled = block.shuffled([7, 0], grad_acc=own)
    assert sorted(shuffled.samples) == sorted(block.samples)
    sizes = [len(batch) for step in shuffled.steps for batch in step.batches]
    assert max(sizes) - min(sizes) <= 1
    assert len(shuffled.steps) == len(block.steps)
    if own is None:
        assert [len(step.batches) for step in shuffled.steps] == [len(step.batches) for step in block.steps]
    assert shuffled == block.shuffled([7, 0], grad_acc=own)
    assert count == 1 or shuffled != block.shuffled([7, 1], grad_acc=own)


@pytest.mark.parametrize(("steps", "blocks"), [(1, 1), (2, 2), (19, 3), (30, 3), (200, 20)])
def test_a_block_has_about_ten_steps(steps: int, blocks: int) -> None:
    assert num_blocks(steps) == blocks


def test_a_cursor_walks_a_block_in_its_order_and_says_the_size_of_its_steps() -> None:
    block = Block((BlockStep(bucket=2, batches=((5, 1), (3,))), BlockStep(bucket=0, batches=((9,),))))
    plan = block_plan(block)
    cursor = Cursor(plan, "0" * 64, seed=3)
    assert [step.samples.tolist() for step in cursor.walk()] == [[5, 1], [3], [9]]
    order = plan.order(3, 0)
    assert plan.grad_accs is not None
    assert [plan.grad_accs[order.bucket(position)] for position in (0, 2)] == [2, 1]
