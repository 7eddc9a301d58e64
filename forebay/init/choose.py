"""What becomes of a question with several answers: the options of the command, a person, or the likelier one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from forebay.errors import ConfigError
from forebay.visible import printable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """One answer. label: what a person reads. value: what stands behind `--option` to give it without being asked."""

    label: str
    value: str
    answer: T


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the model's folder says of how rows of images are read. value: a `text.prompt`; None: it leaves it open.

    why: how it says so. never: prompts that the folder cannot have, and what it lacks.
    """

    value: str | None = None
    why: str = ""
    never: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Chooser:
    """Answers questions with several answers, the likeliest of which comes first.

    given: by option, the values of the command line; a role of `--column text=x` is the option `column text`.
    takes_first: `--yes`. ask: shows a text to a person and returns what is typed; None without a terminal. wish: what
    the model wants of images; None without a model that sees. said: what was decided in a person's stead. used: options
    that answered a question.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    takes_first: bool = False
    ask: Callable[[str], str] | None = None
    wish: Wish | None = None
    said: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def one(self, question: str, choices: Sequence[Choice[T]], *, option: str) -> T:
        """Returns the answer to a question. option: by which the command line answers it, without its dashes.

        Raises ConfigError for a value of the command line that is none of them, and, without a terminal and without
        `--yes`, where there are several.
        """
        if option in self.given:
            return self._given(question, choices, option)
        if len(choices) == 1:
            return choices[0].answer
        if self.takes_first:
            others = ", ".join(written(option, choice.value) for choice in choices[1:])
            self.said.append(f"{question}? Took the likelier: {choices[0].label}; for another give {others}")
            return choices[0].answer
        if self.ask is None:
            lines = [f"  {written(option, choice.value)}    {choice.label}" for choice in choices]
            raise ConfigError("\n".join([f"{question}? Give one of these, or --yes for the first:", *lines]))
        return self._asked(question, choices)

    def _given(self, question: str, choices: Sequence[Choice[T]], option: str) -> T:
        value = self.given[option]
        self.used.add(option)
        for choice in choices:
            if choice.value == value:
                return choice.answer
        known = ", ".join(choice.value for choice in choices)
        raise ConfigError(f"{written(option, value)}: {question} has no such answer; wanted one of {known}")

    def _asked(self, question: str, choices: Sequence[Choice[T]]) -> T:
        assert self.ask is not None
        lines = [f"{question}?", *(f"  {number}) {choice.label}" for number, choice in enumerate(choices, 1))]
        while True:
            typed = self.ask("\n".join(map(printable, lines)) + f"\n1 to {len(choices)} [1]: ").strip()
            if not typed:
                return choices[0].answer
            if typed.isdecimal() and 1 <= int(typed) <= len(choices):
                return choices[int(typed) - 1].answer
            lines = [f"{typed!r:.60} is none of 1 to {len(choices)}"]


def written(option: str, value: str) -> str:
    """Returns an option as it is typed: `--kind table`, `--column text=sentence`."""
    name, _, role = option.partition(" ")
    return f"--{name} {role}={value}" if role else f"--{name} {value}"


def ask_on_terminal(text: str) -> str:
    """Shows a text on standard error and returns the line that is typed. Raises ConfigError where the input ends."""
    sys.stderr.write(text)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise ConfigError("the input ended before the question was answered; give --yes, or the option that answers it")
    return line


def has_terminal() -> bool:
    """Returns whether somebody can be asked: standard input and standard error are both a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
