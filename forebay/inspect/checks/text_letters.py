"""A text is measured: its letters' scripts, words that repeat in a row, and a hash to know it again by.

Letters that a text's language is not written with, and words that mix scripts whose letters look alike.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from forebay.inspect.checks.measured import MeasuredPart
from forebay.steps.table import STEPS
from forebay.steps.text.line import digit_share
from forebay.steps.text.script import letters_of, script_of, scripts_of
from forebay.store.layout import Ints

_TOGETHER = (frozenset({"han", "kana"}), frozenset({"han", "hangul"}), frozenset({"han", "bopomofo"}))
"""Scripts that one text is written in."""
_ALIKE = frozenset({"latin", "cyrillic", "greek"})
_WORD = re.compile(r"\w+")


def foreign_share(letters: Counter[str], language: str) -> tuple[float, str]:
    """Returns the share of letters that a text's language is not written with, and the script of most of these.

    Of a language that is not known: the letters of the second script, where the two are not written together.
    """
    total = sum(letters.values())
    scripts = scripts_of(language) if language else None
    if scripts is None:
        first = max(letters, key=lambda name: (letters[name], name), default="")
        scripts = frozenset({first}).union(*(pair for pair in _TOGETHER if first in pair))
    others = Counter({name: count for name, count in letters.items() if name not in scripts})
    if not others:
        return 0.0, ""
    return sum(others.values()) / total, max(others, key=lambda name: (others[name], name))


def mixed_word(text: str, letters: Counter[str]) -> str | None:
    """Returns the first word that mixes scripts whose letters look alike, None where there is none.

    letters: those of the text, which most often say that there is none.
    """
    if sum(name in _ALIKE for name in letters) < 2:
        return None
    for word in _WORD.findall(text):
        if len({script_of(character) for character in word} & _ALIKE) > 1:
            return str(word)
    return None


_LONGEST_LOOP = 24
"""Words, or characters of a text without spaces, that a repeated part has at most."""


class TextFacts(NamedTuple):
    """The measures of a text.

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


_STRINGS = ("script", "word")
_NUMBERS = tuple(name for name in TextFacts._fields if name not in (*_STRINGS, "hash"))
_KINDS: dict[str | None, str] = {
    **dict.fromkeys(STEPS["text"], "text"),
    **{"chat": "conversation", "label": "class", "none": "nothing", None: "nothing"},
}


def kind_of(prompt: str | None, *, lists: bool) -> str:
    """Returns what a row's text is under a prompt: `conversation`, `text`, `class` or `nothing`.

    lists: whether rows list items, beside which a text may be nothing, and of a prompt not known here is a talk.
    """
    found = _KINDS.get(prompt, "conversation" if lists else "text")
    return "text" if found == "nothing" and not lists else found


def said_of(texts: Sequence[str], languages: Sequence[str], kind: str) -> MeasuredPart:
    """Returns what is measured of texts. kind: of `kind_of`."""
    if kind == "conversation":
        talks = [conversation_facts(text) for text in texts]
        facts = {"loops": np.array([each[0] for each in talks], np.float64)}
        return MeasuredPart(facts, {"text": np.array([each[1] for each in talks], np.int64)})
    if kind != "text":
        hashes = [_hash(text) if kind == "class" else 0 for text in texts]
        return MeasuredPart({}, {"text": np.array(hashes, np.int64)})
    known = [text_facts(*each) for each in zip(texts, languages, strict=True)]
    numbers = {name: np.array([getattr(each, name) for each in known], np.float64) for name in _NUMBERS}
    strings = {name: np.array([getattr(each, name) for each in known], object) for name in _STRINGS}
    return MeasuredPart({**numbers, **strings}, {"text": np.array([each.hash for each in known], np.int64)})


def classes_in(texts: Sequence[str], *, is_multi: bool) -> list[list[str]]:
    """Returns the classes of each row by its text. is_multi: texts are JSON lists."""
    return [[str(each) for each in json.loads(text)] if is_multi else [text] for text in texts]


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
    return _hash(" ".join(words).casefold()) if words else 0


def _hash(text: str) -> int:
    return signed(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


def signed(number: int) -> int:
    """Returns an unsigned 64-bit number as int64 holds it."""
    return number - (1 << 64) if number >= 1 << 63 else number


LISTED = "listed"
"""How the name of a hash begins that is of items of other groups than images, which a conversation lists."""


def listed_hashes(hashes: Sequence[str], starts: Ints, flat: Ints) -> Ints:
    """Returns a hash of the items of each sample, int64 [samples]; 0 where it has none.

    hashes: of the items, in hex. starts, flat: those of sample i are `flat[starts[i] : starts[i + 1]]`.
    """
    of_items, made = [bytes.fromhex(name) for name in hashes], np.zeros(len(starts) - 1, np.int64)
    for row in np.flatnonzero(np.diff(starts)).tolist():
        used = flat[starts[row] : starts[row + 1]].tolist()
        made[row] = signed(xxhash.xxh3_64_intdigest(b"".join(of_items[item] for item in used)))
    return made


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
        most = max(most, int((np.diff(np.append(-1, ends)) - 1).max()) // size + 1)
    return most


def conversation_facts(text: str) -> tuple[int, int]:
    """Returns how often the assistant says the same words in a row, and a hash of who says what."""
    said = [_told(each) for each in json.loads(text)]
    return max((loops(answer.split()) for answer in answers(text)), default=1), folded_hash("\n".join(said).split())


def _told(message: Mapping[str, Any]) -> str:
    """The role and words of a message, with its tools, calls, reasoning and rejected answer: rows differ in these."""
    words = "".join(part.get("text", "\0") for part in message["content"])
    rest = [value for name, value in message.items() if name not in ("role", "content", "loss")]
    return f"{message['role']} {words} {json.dumps(rest) if rest else ''}"


def answers(conversation: str) -> Iterator[str]:
    """Yields what the assistant says in a conversation in canonical form, a text a message."""
    for message in json.loads(conversation):
        if message["role"] == "assistant":
            yield "".join(part.get("text", "") for part in message["content"])
