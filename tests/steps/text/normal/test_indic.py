"""Letters with a nukta have one form."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.text.normal.normal_forms import Indic
from tests.steps.text.normal.references import reference_pairs
from tests.strategies import transcripts

RUN = Indic().open()


def written(text: str) -> str:
    (result,) = RUN([text], ["hi"])
    assert isinstance(result, str)
    return result


@reference_pairs("indic")
def test_nuktas_are_those_of_the_indicnlp_library(text: str, expected: str) -> None:
    assert written(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\u0921\u093e\u093c", "\u0921\u093c\u093e"),  # typed behind the vowel sign
        ("\u0915\u093c\u093f\u093c", "\u0915\u093c\u093f"),
        ("\u0958\u093c", "\u0915\u093c"),
        ("\u0915\u094d\u093c\u0937", "\u0915\u093c\u094d\u0937"),  # canonical order: nukta before virama
        ("\u09af\u09c7\u09bc", "\u09af\u09bc\u09c7"),
        ("\u0915\u094d\u200d\u0937", "\u0915\u094d\u200d\u0937"),
        (" \u093c", " \u093c"),
        ("caf\u00e9 \u212b", "caf\u00e9 \u212b"),
    ],
)
def test_a_nukta_stands_behind_its_letter_once(text: str, expected: str) -> None:
    assert written(text) == expected


@given(
    text=st.one_of(
        transcripts(),
        st.text(
            st.sampled_from("\u0915\u0958\u0929\u093c\u093f\u094d\u0902\u09af\u09bc\u09df\u0a36\u200d a"), max_size=12
        ),
    )
)
def test_twice_changes_nothing_more_and_equal_texts_become_equal(text: str) -> None:
    once = written(text)
    assert written(once) == once
    for form in ("NFC", "NFD"):
        other = written(unicodedata.normalize(form, text))
        assert unicodedata.normalize("NFD", other) == unicodedata.normalize("NFD", once)
    if not any("\u0900" <= char <= "\u0dff" for char in text):
        assert once == text


def test_its_identity() -> None:
    assert Indic().identity() == {"step": "Indic", "version": 1}
