"""Questions are answered by options, a person, or `--yes`; without any of them they stop the command."""

from __future__ import annotations

import io
import sys

import pytest

from forebay.errors import ConfigError
from forebay.init.questions import Choice, Chooser, ask_on_terminal

TWO = [Choice("the table", "table", 1), Choice("the folder", "folder", 2)]


def test_the_only_answer_is_taken_without_a_word() -> None:
    chooser = Chooser()
    assert chooser.one("what is it", TWO[:1], option="kind") == 1
    assert chooser.said == []


def test_without_a_terminal_the_choices_and_their_options_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        Chooser().one("what is it", TWO, option="kind")
    assert str(caught.value).splitlines() == [
        "what is it? Give one of these, or --yes for the first:",
        "  --kind table    the table",
        "  --kind folder    the folder",
    ]


def test_an_option_answers() -> None:
    chooser = Chooser(given={"column text": "b"})
    choices = [Choice("a", "a", "a"), Choice("b", "b", "b")]
    assert chooser.one("which column is text", choices, option="column text") == "b"
    assert chooser.used == {"column text"}


def test_an_option_that_is_no_answer_names_the_answers() -> None:
    with pytest.raises(ConfigError, match="--kind tar: what is it has no such answer; wanted one of table, folder"):
        Chooser(given={"kind": "tar"}).one("what is it", TWO, option="kind")


def test_yes_takes_the_first_and_says_so() -> None:
    chooser = Chooser(takes_first=True)
    assert chooser.one("what is it", TWO, option="kind") == 1
    assert chooser.said == ["what is it? Took the likelier: the table; for another give --kind folder"]


@pytest.mark.parametrize(("typed", "answer"), [(["2"], 2), ([""], 1), (["3", "x", "0", " 2 "], 2)])
def test_a_person_is_asked_until_the_answer_is_one(typed: list[str], answer: int) -> None:
    lines, shown = iter(typed), []

    def ask(text: str) -> str:
        shown.append(text)
        return next(lines)

    assert Chooser(ask=ask).one("what is it", TWO, option="kind") == answer
    assert shown[0] == "what is it?\n  1) the table\n  2) the folder\n1 to 2 [1]: "
    assert len(shown) == len(typed)


def test_names_of_strangers_cannot_move_the_cursor() -> None:
    shown: list[str] = []

    def ask(text: str) -> str:
        shown.append(text)
        return ""

    Chooser(ask=ask).one("what", [Choice("a\x1b[2J\nb", "x", 1), *TWO], option="kind")
    assert "\x1b" not in shown[0]
    assert len(shown[0].splitlines()) == 5


def test_the_end_of_the_input_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="the input ended before the question was answered; give --yes"):
        ask_on_terminal("what? ")
