"""`text.phones` of a config: what it may say, and what keys know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.steps.recipe import load_config, recipe_of
from forebay.steps.text.normal.written_phones import problems
from tests.store.sealed import DEMO_MODEL


def _document(phones: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {
        "name": "texts",
        "source": {"kind": "text", "manifest": "texts.txt"},
        "audio": {"features": "none"},
        "text": {"tokenizer": str(DEMO_MODEL), "normalize": ["nfkc", "phones"], "phones": phones, **text},
    }


def _key(phones: dict[str, Any]) -> str:
    return str(recipe_of(load_config(_document(phones))).key)


@pytest.mark.parametrize(
    ("phones", "message"),
    [
        ({}, r'text\.phones\.backend: missing; name "espeak" or "lexicon"'),
        ({"backend": "festival"}, r'text\.phones\.backend: wants "espeak" or "lexicon", got \'festival\''),
        ({"backend": "lexicon"}, r"text\.phones\.lexicon: missing"),
        ({"backend": "espeak", "seperator": ""}, r"text\.phones\.seperator: unknown field; did you mean .*separator\?"),
        ({"backend": "espeak", "separator": "\n"}, r"separator: wants a string of one line"),
        ({"backend": "espeak", "lexicon": "x.tsv"}, r'text\.phones\.lexicon: only for backend = "lexicon"'),
        ({"backend": "lexicon", "lexicon": "x", "voice": "en"}, r"text\.phones\.voice: only for espeak-ng"),
        ({"backend": "espeak", "voice": "-w"}, r"voice: wants the name of a voice"),
        ({"backend": "espeak", "voice": "../../etc/x"}, r"voice: wants the name of a voice"),
        ({"backend": "espeak", "voices": {"en": 3}}, r"voices: wants a table of languages"),
        ({"backend": "espeak", "stress": "no"}, r"stress: wants true or false"),
    ],
)
def test_settings_that_say_nothing_are_refused(phones: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(_document(phones))


@pytest.mark.parametrize("voice", ["en-us", "en-us+f3", "gmw/en-US", "en-gb-x-rp"])
def test_names_of_voices_are_taken(voice: str) -> None:
    assert problems({"backend": "espeak", "voice": voice, "voices": {"en": voice}}) == []


def test_every_setting_of_the_phones_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no program is asked for a key
    for name, content in (("a.tsv", "a\tb\n"), ("b.tsv", "a\tc\n"), ("c.tsv", "a\tb\n")):
        (tmp_path / name).write_text(content)
    espeak: dict[str, Any] = {"backend": "espeak"}
    lexicon = {"backend": "lexicon", "lexicon": str(tmp_path / "a.tsv")}
    variants = [
        espeak, lexicon, {**espeak, "separator": ""}, {**espeak, "word_separator": " "}, {**espeak, "stress": False},
        {**espeak, "punctuation": "keep"}, {**espeak, "ties": True}, {**espeak, "voice": "en"},
        {**espeak, "voices": {"en": "en-us"}}, {**espeak, "voices": {"en": "en-us", "hi": "hi"}},
        {**lexicon, "lexicon": str(tmp_path / "b.tsv")}, {**lexicon, "fallback": "keep"},
        {**lexicon, "readings": "first"},
    ]  # fmt: skip
    keys = [_key(phones) for phones in variants]
    assert len(set(keys)) == len(variants)
    assert _key({**lexicon, "lexicon": str(tmp_path / "c.tsv")}) == keys[1]  # by content
    assert _key({"voices": {"hi": "hi", "en": "en-us"}, **espeak}) == keys[9]  # in any order
    assert _key({**espeak, "stress": True}) == keys[0]
