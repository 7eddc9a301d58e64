"""A feature and a prompt that forebay does not know: a class and a line in the table each, and all works with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import forebay
from forebay import cli
from forebay.config import Config
from forebay.errors import ConfigError
from forebay.preprocess import Options, build
from forebay.steps import table
from forebay.steps.batch import filled
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.recipe import recipe_of
from forebay.steps.step import Allocate, AudioStep, Fields, PaddingSide, Stored, TextBatch
from forebay.steps.text.plain import PlainPrompt
from forebay.steps.text.transcript import Prompt, TokenSequence, Transcript, Utterance
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import Array, FieldSpec
from forebay.store.source import Sample
from forebay.train import make_loader
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here

TOKENIZER = Path(__file__).parents[2] / "demo" / "speech" / "model"
WINDOW = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy(AudioStep):
    """The mean square of every whole window."""

    name: ClassVar[str] = "energy"
    axes: ClassVar[dict[str, str | int]] = {"energy": "windows"}

    window: int = 400
    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        return (FieldSpec(name="energy", dtype="float32", shape=(1,)),)

    def num_frames(self, num_samples: Array) -> Array:
        return num_samples // self.window

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        whole = [w[: len(w) // self.window * self.window].reshape(-1, self.window) for w in waveforms]
        return [{"energy": np.square(windows).mean(axis=1, keepdims=True)} for windows in whole]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        windows = FieldForm.frames(stored.fields["energy"])
        return BatchForm.exact(cls.name, windows, windows.mask("energy_mask"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo(Transcript):
    """The text several times, of which the last is learnt."""

    name: ClassVar[str] = "echo"

    times: int = 2

    def writer(self, vocabulary: Vocabulary) -> Prompt:
        return EchoPrompt(vocabulary, times=self.times)

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        return partial(echo_text, pad_token_id=int(stored.constant("eos_token_id")))


class EchoPrompt(PlainPrompt):
    def __init__(self, vocabulary: Vocabulary, *, times: int) -> None:
        super().__init__(vocabulary)
        self._times = times

    def build(self, utterance: Utterance) -> TokenSequence:
        once = super().build(utterance).ids
        before = once * (self._times - 1)
        return TokenSequence(ids=before + once, prefix_len=len(before), num_label_tokens=len(once))


def echo_text(
    samples: Sequence[Sample], *, pad_token_id: int, padding_side: PaddingSide, allocate: Allocate
) -> dict[str, torch.Tensor]:
    ids = [sample["input_ids"] for sample in samples]
    echo = filled("echo", (len(ids), max(map(len, ids))), pad_token_id, allocate=allocate)
    for row, values in zip(echo.numpy(), ids, strict=True):
        row[: len(values)] = values
    return {"echo": echo}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Two tars, and the two steps in the tables."""
    monkeypatch.setitem(table.STEPS["audio"], "energy", f"{__name__}:Energy")
    monkeypatch.setitem(table.STEPS["text"], "echo", f"{__name__}:Echo")
    return speech_corpus(tmp_path)


def config_of(corpus: Corpus, *overrides: str) -> Config:
    corpus.config()
    text = (corpus.folder / "config.toml").read_text()
    steps = f'features = "energy"\nwindow = {WINDOW}\n[text]\ntokenizer = "{TOKENIZER}"\nprompt = "echo"\ntimes = 3\n'
    (corpus.folder / "toy.toml").write_text(text.replace('features = "waveform"\n', steps))
    return forebay.load_config(corpus.folder / "toy.toml", overrides=overrides)


def batches(config: Config) -> list[dict[str, torch.Tensor]]:
    loader = make_loader(config)
    loader.set_epoch(0)
    return [dict(batch) for batch in loader]


