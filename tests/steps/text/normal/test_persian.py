"""Persian letters and digits have one form, and a ZWNJ stands where it is seen."""

from __future__ import annotations

import unicodedata

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.text.normal import normal_forms as persian
from forebay.steps.text.normal.normal_forms import Persian
from tests.steps.text.normal.references import reference_pairs
from tests.strategies import transcripts

RUN = Persian().open()
ZWNJ, ZWJ = "\u200c", "\u200d"
BEH, REH, YEH, HAMZA, FATHA = "\u0628", "\u0631", "\u06cc", "\u0621", "\u064e"


def written(text: str, language: str = "fa") -> str:
    (result,) = RUN([text], [language])
    assert isinstance(result, str)
    return result


@reference_pairs("persian")
def test_letters_digits_and_joiners_are_those_of_hazm(text: str, expected: str) -> None:
    assert written(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BEH + ZWNJ * 3 + BEH, BEH + ZWNJ + BEH),
        (BEH + ZWNJ + REH, BEH + ZWNJ + REH),
        (BEH + FATHA + ZWNJ + BEH, BEH + FATHA + ZWNJ + BEH),
        (BEH + ZWNJ + FATHA + ZWNJ + BEH, BEH + ZWNJ + FATHA + BEH),
        # Nothing is seen of these; hazm keeps the first.
        (REH + ZWNJ + BEH, REH + BEH),
        (BEH + ZWNJ + HAMZA, BEH + HAMZA),
        (REH + FATHA + ZWNJ + BEH, REH + FATHA + BEH),
        (f"{ZWNJ}{BEH}{ZWNJ} {ZWNJ}{BEH}{ZWNJ}.", f"{BEH} {BEH}."),
        (f"{BEH}{ZWNJ}\u06f1{ZWNJ}{BEH}", f"{BEH}\u06f1{BEH}"),
        (f"{BEH}{ZWNJ}a", f"{BEH}a"),
        (f"{BEH} {ZWNJ} {BEH}", f"{BEH}  {BEH}"),
        # Beside ZWJ and letters of other scripts it may mean something else.
        (BEH + ZWJ + ZWNJ + BEH, BEH + ZWJ + ZWNJ + BEH),
        (f"{BEH} \u0915\u094d{ZWNJ}\u0937 \u0915\u094d{ZWNJ}", f"{BEH} \u0915\u094d{ZWNJ}\u0937 \u0915\u094d{ZWNJ}"),
    ],
)
def test_a_zwnj_stays_where_it_is_seen(text: str, expected: str) -> None:
    assert written(text) == expected


def test_joining_types_are_those_of_unicode() -> None:
    """`regex` has the properties of Unicode, and Python's unicodedata has not this one."""
    letters = [char for char in persian._PERSIAN_BLOCKS if unicodedata.category(char) in ("Lo", "Lm")]
    types = {char: next(t for t in "RUDC" if regex.match(rf"\p{{Joining_Type={t}}}", char)) for char in letters}
    assert {char for char in letters if types[char] in "DC"} == persian._JOINS_NEXT
    assert {char for char in letters if types[char] in "RDC"} == persian._JOINS_LAST
    assert all(regex.match(r"\p{Joining_Type=T}", char) for char in persian._PERSIAN_MARKS)


def test_other_languages_and_scripts_stay() -> None:
    arabic = "\u0643\u062a\u0627\u0628 \u0639\u0644\u064a \u0661"
    assert written(arabic, "ar") == arabic
    assert written(arabic, "Urdu") == arabic
    for language in ("fa", "fa-IR", "Persian", "pes", ""):
        assert written(arabic, language) == "\u06a9\u062a\u0627\u0628 \u0639\u0644\u06cc \u06f1"
    assert written("iPhone 12 \u0661") == "iPhone 12 \u0661"  # no letter of Persian
    assert written(f"{BEH} 12") == f"{BEH} 12"


@given(
    text=st.lists(
        st.one_of(
            st.sampled_from([ZWNJ, ZWJ, BEH, REH, HAMZA, FATHA, "\u064a", "\u0661", " ", "a", "\u0915"]), transcripts()
        ),
        max_size=12,
    ).map("".join)
)
def test_twice_changes_nothing_more(text: str) -> None:
    once = written(text)
    assert written(once) == once
    assert once.replace(ZWNJ, "") == (
        text.replace(ZWNJ, "").translate(persian._PERSIAN_LETTERS) if once != text else once.replace(ZWNJ, "")
    )


def test_a_long_run_takes_no_time_with_its_square() -> None:
    for part in (ZWNJ, FATHA, FATHA + ZWNJ, BEH + ZWNJ):
        assert written(BEH + part * 100_000).startswith(BEH)


def test_its_identity() -> None:
    assert Persian().identity() == {"step": "Persian", "version": 1}
