"""Settings that are written are read again as they were, whatever stands in a name."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.init.candidate import Section, document_of, text_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
ANY = st.text()
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.one_of(TEXTS, st.integers(-(2**62), 2**62), st.booleans(), FLOATS, st.lists(TEXTS))


@given(VALUES, ANY, ANY, st.lists(TEXTS))
def test_any_value_survives_and_no_comment_becomes_a_setting(
    value: object, comment: str, note: str, offered: list[str]
) -> None:
    sections = [
        Section("", [("name", value, comment)]),
        Section("source", [("kind", value, comment)], notes=[note], offers=[("keep", offered)]),
        Section("source.columns", [("text", value, "")]),
        Section("mixture.source", [("config", value, "")], is_entry=True),
        Section("mixture.source", [("config", "b", comment)], is_entry=True),
    ]
    text = text_of(sections, head=[note, comment])
    read = tomllib.loads(text)
    assert read == document_of(sections)
    assert read == {
        "name": value,
        "source": {"kind": value, "columns": {"text": value}},
        "mixture": {"source": [{"config": value}, {"config": "b"}]},
    }
    assert text.replace("\n", "").isprintable()


@given(st.lists(TEXTS))
def test_an_offer_that_is_uncommented_is_a_setting(names: list[str]) -> None:
    text = text_of([Section("source", offers=[("keep_columns", names)])], head=[])
    assert tomllib.loads(text.replace("# keep_columns", "keep_columns"))["source"] == {"keep_columns": names}


def test_a_name_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'caf\\udce9' is not UTF-8, .* rename it, or name a link to it"):
        text_of([Section("source", [("manifest", "caf\udce9", "")])], head=[])
