"""What rows of images are read as: conversations, classes, texts or nothing, by the data, the model and a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from forebay.errors import ConfigError
from forebay.init.choose import Choice, Chooser
from forebay.init.columns import class_columns, columns_named, text_columns
from forebay.init.conversation import as_list, images_of_row, texts_of_row
from forebay.init.table import Table

PROMPTS = ("chat", "label", "plain", "none")
"""`text.prompt` of images."""

WHAT = {
    "chat": "conversations",
    "label": "a class of each image",
    "plain": "a text of each image",
    "none": "nothing beside the images",
}

NOUNS = {"chat": "conversations", "label": "images", "plain": "images with texts", "none": "images"}
"""What is counted, by `text.prompt`."""

_GIVE = {
    "chat": "name the columns (--column question=NAME --column answer=NAME, or --column messages=NAME)",
    "label": "name the column (--column label=NAME), or put the images into folders of their classes",
    "plain": "name the column (--column text=NAME), or put NAME.txt beside NAME.jpg",
}
_OPTION = "prompt"
_NONE = Choice(WHAT["none"], "none", "none")


def prompt_of(place: str, possible: Sequence[Choice[str]], chooser: Chooser) -> tuple[str, list[str]]:
    """Returns the `text.prompt` for rows of images, and notes on what of them is not read.

    place: the data, for messages. possible: what the rows have beside images, the likeliest first. What the command
    line says goes first, then what the model is trained on, then what the data has.
    Raises ConfigError where the rows have nothing of the kind that the model wants.
    """
    question = f"what is read beside the images of {place}"
    if _OPTION in chooser.given:
        return chooser.one(question, [*possible, _NONE], option=_OPTION), []
    if chooser.wish is None:
        return (possible or [_NONE])[0].answer, []
    wish, never = chooser.wish, chooser.wish.never
    left = [choice for choice in possible if choice.value not in never]
    notes = [
        f"{WHAT[c.value].capitalize()} ({c.label}): not read, {never[c.value]}." for c in possible if c not in left
    ]
    if wish.value is not None:
        if wish.value not in ("none", *(choice.value for choice in left)):
            raise ConfigError(_lacks(place, possible, wish.value, wish.why))
        return wish.value, notes
    return (chooser.one(question, left, option=_OPTION) if left else "none"), notes


def _lacks(place: str, possible: Sequence[Choice[str]], wanted: str, why: str) -> str:
    has = " or ".join(WHAT[choice.value] for choice in possible) or WHAT["none"]
    others = " or ".join(f"--prompt {value}" for value in (*(choice.value for choice in possible), "none"))
    return (
        f"{place} has {has}, and --model wants {WHAT[wanted]}: {why}; {_GIVE[wanted]}, or read them in another way: "
        f"{others}"
    )


def columns_beside(table: Table, image: str | None, chooser: Chooser) -> tuple[str, list[str]]:
    """Returns the `text.prompt` of a table of images, and notes; the columns are asked for by whoever reads them."""
    named = {option.partition(" ")[2] for option in chooser.given if option.startswith("column ")}
    possible = [
        Choice(label, prompt, prompt)
        for prompt, label in (
            ("chat", _conversations(table, image, named)),
            ("label", _names(class_columns(table, taken=(image or "",)), named, "label", chooser)),
            ("plain", _texts(table, image, named, chooser)),
        )
        if label
    ]
    asked = [prompt for prompt, roles in _ROLES.items() if named & roles]
    if "prompt" not in chooser.given and asked:
        return asked[0], []
    wish = chooser.wish
    if wish is not None and wish.value == "chat" and "chat" not in [choice.value for choice in possible]:
        # Columns of unusual names may be a question and an answer.
        possible = [Choice("columns of text", "chat", "chat"), *possible]
    return prompt_of(table.path.name, possible, chooser)


_ROLES = {
    "chat": {"question", "answer", "messages"},
    "label": {"label"},
    "plain": {"text"},
}


def _conversations(table: Table, image: str | None, named: set[str]) -> str:
    """Returns what a person reads of the columns of conversations; empty where there are none of their names."""
    if named & _ROLES["chat"]:
        return "columns that were named"
    if messages := columns_named(table, "messages", taken=(image or "",)):
        return f"column {messages[0].name}"
    questions = columns_named(table, "question", taken=(image or "",))
    answers = columns_named(table, "answer", taken=(image or "", questions[0].name)) if questions else []
    if answers:
        return f"columns {questions[0].name} and {answers[0].name}"
    in_rows = any(images_of_row(row) and texts_of_row(row) for row in table.rows)
    return "messages" if in_rows else ""


def _names(found: Sequence[Any], named: set[str], role: str, chooser: Chooser) -> str:
    if role in named:
        return f"column {chooser.given[f'column {role}']}"
    return f"column {found[0].name}" if found else ""


def _texts(table: Table, image: str | None, named: set[str], chooser: Chooser) -> str:
    found = text_columns(table, taken=(image or "",))
    if _conversations(table, image, named):
        found = [each for each in found if each.name in ("text", "caption")]
    return _names(found, named, "text", chooser)


def classes_of(table: Table, name: str) -> Counter[str]:
    """Returns how often each class stands in the rows that were read; a row may have a list of them."""
    return Counter(str(each) for value in table.values(name) for each in as_list(value) if each is not None)
