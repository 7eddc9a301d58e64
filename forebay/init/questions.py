"""Questions with several answers: the options of the command answer them, or a person, or the likelier answer is taken.

Which column holds a role, and what is read beside images, are such questions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from forebay.config.data import MEANINGS
from forebay.errors import ConfigError
from forebay.init.table_head import (
    LikelyColumn,
    TableHead,
    are_pairs,
    images_of_row,
    likely_columns,
    videos_of_row,
    words_of,
)
from forebay.visible import printable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """One answer. label: what a person reads. value: what stands behind `--option` to give it without being asked."""

    label: str
    value: str
    answer: T


class BesideImage(NamedTuple):
    """Something that may be read beside an image. noun: what is counted. give: how a person gives it."""

    said: str
    noun: str = "images"
    give: str = ""


BESIDE = {
    "chat": BesideImage(
        "conversations",
        "conversations",
        "name the columns (--column question=NAME --column answer=NAME, or --column messages=NAME)",
    ),
    "label": BesideImage(
        "a class of each image",
        give="name the column (--column label=NAME), or put the images into folders of their classes",
    ),
    "plain": BesideImage(
        "a text of each image",
        "images with texts",
        "name the column (--column text=NAME), or put NAME.txt beside NAME.jpg",
    ),
    "none": BesideImage("nothing beside the images"),
}
"""By `text.prompt` of images."""
_ROLES = {each.prompt: [name for name in each.columns if name not in (*each.lists, "id")] for each in MEANINGS.values()}
"""By `text.prompt` of images: the columns that are read beside these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The reading of image rows that the model's folder asks for. value: a `text.prompt`; None: it leaves it open.

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


def column_of(
    table: TableHead, role: str, likely: Sequence[LikelyColumn], chooser: Chooser, *, may_lack: bool = True
) -> str | None:
    """Returns the column that holds a role: the one that was given, the only one, or the one that is chosen."""
    option = f"column {role}"
    if option in chooser.given:
        chooser.used.add(option)
        name = chooser.given[option]
        if name not in table.names:
            raise ConfigError(
                f"--column {role}={name}: {table.path} has no such column; it has {', '.join(table.names)}"
            )
        return name
    if not likely:
        if may_lack:
            return None
        raise ConfigError(
            f"{table.path}: no column looks like {role}; give --column {role}=NAME, one of {', '.join(table.names)}"
        )
    examples = {each.name: table.values(each.name) for each in likely}
    shown = {name: repr(str(values[0])[:50]) if values else "empty" for name, values in examples.items()}
    choices = [Choice(f"{name} (for example {example})", name, name) for name, example in shown.items()]
    return chooser.one(f"which column of {table.path.name} is {role}", choices, option=option)


def speech_columns(table: TableHead, audio: str, chooser: Chooser) -> dict[str, str | None]:
    """Returns the columns of text, language and id beside a column of sound."""
    languages = likely_columns(table, "language", taken=(audio,))
    # Asked only where several may be it and neither has the usual name.
    usual = [each for each in languages if each.score >= 1]
    language = column_of(table, "language", usual[:1] or languages, chooser)
    taken = {audio, language or ""}
    text = column_of(table, "text", likely_columns(table, "text", taken=taken), chooser)
    return {"audio": audio, "text": text, "language": language, "id": _id_column(table, {*taken, text}, chooser)}


def _id_column(table: TableHead, taken: Collection[str | None], chooser: Chooser) -> str | None:
    return column_of(table, "id", likely_columns(table, "id", taken=[name for name in taken if name])[:1], chooser)


def columns_beside(
    table: TableHead, image: str | None, chooser: Chooser
) -> tuple[str, dict[str, str | None], list[str]]:
    """Returns the `text.prompt` of a table of images, the columns that it takes, and notes.

    image: the column of images; None where conversations name them.
    """
    prompt, notes = _prompt_of_table(table, [image or ""], chooser)
    return prompt, columns_of(table, prompt, {"image": image}, chooser), notes


