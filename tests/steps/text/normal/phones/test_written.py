"""Clauses and marks of texts, and phones written back between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.text.normal.written_phones import Clause, Writing, split, tied

SPACED = Writing(separator=" ", word_separator=" | ", stress=True, punctuation="keep")
PLAIN = Writing(separator="", word_separator=" ", stress=True, punctuation="keep")


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("Hello, world!", [("Hello", ","), ("world", "!")]),
        ("3.14 at 10:30, a.b, don't 1,000.", [("3.14 at 10:30", ","), ("a.b", ","), ("don't 1,000", ".")]),
        ("¿Dónde? Aquí.", [("", "¿"), ("Dónde", "?"), ("Aquí", ".")]),
        ("今日は、晴れです。", [("今日は", "、"), ("晴れです", "。")]),
        ("नमस्ते दुनिया।", [("नमस्ते दुनिया", "।")]),
        ("Wait... what?!", [("Wait", "..."), ("what", "?!")]),
        ('He said "stop." Now', [('He said "stop', "."), ('" Now', "")]),
        ("", [("", "")]),
        ("...", [("", "...")]),
    ],
)
def test_marks_end_clauses_and_stay_inside_of_numbers(text: str, clauses: list[tuple[str, str]]) -> None:
    assert [(clause.body, clause.marks) for clause in split(text)] == clauses


@given(text=st.text(alphabet="ab1 .,!?¿—。'\"\n", max_size=30))
def test_clauses_hold_every_character_but_white_space(text: str) -> None:
    found = "".join(clause.body + clause.marks for clause in split(text))
    assert "".join(found.split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("writing", "text"),
    [(SPACED, "h aɪ , | j uː | d ˈuː | ? | ¿ m eɪ ."), (PLAIN, "haɪ, juː dˈuː ? ¿meɪ.")],
)
def test_marks_come_back_where_they_stood(writing: Writing, text: str) -> None:
    clauses = split("hi, you do ? ¿may.")
    assert [clause.spoken for clause in clauses] == ["hi,", "you do ?", "", "may."]
    words = [[["h", "aɪ"]], [["j", "uː"], ["d", "ˈuː"]], [], [["m", "eɪ"]]]
    assert writing.text(clauses, words) == text


def test_what_nobody_speaks_has_no_phones() -> None:
    assert SPACED.text(split("..."), [[]]) == ""
    assert SPACED.text(split("a ,"), [[["a"]]]) == "a | ,"
    assert SPACED.text([Clause("x"), Clause("y")], [[], [["a", ""], []]]) == "a"


def test_stress_is_dropped_from_both_alphabets_and_tones_stay() -> None:
    writing = Writing(separator=" ", word_separator=" | ", stress=False, punctuation="drop")
    words = [[["h", "ə", "l", "ˈoʊ"], ["HH", "AH0", "L", "OW1"], ["n", "i2"]]]
    assert writing.text([Clause("")], words) == "h ə l oʊ | HH AH L OW | n i2"


@pytest.mark.parametrize(
    ("phone", "with_ties"),
    [("tʃ", "t͡ʃ"), ("ˈeɪ", "ˈe͡ɪ"), ("iː", "iː"), ("ææ", "ææ"), ("tʃʲ", "t͡ʃʲ"), ("ɪ5", "ɪ5"), ("", "")],
)
def test_letters_of_one_phone_are_tied(phone: str, with_ties: str) -> None:
    assert tied(phone) == with_ties
