"""What differs between two texts, in parts; and these parts on a terminal."""

from __future__ import annotations

import functools
import itertools
import operator
import re
import unicodedata
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

from forebay.visible import named

Change = Literal["kept", "removed", "added"]

_WORD = re.compile(r"[^ ]* |[^ ]+")
"""A word with the space behind it: words put together are the text."""

_MAX_WORDS, _MAX_CHARACTERS = 1000, 400
"""Of what differs, looked into for what is the same: the time grows with the square. More is one change."""

_MAX_KEPT = 100

_MARKS: dict[Change, tuple[str, str]] = {"kept": ("", ""), "removed": ("[-", "-]"), "added": ("{+", "+}")}


class Part(NamedTuple):
    """A piece of two texts: of both, of the first alone, or of the second alone."""

    change: Change
    text: str


def changes(before: str, after: str) -> list[Part]:
    """Returns the parts of two texts in order: those that are not added are the first, those not removed the second.

    Words are compared first, then the characters of words that differ.
    """
    if before == after:
        return _joined([Part("kept", before)])
    parts: list[Part] = []
    for removed, added in _differing(_WORD.findall(before), _WORD.findall(after), most=_MAX_WORDS):
        if removed == added:
            parts.append(Part("kept", removed))
        else:
            parts += _of_characters(removed, added)
    return _joined(parts)


def _of_characters(removed: str, added: str) -> tuple[Part, ...]:
    # The same words change in many texts; long ones are not kept.
    is_short = len(removed) + len(added) <= _MAX_KEPT
    return _known(removed, added) if is_short else _known.__wrapped__(removed, added)


@functools.lru_cache(maxsize=1 << 16)
def _known(removed: str, added: str) -> tuple[Part, ...]:
    parts: list[Part] = []
    for old, new in _differing(removed, added, most=_MAX_CHARACTERS):
        parts += [Part("kept", old)] if old == new else [Part("removed", old), Part("added", new)]
    return tuple(parts)


def _differing(before: Sequence[str], after: Sequence[str], *, most: int) -> Iterator[tuple[str, str]]:
    """Yields what stands in one place of both, as texts; equal where both have it."""
    start, shorter = 0, min(len(before), len(after))
    while start < shorter and before[start] == after[start]:
        start += 1
    end = 0
    while end < shorter - start and before[-1 - end] == after[-1 - end]:
        end += 1
    yield "".join(before[:start]), "".join(after[:start])
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    if max(len(old), len(new)) > most:
        yield "".join(old), "".join(new)
    else:
        for _, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            yield "".join(old[a:b]), "".join(new[c:d])
    yield "".join(before[len(before) - end :]), "".join(after[len(after) - end :])


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts without empty ones; of one run of changes what is removed comes first."""
    found: list[Part] = []
    pending: dict[Change, str] = {"removed": "", "added": ""}
    for part in (*(part for part in parts if part.text), Part("kept", "")):
        if part.change != "kept":
            pending[part.change] += part.text
            continue
        found += [Part(change, text) for change, text in pending.items() if text]
        pending = {"removed": "", "added": ""}
        if part.text and found and found[-1].change == "kept":
            found[-1] = Part("kept", found[-1].text + part.text)
        elif part.text:
            found.append(part)
    return found


class Count(NamedTuple):
    """How many characters of a text were removed and added."""

    removed: int
    added: int


def counted(before: str, after: str) -> Count:
    """Returns the characters of `changes`."""
    if before == after:
        return Count(0, 0)
    parts = changes(before, after)
    removed, added = (sum(len(part.text) for part in parts if part.change == name) for name in ("removed", "added"))
    return Count(removed, added)


def marked(parts: Sequence[Part]) -> str:
    """Returns the parts as one text, `[-removed-]{+added+}`, with what is not seen by its name."""
    return "".join(named(part.text).join(_MARKS[part.change]) for part in parts)


def around(parts: Sequence[Part], *, context: int = 24) -> list[Part]:
    """Returns the changes with what stands near them: of longer texts between them only both ends."""
    last = len(parts) - 1
    found = []
    for place, part in enumerate(parts):
        text = shortened(part.text, most=2 * context)
        if part.change == "kept" and len(part.text) > 2 * context:
            text = f"{part.text[:context] if place else ''}...{part.text[-context:] if place < last else ''}"
        found.append(Part(part.change, text))
    return found


def first_of(parts: Sequence[Part], most: int) -> list[Part]:
    """Returns the parts up to so many characters."""
    found = []
    for part in parts:
        found.append(Part(part.change, part.text[:most]))
        most -= len(found[-1].text)
    return [part for part in found if part.text]


def shortened(text: str, *, most: int) -> str:
    """Returns a text, or its first `most` characters and dots."""
    return text if len(text) <= most else f"{text[:most]}..."


def wrapped_parts(parts: Sequence[Part], width: int) -> list[list[Part]]:
    """Returns the parts as lines of no more than `width` columns: broken behind a space where there is one.

    Nothing is left out. Wide characters take two columns, those that stand on others none.
    """
    cells = [(part.change, character) for part in parts for character in part.text]
    lines, start, used, space = [], 0, 0, 0
    for place, (_, character) in enumerate(cells):
        used += _columns(character)
        if used > width and place > start:
            stop = space if space > start else place
            lines.append(cells[start:stop])
            start, used = stop, sum(_columns(cell) for _, cell in cells[stop : place + 1])
        if character == " ":
            space = place + 1
    return [_parts(line) for line in (*lines, cells[start:])]


def _parts(cells: Sequence[tuple[Change, str]]) -> list[Part]:
    return [
        Part(change, "".join(character for _, character in run))
        for change, run in itertools.groupby(cells, key=operator.itemgetter(0))
    ]


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
