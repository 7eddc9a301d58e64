"""What is measured of a text: its letters' scripts, words that repeat in a row, and a hash to know it again by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from forebay.lint.script import foreign_share, mixed_word
from forebay.steps.text.annotation import digit_share
from forebay.steps.text.language.script import letters_of, scripts_of

_LONGEST_LOOP = 24
"""Words, or characters of a text without spaces, that a repeated part has at most."""


class TextFacts(NamedTuple):
    """What a text is like.

    chars: without white space. letters: of any script. foreign: share of letters that its language is not written with.
    script: of most of these. is_known: whether the language is in the table. word: one that mixes scripts, or "".
    loops: how often the same words stand in a row. breaks: tabs and ends of lines inside. digits: share of chars.
    hash: xxh3-64 of the words without their case, 0 where there are none.
    """

    chars: int
    letters: int
    foreign: float
    script: str
    is_known: bool
    word: str
    loops: int
    breaks: int
    digits: float
    hash: int


def text_facts(text: str, language: str) -> TextFacts:
    """Returns what a text is like. language: its code, "" where none is known."""
    words = text.split()
    chars = sum(map(len, words))
    letters = letters_of(text)
    foreign, script = foreign_share(letters, language) if letters else (0.0, "")
    return TextFacts(
        chars=chars,
        letters=sum(letters.values()),
        foreign=foreign,
        script=script,
        is_known=bool(language) and scripts_of(language) is not None,
        word=mixed_word(text, letters) or "",
        loops=loops(words),
        breaks=sum(text.strip().count(each) for each in "\t\n"),
        digits=digit_share(text),
        hash=folded_hash(words),
    )


def folded_hash(words: list[str]) -> int:
    """Returns the xxh3-64 of words without their case, as a signed number; 0 where there are none."""
    return signed(xxhash.xxh3_64_intdigest(" ".join(words).casefold().encode("utf-8", "surrogatepass"))) if words else 0


def signed(number: int) -> int:
    """Returns an unsigned 64-bit number as int64 holds it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def loops(words: list[str]) -> int:
    """Returns how often the same words stand in a row, at most; 1 where none repeats.

    A text without spaces is taken by its characters, of which two or more have to repeat.
    """
    # A word counts as often as it stands in a row, one character of many does not: "aaaa" is a cry.
    parts, shortest = (words, 1) if len(words) > 2 else (list("".join(words)), 2)
    if len(set(parts)) == len(parts):
        return 1
    numbers = np.unique(parts, return_inverse=True)[1].reshape(-1)
    most = 1
    for size in range(shortest, min(_LONGEST_LOOP, len(parts) // 2) + 1):
        ends = np.flatnonzero(np.append(numbers[size:] != numbers[:-size], True))
        run = int((np.diff(np.append(-1, ends)) - 1).max())
        most = max(most, run // size + 1)
    return most


def answers(conversation: str) -> Iterator[str]:
    """Yields what the assistant says in a conversation in canonical form, a text a message."""
    for message in json.loads(conversation):
        if message["role"] == "assistant":
            yield "".join(part.get("text", "") for part in message["content"])
