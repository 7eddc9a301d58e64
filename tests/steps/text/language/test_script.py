"""Scripts of letters against Unicode's own property, and what languages are called."""

from __future__ import annotations

import unicodedata

import pytest
import regex

from forebay.steps.text.language_detector import ALONE, MODEL_LANGUAGES, candidates
from forebay.steps.text.script import SCRIPTS, code_of, languages_of, script_of

_PROPERTIES = {
    "kana": "[\\p{Script=Hiragana}\\p{Script=Katakana}]",
    "canadian": "\\p{Script=Canadian_Aboriginal}",
    "ol": "\\p{Script=Ol_Chiki}",
    "meetei": "\\p{Script=Meetei_Mayek}",
}
"""Scripts that Unicode calls otherwise than the first word of its letters' names."""


def _property(script: str) -> regex.Pattern[str]:
    return regex.compile(_PROPERTIES.get(script, f"\\p{{Script={script.title()}}}"))


@pytest.fixture(scope="module")
def letters() -> dict[str | None, set[str]]:
    """All letters of Unicode by the script that they are said to be of."""
    found: dict[str | None, set[str]] = {}
    for character in map(chr, range(0x110000)):
        if unicodedata.category(character) in ("Lu", "Ll", "Lt", "Lo"):
            found.setdefault(script_of(character), set()).add(character)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_letters_are_of_the_script_that_unicode_says(script: str, letters: dict[str | None, set[str]]) -> None:
    """But for letters of Common script (the mathematical ones) and forms that NFKC turns into a mark and a letter."""
    theirs = set(_property(script).findall("".join(set().union(*letters.values()))))
    ours = letters[script]
    assert all(regex.match(r"\p{Script=Common}", letter) for letter in ours - theirs)
    missing = {letter for letter in theirs - ours if len(unicodedata.normalize("NFKC", letter)) == 1}
    known = {"latin": 3, "kana": 285}  # REVERSED ONE HUNDRED and two TURNED F; hentaigana
    assert len(missing) <= known.get(script, 0), missing


def test_every_script_that_decides_is_one_whose_letters_are_known() -> None:
    assert set(ALONE) <= set(SCRIPTS)
    assert all(code in languages_of(script) for script, code in ALONE.items())


@pytest.mark.parametrize("script", ["devanagari", "bengali", "arabic", "han", "latin", "cyrillic"])
def test_scripts_of_several_languages_decide_nothing(script: str) -> None:
    assert script not in ALONE
    assert len(candidates(())[script]) > 1


@pytest.mark.parametrize("script", ["ethiopic", "tibetan"])
def test_nothing_is_said_where_the_model_knows_one_language_of_several(script: str) -> None:
    assert script not in candidates(())


def test_every_language_of_the_model_has_a_script() -> None:
    written = {code for script in SCRIPTS for code in languages_of(script)}
    assert written >= MODEL_LANGUAGES


@pytest.mark.parametrize(
    ("written", "code"),
    [
        *[("en", "en"), ("EN", "en"), ("en-US", "en"), ("pt_BR", "pt"), ("English", "en"), ("eng", "en")],
        *[("nb", "no"), ("fil", "tl"), ("zh-Hant", "zh"), ("Mandarin", "zh"), ("cmn", "zh"), (" de ", "de")],
        *[("yue", "yue"), ("Klingon", "klingon"), ("", "")],
    ],
)
def test_codes_by_which_languages_are_compared(written: str, code: str) -> None:
    assert code_of(written) == code
