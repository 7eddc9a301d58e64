"""Scripts, loops and folded texts."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.inspect.checks.text_letters import conversation_facts, foreign_share, text_facts
from forebay.steps.text.script import letters_of, script_of, scripts_of


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Straße", "latin"), ("добро", "cyrillic"), ("καλό", "greek"), ("नमस्ते", "devanagari"), ("வணக்கம்", "tamil"),
        ("שלום", "hebrew"), ("مرحبا", "arabic"), ("ไทย", "thai"), ("漢字", "han"), ("ひらカナ", "kana"),
        ("한국", "hangul"), ("ＦＵＬＬ", "latin"), ("ｶﾅ", "kana"), ("გამარჯობა", "georgian"), ("አማርኛ", "ethiopic"),
        ("ਪੰਜਾਬੀ", "gurmukhi"),
    ],
)  # fmt: skip
def test_letters_are_of_their_script(text: str, script: str) -> None:
    assert set(letters_of(text)) == {script}


def test_digits_marks_and_signs_are_no_letters() -> None:
    assert letters_of("12.5 % —… ़ 3️⃣ \u200d") == {}


@pytest.mark.parametrize(
    ("language", "scripts"),
    [
        ("en", {"latin"}), ("EN-us", {"latin"}), ("eng", {"latin"}), ("English", {"latin"}), ("hi", {"devanagari"}),
        ("hin", {"devanagari"}), ("ja", {"han", "kana"}), ("ko", {"han", "hangul"}), ("sr", {"latin", "cyrillic"}),
        ("sr_Latn", {"latin"}), ("zh-Hant-TW", {"han"}), ("pa", {"gurmukhi", "arabic"}), ("yue", {"han"}),
    ],
)  # fmt: skip
def test_languages_are_known_by_codes_and_names(language: str, scripts: set[str]) -> None:
    assert set(scripts_of(language) or ()) == scripts


@pytest.mark.parametrize("language", ["", "xx", "tlh", "unknown", "und"])
def test_other_languages_are_not_known(language: str) -> None:
    assert scripts_of(language) is None


def test_scripts_that_are_written_together_are_no_mixture() -> None:
    assert foreign_share(letters_of("今日は晴れです"), "ja") == (0.0, "")
    assert foreign_share(letters_of("今日は晴れです"), "") == (0.0, "")
    assert foreign_share(letters_of("नमस्ते दुनिया"), "en") == (1.0, "devanagari")
    share, script = foreign_share(letters_of("abcdef где"), "")
    assert (round(share, 2), script) == (0.33, "cyrillic")


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("one two three", 1), ("no no no", 3), ("a b a b a b a b c", 4), ("", 1), ("well", 1),
        ("哈哈哈哈", 2), ("谢谢观看谢谢观看谢谢观看", 3), ("thank you. thank you. thank you.", 3),
    ],
)  # fmt: skip
def test_loops_are_counted(text: str, loops: int) -> None:
    assert text_facts(text, "").loops == loops


def test_texts_are_the_same_whatever_their_case_and_spaces() -> None:
    assert text_facts("Hello  World\n", "").hash == text_facts("hello world", "").hash != 0
    assert text_facts(" \t", "").hash == 0


@given(st.text(max_size=200), st.sampled_from(["", "en", "ja", "xx", "sr-Latn"]))
def test_any_text_is_measured(text: str, language: str) -> None:
    found = text_facts(text, language)
    assert 0 <= found.foreign <= 1
    assert found.letters >= 0
    assert found.loops >= 1
    assert (found.hash == 0) <= (found.chars == 0)


@given(st.characters())
def test_every_letter_has_a_script_and_nothing_else_has(character: str) -> None:
    is_letter = unicodedata.category(unicodedata.normalize("NFKC", character)[:1] or " ")[0] == "L"
    assert script_of(character) is None or is_letter


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=50)), max_size=4))
def test_any_conversation_is_measured(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": [{"type": "text", "text": text}, {"type": "image"}]} for role, text in turns]
    loops, _ = conversation_facts(json.dumps(messages))
    assert loops >= 1


def test_conversations_that_differ_in_calls_or_rejected_answers_are_no_duplicates() -> None:
    asked, said = ({"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant"))
    talks: list[Any] = [
        [asked, {**said, **more}]
        for more in ({}, {"rejected": [said]}, {"tool_calls": [1]}, {"tool_calls": [2]}, {"reasoning_content": "so"})
    ]
    assert len({conversation_facts(json.dumps(talk)) for talk in [*talks, [{**asked, "tools": [1]}, said]]}) == 6
    assert conversation_facts(json.dumps(talks[0])) == conversation_facts(json.dumps([asked, {**said, "loss": False}]))
