from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.steps.batch import fresh
from forebay.steps.recipe import recipe_of
from forebay.steps.step import Stored
from forebay.steps.text.transcript import TextEncoder
from forebay.steps.text.tts import Tts
from tests.flat_constants import flat
from tests.steps.text.characters import BLANK, character_tokenizer

TEXTS = ("hello there", "good bye")
PAD, BEGIN, END, UNKNOWN, BLANK_ID = range(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), TEXTS)


def step_of(folder: Path, **settings: Any) -> Tts:
    return Tts(tokenizer=tokenizer_digest(folder), **settings)


def encoder_of(folder: Path, **settings: Any) -> TextEncoder:
    return step_of(folder, **settings).opened(folder)


def ids_of(folder: Path, text: str, **settings: Any) -> list[int]:
    found: list[int] = encoder_of(folder, **settings).encode(text, None, None, sample_id="a")["input_ids"].tolist()
    return found


def test_every_character_is_a_symbol(folder: Path) -> None:
    symbols = sorted(set("".join(TEXTS)))
    wanted = [5 + symbols.index(letter) for letter in "hello"]
    assert ids_of(folder, "hello") == wanted
    assert ids_of(folder, "hello", add_bos=True, add_eos=True) == [BEGIN, *wanted, END]
    assert ids_of(folder, "hezzo")[2:4] == [UNKNOWN] * 2


@given(text=st.text(alphabet="helo tr", min_size=1, max_size=20).filter(str.strip), add_eos=st.booleans())
def test_blanks_stand_around_every_symbol_as_in_vits(folder: Path, text: str, *, add_eos: bool) -> None:
    plain = ids_of(folder, text, add_eos=add_eos)
    spaced = ids_of(folder, text, add_eos=add_eos, blank_token=BLANK)
    wanted = [BLANK_ID] * (2 * len(plain) + 1)  # `intersperse` of the models' own code
    wanted[1::2] = plain
    assert spaced == wanted
    encoder = encoder_of(folder, add_eos=add_eos, blank_token=BLANK)
    assert encoder.decode(np.array(spaced)) == " ".join(text.split())


def test_a_limit_counts_what_the_model_gets(folder: Path) -> None:
    assert len(ids_of(folder, "hello", max_label_tokens=11, blank_token=BLANK)) == 11
    with pytest.raises(TextError, match=r"11 label tokens, text\.max_label_tokens is 10"):
        ids_of(folder, "hello", max_label_tokens=10, blank_token=BLANK)


def test_speakers_have_the_ids_of_the_list(folder: Path) -> None:
    encoder = encoder_of(folder, speaker_column="who", speakers=("ann", "7", "bob"))
    found = [encoder.of_row({"who": name}, sample_id="a")["speaker_id"].tolist() for name in ("bob", "ann", 7)]
    assert found == [[2], [0], [1]]
    with pytest.raises(TextError, match=r"column who says 'eve', which is not among the 3 of text\.speakers") as caught:
        encoder.of_row({"who": "eve"}, sample_id="a")
    assert caught.value.reason == "unknown_speaker"
    with pytest.raises(TextError, match="column who says nothing"):
        encoder.of_row({"who": None}, sample_id="a")
    assert encoder_of(folder).of_row({"who": "eve"}, sample_id="a") == {}


@pytest.mark.parametrize(
    ("language", "number"), [("en", 0), ("EN", 0), ("en-US", 0), ("en_US", 0), ("pt-BR", 1), ("pt", 2), ("pt-PT", 2)]
)
def test_languages_have_the_ids_of_the_list(folder: Path, language: str, number: int) -> None:
    encoder = encoder_of(folder, language_codes=("en", "pt-BR", "pt"))
    assert encoder.encode("hello", language, None, sample_id="a")["language_id"].tolist() == [number]


@pytest.mark.parametrize("language", ["de", None, ""])
def test_a_language_that_is_not_listed_costs_the_sample(folder: Path, language: str | None) -> None:
    with pytest.raises(TextError, match=r"is not among text\.language_codes \(en, pt\)") as caught:
        encoder_of(folder, language_codes=("en", "pt")).encode("hello", language, None, sample_id="a")
    assert caught.value.reason == "unknown_language"