def columns_of(
    table: TableHead, prompt: str, media: Mapping[str, str | None], chooser: Chooser
) -> dict[str, str | None]:
    """Returns the columns that a `text.prompt` takes, by role. media: those of items."""
    columns, taken = dict(media), [name or "" for name in media.values()]
    if prompt == "chat" and are_pairs(table.rows):  # read by their own names
        return {**columns, "id": _id_column(table, taken, chooser)}
    has_messages = "column messages" in chooser.given or likely_columns(table, "messages", taken=taken)
    for role in _ROLES[prompt]:
        if role in (("question", "answer") if has_messages else ("messages",)):
            continue
        likely = likely_columns(table, role, taken=taken)
        if role != "label":
            likely = likely[:1] or likely_columns(table, "text", taken=taken)
        columns[role] = column_of(table, role, likely, chooser, may_lack=False)
        taken.append(columns[role] or "")
    return {**columns, "id": _id_column(table, taken, chooser)}


def _prompt_of_table(table: TableHead, taken: Sequence[str], chooser: Chooser) -> tuple[str, list[str]]:
    named = {option.partition(" ")[2] for option in chooser.given if option.startswith("column ")}
    conversations = "columns that were named" if named.intersection(_ROLES["chat"]) else _conversations(table, taken)
    texts = likely_columns(table, "text", taken=taken)
    if conversations:
        texts = [each for each in texts if each.name in ("text", "caption")]
    labels = {
        "chat": conversations,
        "label": _column_label(likely_columns(table, "label", taken=taken), "label", chooser),
        "plain": _column_label(texts, "text", chooser),
    }
    possible = [Choice(label, prompt, prompt) for prompt, label in labels.items() if label]
    asked = [prompt for prompt in labels if named.intersection(_ROLES[prompt])]
    if "prompt" not in chooser.given and asked:
        return asked[0], []
    if chooser.wish is not None and chooser.wish.value == "chat" and not conversations:
        # Columns of unusual names may be a question and an answer.
        possible.insert(0, Choice("columns of text", "chat", "chat"))
    return prompt_of(table.path.name, possible, chooser)


def _conversations(table: TableHead, taken: Sequence[str]) -> str:
    """Returns what a person reads of the columns of conversations; empty where there are none of their names."""
    if are_pairs(table.rows):
        return "answers to prefer and to reject"
    if messages := likely_columns(table, "messages", taken=taken):
        return f"column {messages[0].name}"
    questions = likely_columns(table, "question", taken=taken)
    answers = likely_columns(table, "answer", taken=(*taken, questions[0].name)) if questions else []
    if answers:
        return f"columns {questions[0].name} and {answers[0].name}"
    is_shown = any((images_of_row(row) or videos_of_row(row)) and words_of(row, {}) for row in table.rows)
    return "messages" if is_shown else ""


def _column_label(found: Sequence[LikelyColumn], role: str, chooser: Chooser) -> str:
    name = chooser.given.get(f"column {role}", found[0].name if found else "")
    return f"column {name}" if name else ""


def prompt_of(place: str, possible: Sequence[Choice[str]], chooser: Chooser) -> tuple[str, list[str]]:
    """Returns the `text.prompt` for rows of images, and notes on what of them is not read.

    place: the data, for messages. possible: what the rows have beside images, the likeliest first. What the command
    line says goes first, then what the model is trained on, then what the data has.
    Raises ConfigError where the rows have nothing of the kind that the model wants.
    """
    question, nothing = f"what is read beside the images of {place}", Choice(BESIDE["none"].said, "none", "none")
    if "prompt" in chooser.given:
        return chooser.one(question, [*possible, nothing], option="prompt"), []
    if chooser.wish is None:
        return (possible or [nothing])[0].answer, []
    wish, never = chooser.wish, chooser.wish.never
    left = [choice for choice in possible if choice.value not in never]
    notes = [
        f"{BESIDE[c.value].said.capitalize()} ({c.label}): not read, {never[c.value]}."
        for c in possible
        if c not in left
    ]
    if wish.value is not None:
        if wish.value not in ("none", *(choice.value for choice in left)):
            has = " or ".join(BESIDE[choice.value].said for choice in possible) or BESIDE["none"].said
            others = " or ".join(f"--prompt {value}" for value in (*(choice.value for choice in possible), "none"))
            wanted = BESIDE[wish.value]
            raise ConfigError(
                f"{place} has {has}, and --model wants {wanted.said}: {wish.why}; {wanted.give}, or read them in "
                f"another way: {others}"
            )
        return wish.value, notes
    return (chooser.one(question, left, option="prompt") if left else "none"), notes
