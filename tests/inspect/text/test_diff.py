"""Differences between two texts: both texts can be read off them, whatever the texts hold."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.inspect.text_diff import TextPart, changes, counted, marked, wrapped_parts
from tests.strategies import transcripts

ANY = st.text(st.characters(exclude_categories=()), max_size=30)
PAIRS = st.one_of(
    st.tuples(ANY, ANY),
    transcripts().map(lambda text: (text, text.lower())),
    st.lists(st.sampled_from(["a", "b ", "ab ", "e\u0301", " "]), max_size=30).flatmap(
        lambda words: st.tuples(st.just("".join(words)), st.permutations(words).map("".join))
    ),
)


def sides(parts: list[TextPart]) -> tuple[str, str]:
    before = "".join(part.text for part in parts if part.change != "added")
    return before, "".join(part.text for part in parts if part.change != "removed")


@given(pair=PAIRS)
@example(pair=("a " * 1500 + "b", "c " + "a " * 1500))
@example(pair=("a" * 500, "b" + "a" * 200))
def test_both_texts_can_be_read_off_their_parts(pair: tuple[str, str]) -> None:
    parts = changes(*pair)
    assert sides(parts) == pair
    assert all(part.text for part in parts)
    assert all(a.change != b.change for a, b in itertools.pairwise(parts))
    removed = [len(part.text) for part in parts if part.change == "removed"]
    assert counted(*pair).removed == sum(removed)
    assert len(pair[0]) - len(pair[1]) == counted(*pair).removed - counted(*pair).added
    assert (pair[0] == pair[1]) == (counted(*pair) == (0, 0))


@given(before=st.text("ab é ", max_size=30), after=st.text("abc é ", max_size=30))
def test_without_its_marks_a_line_is_either_text(before: str, after: str) -> None:
    line = marked(changes(before, after))
    assert re.sub(r"\{\+.*?\+\}", "", line).replace("[-", "").replace("-]", "") == before
    assert re.sub(r"\[-.*?-\]", "", line).replace("{+", "").replace("+}", "") == after


@given(pair=PAIRS, width=st.integers(1, 20))
def test_lines_hold_all_of_it_and_are_no_wider(pair: tuple[str, str], width: int) -> None:
    lines = wrapped_parts(changes(*pair), width)
    assert sides([part for line in lines for part in line]) == pair
    narrow = [line for line in lines if len("".join(part.text for part in line)) > 1]
    ascii_ = [line for line in narrow if all(part.text.isascii() for part in line)]
    assert all(len("".join(part.text for part in line)) <= width for line in ascii_)


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("We're here", "we are here", "[-W-]{+w+}e[-'-]{+ a+}re here"),
        ("same", "same", "same"),
        ("", "new", "{+new+}"),
        ("na\u0308he", "n\u00e4he", "n[-a<COMBINING DIAERESIS>-]{+\u00e4+}he"),
        ("a\u00a0 b", "a b", "a[-<NO-BREAK SPACE>-] b"),
        ("می\u200cروم", "میروم", "می[-<ZERO WIDTH NON-JOINER>-]روم"),
        ("क़", "क", "क[-<DEVANAGARI SIGN NUKTA>-]"),
        ("１２３ 年", "123 年", "[-１２３-]{+123+} 年"),
    ],
)
def test_changes_are_marked_in_their_place(before: str, after: str, wanted: str) -> None:
    assert marked(changes(before, after)) == wanted


def test_lines_break_behind_spaces_and_count_wide_characters_twice() -> None:
    assert wrapped_parts([TextPart("kept", "one two three")], 8) == [
        [TextPart("kept", "one two ")],
        [TextPart("kept", "three")],
    ]
    assert wrapped_parts([TextPart("kept", "世界"), TextPart("added", "a\u0301b")], 4) == [
        [TextPart("kept", "世界")],
        [TextPart("added", "a\u0301b")],
    ]
