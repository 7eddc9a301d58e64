"""The figures of many texts, against plain loops over them."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.errors import TextError
from forebay.inspect.text_diff import KINDS, TextPart, changes, counted, marked, wrapped_parts
from forebay.inspect.text_report import AskedTexts, Look, TextTally
from forebay.steps.text.line import PreparedTexts, Staged
from forebay.steps.text.normal.normal_step import Problem
from tests.strategies import transcripts

CODES = np.array([0, 0, 1, 2, 3, 4], np.uint8)


@st.composite
def looks(draw: st.DrawFn) -> list[Look]:
    """Texts of two languages, written in lower case; some fail in the step, some are too long."""
    found = []
    for number in range(draw(st.integers(0, 20))):
        raw, language = draw(st.sampled_from(["A b", "a b", "AB", "x", "", "Word"])), draw(st.sampled_from(["en", ""]))
        result: str | Problem = Problem("no_x", "it has an x") if raw == "x" else raw.lower()
        prepared = result if isinstance(result, Problem) else PreparedTexts(result, language)
        is_bad = isinstance(result, Problem) or draw(st.booleans())
        ids = [] if isinstance(result, Problem) else draw(st.lists(st.integers(0, 5), max_size=6))
        found.append(
            Look(
                asked=AskedTexts(sample_id=f"s{number}", text=raw, language=language),
                body=raw,
                staged=Staged((("lower", result),), prepared, language),
                text="" if isinstance(result, Problem) else result,
                ids=ids,
                text_ids=ids,
                num_label_tokens=len(ids),
                failure=TextError("no_x" if isinstance(result, Problem) else "long", f"s{number}: why")
                if is_bad
                else None,
            )
        )
    return found


@given(texts=looks(), size=st.integers(1, 7), data=st.data())
def test_figures_are_those_of_a_loop_whatever_the_batches(texts: list[Look], size: int, data: st.DataObject) -> None:
    seconds = np.array(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0, np.nan]), min_size=len(texts), max_size=len(texts)))
    )
    tally = TextTally(["lower"], CODES)
    for start in range(0, len(texts), size):
        tally.add(texts[start : start + size], seconds[start : start + size])
    step = tally.steps["lower"]
    changed = [t for t in texts if t.text and t.text != t.body]
    assert len(tally) == len(texts)
    assert (step.seen, step.texts, step.failed) == (len(texts), len(changed), sum(t.body == "x" for t in texts))
    assert step.removed == sum(counted(t.body, t.text).removed for t in changed)
    assert step.added == sum(counted(t.body, t.text).added for t in changed)
    assert len(step.examples) == min(3, len({t.body for t in changed}))
    assert {name: each.count for name, each in tally.failures.items()} == Counter(
        t.failure.reason for t in texts if t.failure
    )
    for number, language in enumerate(tally.languages):
        kinds = Counter(KINDS[CODES[i]] for t in texts if t.asked.language == language for i in t.text_ids)
        assert tally.kinds(number) == {name: kinds[name] for name in KINDS}
    good = Counter(t.text for t in texts if t.failure is None)
    assert sorted(count for _, count in tally.repeated()) == sorted(n for n in good.values() if n > 1)
    for own, count in tally.repeated():
        first = next(row for row, t in enumerate(texts) if t.failure is None and t.text == texts[own].text)
        assert (own, count) == (first, good[texts[own].text])
    longest = sorted((t.num_label_tokens for t in texts if t.num_label_tokens), reverse=True)[:3]
    assert [texts[row].num_label_tokens for row in tally.longest(3)] == longest
    for rate, look, length in zip(tally.pace().per_s.tolist(), texts, seconds.tolist(), strict=True):
        spoken = len("".join(look.body.split()))
        is_known = look.failure is None and spoken > 0 and length > 0
        assert rate == (pytest.approx(spoken / length) if is_known else pytest.approx(np.nan, nan_ok=True))


def test_a_text_of_another_recording_is_an_outlier_and_a_word_in_a_short_clip_is_none() -> None:
    rng = np.random.default_rng(0)
    texts = ["word " * 6] * 60
    seconds = 2.5 * np.exp(rng.normal(size=60) * 0.1)
    seconds[7], seconds[9], seconds[11] = 0.5, 40.0, 60.0
    texts[30] = "a"
    seconds[30] = 0.5
    found = [
        Look(
            asked=AskedTexts(sample_id=str(i), text=t, language="en"),
            body=t,
            staged=Staged((), PreparedTexts(t, "en")),
            text=t,
        )
        for i, t in enumerate(texts)
    ]
    tally = TextTally([], CODES)
    tally.add(found, seconds)
    outliers = tally.outliers()
    named = {each.row: each.check for each in outliers}
    assert named == {7: "too_many_chars", 9: "chars_outlier", 11: "too_few_chars"}
    by_row = {each.row: each for each in outliers}
    assert by_row[7].per_s == pytest.approx(24 / 0.5)
    score, median = by_row[9].score, by_row[9].median_per_s
    assert score is not None
    assert score < -6
    fair = [24 / s for row, s in enumerate(seconds.tolist()) if row not in (7, 11, 30)]
    assert median == pytest.approx(float(np.median(fair)))


def test_nothing_has_no_figures() -> None:
    tally = TextTally(["lower"], CODES)
    assert (len(tally), tally.outliers(), tally.repeated(), tally.longest(3)) == (0, [], [], [])


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