def test_a_batch_has_ids_lengths_speakers_and_languages(folder: Path) -> None:
    step = step_of(folder, speaker_column="who", speakers=("ann", "bob"), language_codes=("en", "fr"))
    encoder = step.opened(folder)
    samples = [
        {**encoder.encode(text, language, None, sample_id="a"), **encoder.of_row({"who": who}, sample_id="a")}
        for text, language, who in (("hello", "fr", "bob"), ("good bye", "en", "bob"))
    ]
    assert [set(sample) for sample in samples] == [{spec.name for spec in step.fields()}] * 2
    stored = Stored("cache", flat(**encoder.constants), {spec.name: spec for spec in step.fields()})
    batch = Tts.batch(stored)(samples, padding_side="left", allocate=fresh)
    assert list(batch) == ["input_ids", "input_lengths", "speaker_ids", "language_ids"]
    assert {values.dtype for values in batch.values()} == {torch.int64}
    assert batch["input_ids"].tolist() == [
        [*samples[0]["input_ids"].tolist(), *[PAD] * 3],
        samples[1]["input_ids"].tolist(),
    ]
    assert batch["input_lengths"].tolist() == [5, 8]
    assert (batch["speaker_ids"].tolist(), batch["language_ids"].tolist()) == ([1, 1], [1, 0])
    alone = step_of(folder)
    plain = Stored("cache", flat(**encoder.constants), {spec.name: spec for spec in alone.fields()})
    assert list(Tts.batch(plain)(samples, padding_side="right", allocate=fresh)) == ["input_ids", "input_lengths"]


def config(folder: Path, *, source: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "source": {"kind": "table", "manifest": "nowhere.csv", **(source or {})},
        "audio": {"features": "mel", "sample_rate_hz": 22_050},
        "text": {"tokenizer": str(folder), "prompt": "tts", **text},
    }


def test_every_setting_is_in_the_key(folder: Path) -> None:
    kept: dict[str, Any] = {"keep_columns": ["who"]}
    variants: list[dict[str, Any]] = [
        {"source": kept},
        *({"source": kept, name: value} for name, value in {"blank_token": BLANK, "add_bos": True}.items()),
        {"source": kept, "add_eos": True},
        {"source": kept, "speaker_column": "who"},
        *({"source": kept, "speaker_column": "who", "speakers": names} for names in (["a", "b"], ["b", "a"])),
        *({"source": kept, "language_codes": codes} for codes in (["en", "fr"], ["fr", "en"])),
    ]
    keys = [recipe_of(load_config(config(folder, **settings))).key for settings in variants]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"speakers": ["a"]}, "speakers need speaker_column"),
        ({"speaker_column": "who"}, r'text\.speaker_column is "who", and source\.keep_columns does not name it'),
        ({"speaker_column": "who", "speakers": ["a", "a"]}, "speakers names 'a' twice"),
        ({"language_codes": ["en", "EN"]}, "language_codes names 'en' twice"),
        ({"language_codes": ["en"], "language_tag_mode": "none"}, 'language_tag_mode is "none"'),
        ({"language_codes": "en"}, r'text\.language_codes: prompt = "tts" wants a list of strings'),
    ],
)
def test_settings_that_cannot_be_are_config_errors(folder: Path, text: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config(folder, **text))


def test_a_tokenizer_must_have_the_tokens(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text\.blank_token is '<gap>', which the tokenizer in .* does not have"):
        encoder_of(folder, blank_token="<gap>")
    bare = character_tokenizer(tmp_path, TEXTS, special=False)
    with pytest.raises(ConfigError, match=r"text\.add_bos is true, and the tokenizer in .* names no bos_token"):
        encoder_of(bare, add_bos=True)
    with pytest.raises(ConfigError, match=r"names no pad_token, which fills up batches"):
        encoder_of(bare)
