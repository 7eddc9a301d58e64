"""A model that takes what an earlier section keeps: its values, its key, its failures, and what it cannot take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from forebay import load_config
from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from tests.preprocess.here_pool import build_here
from tests.steps.model.test_families import PHOTOS, SPEECH, Corpus, of_sample, section
from tests.steps.model.test_model_step import edit_weights, flip_a_bit
from tests.steps.model.tiny_frozen import RATE_HZ, save_tiny

CODE = """
import numpy as np

class Units:
    version = 1
    fields = {"%(n)s_units": {"dtype": "int64", "shape": [None]}, "%(n)s_first": {"dtype": "float32", "shape": []}}

    def prepare(self, sample):
        if sorted(sample) != ["%(n)s_states", "%(n)s_voice"] or len(sample["%(n)s_states"]) == 9:
            raise ValueError("refused")
        return sample

    def forward(self, batch):
        firsts = [one["%(n)s_voice"].reshape(-1)[0] for one in batch]
        return {"%(n)s_units": [one["%(n)s_states"].argmax(axis=1) for one in batch], "%(n)s_first": firsts}

class Counts:
    version = 1
    fields = {"counts": {"dtype": "int64", "shape": [32]}}

    def prepare(self, sample):
        return np.bincount(sample["hubert_units"], minlength=32) * (sample["hubert_first"].dtype == np.float32)

    def forward(self, batch):
        return {"counts": batch}
"""


def chain(name: str, takes: str, more: str = "") -> str:
    kept = f"{name}_states = {{output = 'last_hidden_state'}}, {name}_voice = {{output = 'mean', dtype = 'float32'}}"
    units = f'[[model]]\nname = "{name}_own"\nfolder = "own_{name}.py:Units"\ntakes = "{name}"\nbatch = 2\n'
    return section(name, takes, f"keep = {{{kept}}}", more) + units


SPOKEN = SPEECH + chain("hubert", "audio")
COUNTED = SPOKEN + '[[model]]\nname = "counts"\nfolder = "own_hubert.py:Counts"\ntakes = "hubert_own"\n'
RUN = '\n[run]\nallow_code = true\ncache_root = "caches"\nnum_workers = 2\nmax_failed_share = 0.5\n'


class Chained(Corpus):
    def config(self, text: str, *overrides: str) -> Any:
        for name in ("hubert", "t5", "siglip"):
            (self.folder / f"own_{name}.py").write_text(CODE % {"n": name})
        (self.folder / "config.toml").write_text(text + RUN)
        return load_config(self.folder / "config.toml", overrides=overrides)

    def batches(self, text: str, mode: str) -> list[Any]:
        loader = make_loader(self.config(text, f"loader.cache={mode}"))
        loader.set_epoch(0)
        return [batch["hubert_units"].clone() for batch in loader]


@pytest.fixture
def corpus(tmp_path: Path) -> Chained:
    return Chained(tmp_path, "hubert")


def require_units(cache: Cache, name: str) -> None:
    firsts = cache.table([f"{name}_first"])[f"{name}_first"].to_pylist()
    for index, first in enumerate(firsts):
        states = of_sample(cache, f"{name}_states", index)
        np.testing.assert_array_equal(of_sample(cache, f"{name}_units", index), states.argmax(axis=1))
        assert first == of_sample(cache, f"{name}_voice", index).reshape(-1)[0]
    assert firsts


def test_recordings_texts_and_a_chain_of_three(corpus: Chained) -> None:
    save_tiny("t5", corpus.folder / "t5")
    text = COUNTED + chain("t5", "text")
    report = build_here(corpus.config(text))
    assert report.failed == {"step_failed": 1}  # "two words" are nine tokens
    cache = open_cache(report.cache)
    require_units(cache, "hubert")
    require_units(cache, "t5")
    for index in range(len(cache)):
        counts = np.bincount(of_sample(cache, "hubert_units", index), minlength=32)
        np.testing.assert_array_equal(of_sample(cache, "counts", index).reshape(-1), counts)
    costs = build_here(corpus.config(text, 'run.cache_root="others"'), dry_run=True).models
    assert [cost.model for cost in costs] == ["hubert", "hubert_own", "counts", "t5", "t5_own"]


def test_photos(tmp_path: Path) -> None:
    corpus = Chained(tmp_path, "siglip")
    report = build_here(corpus.config(PHOTOS + chain("siglip", "image")))
    assert (report.failed, report.num_samples) == ({}, 19)
    require_units(open_cache(report.cache), "siglip")


def test_a_bit_of_the_earlier_weights_makes_both_again(corpus: Chained) -> None:
    def keys(text: str = SPOKEN) -> dict[str, list[str]]:
        cache = open_cache(build_here(corpus.config(text), rebuild=True).cache)
        return {group: [entry.key for _, entry in cache.shard_entries(group)] for group in cache.groups}

    def changed(now: dict[str, list[str]]) -> set[str]:
        return {group for group, found in now.items() if found != first[group]}

    first = keys()
    assert all(map(torch.equal, corpus.batches(SPOKEN, "require"), corpus.batches(SPOKEN, "off")))
    assert changed(keys(SPEECH + chain("hubert", "audio", "batch = 2"))) == {"hubert", "hubert_own"}
    edit_weights(corpus.folder / "hubert", flip_a_bit)
    assert changed(keys()) == {"hubert", "hubert_own"}


def test_what_the_earlier_model_refuses_is_no_sample_and_a_digest_stands_for_it(corpus: Chained) -> None:
    soundfile.write(corpus.folder / "2.wav", np.zeros(20, np.int16), RATE_HZ)
    report = build_here(corpus.config(SPOKEN))
    assert (report.excluded, report.num_samples) == ({"too_short": 1}, 4)
    text = SPOKEN
    for step in [group.step for group in recipe_of(corpus.config(SPOKEN)).models]:
        text = text.replace(f'name = "{step.label}"', f'name = "{step.label}"\ndigest = "{step.digest}"')
    shutil.rmtree(corpus.folder / "hubert")
    assert sum(map(len, corpus.batches(text, "require"))) == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'takes = "hubert"',
            'takes = "huber"',
            r"is \"huber\", wanted audio, image, text or hubert; did you mean hubert",
        ),
        ('takes = "hubert"', 'takes = "hubert_own"', "which is not above it; a model takes what an earlier section"),
        ('takes = "audio"', 'takes = "hubert_own"', r"hubert.takes is \"hubert_own\", which is not above it"),
        ('takes = "audio"', 'takes = "audoi"', r"wanted audio, image or text; did you mean audio\?"),
        ("own_hubert.py:Units", "hubert", "is a folder, whose input comes from rows; a class of your own takes fields"),
    ],
)
def test_what_no_section_can_take_is_refused(corpus: Chained, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        corpus.config(SPOKEN.replace(old, new))
    assert caught.value.code == "FB147"