def check_cache(cache: Cache, corpus: Corpus) -> None:
    """Holds the stored values against the steps themselves."""
    assert cache.constants["features"] == "energy"
    assert cache.constants["prompt"] == "echo"
    for index in range(len(cache)):
        sample, sample_id = cache.read(index), cache.sample_id(index)
        clip = corpus.audio[sample_id].astype(np.float32) / np.float32(32768)
        np.testing.assert_array_equal(sample["energy"], Energy(window=WINDOW).compute([clip])[0]["energy"])
        assert cache.lengths["num_frames"][index] == len(clip) // WINDOW == len(sample["energy"])
        once = len(sample["input_ids"]) // 3
        assert sample["prefix_len"].tolist() == [2 * once]
        assert sample["input_ids"].tolist() == sample["input_ids"][:once].tolist() * 3


def test_a_new_feature_and_a_new_prompt_go_all_the_way(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(corpus)
    assert build_here(config, dry_run=True).num_samples == 17
    report = build_here(config)
    cache = open_cache(Path(report.cache))
    assert len(cache) == 17
    check_cache(cache, corpus)

    cached = batches(config)
    assert sum(len(batch["energy"]) for batch in cached) == 17
    for batch in cached:
        assert list(batch) == ["energy", "energy_mask", "echo"]
        assert batch["energy"].shape[:2] == batch["energy_mask"].shape
        assert ((batch["energy"][..., 0] > 0) == (batch["energy_mask"] == 1)).all()
    uncached = batches(config_of(corpus, "loader.cache=off"))
    for one, other in zip(cached, uncached, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)

    facts = inspect(capsys, config, "--json")
    assert facts["fields"]["energy"]["shape"] == ["windows", 1]
    assert facts["recipe"]["audio"]["window"] == WINDOW
    assert facts["recipe"]["text"]["times"] == 3
    sample = inspect(capsys, config, "--sample", "0", "--json")["sample"]
    assert sample["labels"]["text"] == f"text of {sample['row']['sample_id']}"
    assert sample["labels"]["with_special_tokens"].count("text of") == 3
    assert cli.main(["inspect", config.path, "--sample", "0"]) == 0
    assert "energy" in capsys.readouterr().out


def inspect(capsys: pytest.CaptureFixture[str], config: Config, *arguments: str) -> Any:
    capsys.readouterr()
    assert cli.main(["inspect", config.path, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_worker_processes_know_a_new_step(corpus: Corpus) -> None:
    report = build(config_of(corpus, "run.num_workers=1"), Options(progress=False))
    check_cache(open_cache(Path(report.cache)), corpus)


def test_settings_of_a_new_step_are_in_the_key_and_checked(corpus: Corpus) -> None:
    base = recipe_of(config_of(corpus))
    assert recipe_of(config_of(corpus, "audio.window=201")).key != base.key
    assert recipe_of(config_of(corpus, "text.times=4")).key != base.key
    with pytest.raises(ConfigError, match="is not a forebay config") as caught:
        config_of(corpus, "audio.windo=3", "text.times=1.5", "text.normalise=nfkc")
    assert str(caught.value).splitlines()[1:] == [
        "  audio.windo: unknown field; did you mean audio.window?",
        '  text.times: prompt = "echo" wants an integer, got 1.5',
        "  text.normalise: unknown field; did you mean text.normalize?",
    ]
    with pytest.raises(
        ConfigError, match=r'audio\.features: unknown step "energi"; did you mean "energy"\? wanted one'
    ):
        config_of(corpus, "audio.features=energi")
    with pytest.raises(ConfigError, match=r'audio\.features is "energy", whose frames depend on the whole clip'):
        config_of(corpus, "loader.crop_s=1.0")


def test_the_tables_know_their_steps_by_the_names_that_these_have() -> None:
    for group, steps in table.STEPS.items():
        assert [{step.name for step in table.steps_named(group, name)} for name in steps] == [{name} for name in steps]
    assert [table.unknown(table.STEPS["image"], "qwen_vl")] == ['wanted one of "patches", "processor"']
