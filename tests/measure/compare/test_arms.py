"""Names of arms: which there are, which go together, which a config can have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from forebay.config import MixtureConfig, MixtureSource
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.measure.compared_ways import arms_of
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
