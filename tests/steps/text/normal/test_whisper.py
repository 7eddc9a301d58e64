"""Whisper's normalisers are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from forebay.errors import ConfigError
from forebay.steps.text.normal.normal_forms import WhisperBasic, WhisperEnglish
from forebay.steps.text.normal.normal_step import NormalStep, Problem, Where
from tests.strategies import transcripts

SPELLINGS = {"colour": "color", "realise": "realize"}
TEXTS = (
    "Mr. Smith won't realise the <noise> colour (laughs), it's ninety cents!",
    "Hello,  World? ½ Ａ",
    "¿Dónde está el niño? ZWÖLF Straße",
    "They'd been 1st of one hundred and five; 50%",
)


@pytest.fixture
def where(tmp_path: Path) -> Where:
    (tmp_path / "normalizer.json").write_text(json.dumps(SPELLINGS))
    return Where(folder=tmp_path, tokenizer=tmp_path)


def made(step: NormalStep, text: str, language: str = "") -> object:
    return step.open()([text], [language])[0]


@pytest.mark.parametrize("text", TEXTS)
def test_basic_is_that_of_transformers(text: str) -> None:
    assert made(WhisperBasic(), text, "es") == BasicTextNormalizer()(text).strip()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("language", ["en", "en-US", "English", ""])
def test_english_is_that_of_transformers(where: Where, text: str, language: str) -> None:
    expected = EnglishTextNormalizer(SPELLINGS)(text).strip()
    assert made(WhisperEnglish.of("whisper_english", where), text, language) == expected
    assert text != TEXTS[0] or expected.startswith("mister smith will not realize the color it is ")


@settings(max_examples=20)
@given(text=transcripts())
def test_any_text_gives_what_transformers_gives(text: str) -> None:
    assert made(WhisperBasic(), text) == BasicTextNormalizer()(text).strip()


def test_what_transformers_gives_today() -> None:
    """Another result under another transformers is another `version` of the steps."""
    assert made(WhisperBasic(), TEXTS[0]) == "mr smith won t realise the colour it s ninety cents"
    assert made(WhisperBasic(), "नमस्ते") == "नमस त"  # vowel signs go, as the docstring says


def test_english_leaves_other_languages_alone(where: Where) -> None:
    assert made(WhisperEnglish.of("whisper_english", where), TEXTS[2], "es") == TEXTS[2]


def test_where_transformers_raises_the_text_alone_fails(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EnglishTextNormalizer.__call__

    def checked(self: EnglishTextNormalizer, text: str) -> str:
        if "bad" in text:
            raise ValueError("Unexpected token: bad")
        return str(real(self, text))

    monkeypatch.setattr(EnglishTextNormalizer, "__call__", checked)
    good, bad = WhisperEnglish.of("whisper_english", where).open()(["Good", "bad"], ["en", "en"])
    assert good == "good"
    message = "text.normalize: transformers' whisper_english raised ValueError: Unexpected token: bad"
    assert bad == Problem("step_failed", message)


def test_twice_is_not_once() -> None:
    text = "\u2110\u0307"
    once = str(made(WhisperBasic(), text))
    assert made(WhisperBasic(), once) != once


def test_spellings_are_in_the_key_by_content(where: Where, tmp_path: Path) -> None:
    step = WhisperEnglish.of("whisper_english", where)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "normalizer.json").write_text(json.dumps(SPELLINGS))
    moved = WhisperEnglish.of("whisper_english", Where(folder=tmp_path, tokenizer=tmp_path / "other"))
    assert step.identity() == moved.identity()
    assert step.identity().keys() == {"step", "version", "spellings"}
    (tmp_path / "normalizer.json").write_text("{}")
    assert WhisperEnglish.of("whisper_english", where).identity() != step.identity()
    with pytest.raises(ConfigError, match=r"normalizer\.json has changed: its sha256 was \w+ and is 44136fa355b3678a"):
        step.open()
    assert WhisperBasic().identity() == {"step": "WhisperBasic", "version": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r'reads its spellings from .*normalizer\.json: No such file.*copy the file .*or take "whisper_basic"'),
        ("{", r"is not JSON"),
        ("[" * 100_000, r"is not JSON"),
        ("[]", r"holds no table of words by words"),
        ('{"a": 1}', r"holds no table of words by words"),
    ],
)
def test_a_folder_without_spellings_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "normalizer.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        WhisperEnglish.of("whisper_english", Where(folder=tmp_path, tokenizer=tmp_path)).open()
