"""Explanations of codes, reasons and symptoms for a terminal: the entries of the package's forebay/errors.md."""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from forebay import errors
from forebay.errors import ConfigError
from forebay.terminal import columns

PAGE = "errors.md"
Kind = Literal["code", "reason", "symptom"]
_CODE = re.compile(r"^### (FB\d{3}): (.+)$", re.MULTILINE)
_ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)
_CELLS = re.compile(r"(?<!\\) \| ")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that the page explains. text: its paragraphs, in plain text without line breaks."""

    kind: Kind
    name: str
    title: str
    text: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The entries found for a topic. is_list: names and titles are asked for, not the texts."""

    entries: tuple[Entry, ...]
    is_list: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document: one object an entry."""
        return {
            "entries": [{"kind": e.kind, "name": e.name, "title": e.title, "text": [*e.text]} for e in self.entries]
        }

    def lines(self) -> list[str]:
        """Returns the lines for a terminal, as wide as it is."""
        width = columns()
        if self.is_list:
            return [line for entry in self.entries for line in _listed(entry, width)]
        blocks = [_told(entry, width) for entry in self.entries]
        return [line for number, block in enumerate(blocks) for line in ([""] if number else []) + block]


def explained(topic: str) -> Explanation:
    """Returns what the page says of a code, a reason, the class of an error, or words; of "" the list of all codes.

    Raises ConfigError, with the nearest name, where nothing is found.
    """
    known = entries()
    if not topic.strip():
        return Explanation(entries=tuple(e for e in known if e.kind != "symptom"), is_list=True)
    wanted = _names(topic)
    if exact := [entry for entry in known if entry.name.lower() in wanted and entry.kind != "symptom"]:
        return Explanation(entries=tuple(exact))
    words = [word.lower() for word in re.findall(r"[\w%.]+", topic)]
    if hits := [entry for entry in known if words and _holds(entry, words)]:
        return Explanation(entries=tuple(hits), is_list=len(hits) > 3)
    names = [entry.name for entry in known if entry.kind != "symptom"] + [*_classes()]
    near = difflib.get_close_matches(topic, names, n=1, cutoff=0.5) or difflib.get_close_matches(
        topic.upper(), names, n=1, cutoff=0.5
    )
    advice = f"the nearest is {near[0]}; " if near else ""
    raise ConfigError(f"{topic[:80]}: no code, reason or words of this page; {advice}all codes: forebay explain")


@cache
def entries() -> tuple[Entry, ...]:
    """Returns all entries of the page that the package holds, in its order."""
    return tuple(parsed(files("forebay").joinpath(PAGE).read_text(encoding="utf-8")))


def parsed(page: str) -> Iterator[Entry]:
    """Yields the entries of a page: rows of its symptoms, codes under their headings, rows of its reasons."""
    symptoms, rest = page.split("\n## Symptoms\n")[1].split("\n## ", 1)
    codes, reasons = rest.split("\n## Reasons", 1)
    for symptom, normal, cause, do in _rows(symptoms):
        told = (f"Normal: {normal}", f"Likely cause: {cause}", f"Do: {do}")
        yield Entry(kind="symptom", name="", title=symptom, text=told)
    for section in re.split(r"^## ", codes, flags=re.MULTILINE):
        parts = _CODE.split(section)
        for name, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            paragraphs = (_plain(" ".join(part.split())) for part in text.split("\n\n") if part.strip())
            yield Entry(kind="code", name=name, title=_plain(title), text=tuple(paragraphs))
    for name, means, do in _rows(reasons):
        yield Entry(kind="reason", name=name, title=means, text=(f"Do: {do}",))


def _rows(text: str) -> Iterator[list[str]]:
    for row in _ROW.findall(text):
        cells = [_plain(cell.strip()) for cell in _CELLS.split(row)]
        if cells[0] not in ("symptom", "reason") and set(cells[0]) != set("---|"):
            yield cells


def _plain(text: str) -> str:
    """Returns a line of the page without its marks."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text.replace("\\|", "|"))
    text = re.sub(r"`([^` ]+)`", r"\1", text)  # what holds a space, most often a command, keeps its marks
    return re.sub(r"(?<!\w)\*+(?=\w)|(?<=\w)\*+(?!\w)", "", text)


def _names(topic: str) -> set[str]:
    """Returns the names that a topic may stand for: itself, a code by its number alone, the code of a class."""
    name = topic.strip().strip("[]():.,'\"").removeprefix("forebay.errors.")
    code = f"fb{name}" if re.fullmatch(r"\d{3}", name) else name.lower()
    of_class = {key.lower(): value for key, value in _classes().items()}.get(name.lower())
    return {code} | ({of_class.lower()} if of_class else set())


def _classes() -> dict[str, str]:
    found = inspect.getmembers(errors, lambda kind: inspect.isclass(kind) and issubclass(kind, errors.ForebayError))
    return {name: kind.code for name, kind in found}


def _holds(entry: Entry, words: Sequence[str]) -> bool:
    whole = " ".join((entry.name, entry.title, *entry.text)).lower()
    return all(re.search(rf"\b{re.escape(word)}", whole) for word in words)


def _listed(entry: Entry, width: int) -> list[str]:
    label = f"{entry.name or 'symptom'}  "
    return _wrapped(entry.title, width, first=label, then=" " * min(len(label), 8))


def _told(entry: Entry, width: int) -> list[str]:
    lines = _wrapped(entry.title, width, first=f"{entry.name}: " if entry.name else "", then="  ")
    for paragraph in entry.text:
        lines += ["", *_wrapped(paragraph, width, first="  ", then="  ")]
    return lines


def _wrapped(text: str, width: int, *, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
