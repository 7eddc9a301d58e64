"""The differences of two texts, in parts; and these parts on a terminal.

What the tokens of a vocabulary are: texts, control tokens, the unknown one, bytes, pieces of characters.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple

import numpy as np

from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import Array
from forebay.terminal import columns
from forebay.visible import named

Change = Literal["kept", "removed", "added"]
_WORD = re.compile(r"[^ ]* |[^ ]+")
"""A word with the space behind it: words put together are the text."""
_MAX_WORDS, _MAX_CHARACTERS = 1000, 400
"""The most of a difference that is looked into for equal parts: the time grows with the square. More is one change."""
_MAX_KEPT, _CONTEXT = 100, 24
_MARKS: dict[Change, tuple[str, str]] = {"kept": ("", ""), "removed": ("[-", "-]"), "added": ("{+", "+}")}


class TextPart(NamedTuple):
    """A piece of two texts: of both, of the first alone, or of the second alone."""

    change: Change
    text: str


def changes(before: str, after: str) -> list[TextPart]:
    """Returns the parts of two texts in order: those that are not added are the first, those not removed the second.

    Words are compared first, then the characters of words that differ.
    """
    return _joined(_pieces(before, after))


def _pieces(before: str, after: str) -> Iterator[TextPart]:
    """Yields the parts, some of them empty, some to be joined with the next one."""
    if before == after:
        yield TextPart("kept", before)
        return
    for removed, added in _differing(_WORD.findall(before), _WORD.findall(after), most=_MAX_WORDS):
        if removed == added:
            yield TextPart("kept", removed)
        else:
            # The same words change in many texts; long ones are not kept.
            of_characters = _known if len(removed) + len(added) <= _MAX_KEPT else _known.__wrapped__
            yield from of_characters(removed, added)


@functools.lru_cache(maxsize=1 << 16)
def _known(removed: str, added: str) -> tuple[TextPart, ...]:
    parts: list[TextPart] = []
    for old, new in _differing(removed, added, most=_MAX_CHARACTERS):
        parts += [TextPart("kept", old)] if old == new else [TextPart("removed", old), TextPart("added", new)]
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


def _joined(parts: Iterator[TextPart]) -> list[TextPart]:
    """Returns the parts without empty ones; of one run of changes what is removed comes first."""
    found: list[TextPart] = []
    pending: dict[Change, str] = {"removed": "", "added": ""}
    for part in (*(part for part in parts if part.text), TextPart("kept", "")):
        if part.change != "kept":
            pending[part.change] += part.text
            continue
        found += [TextPart(change, text) for change, text in pending.items() if text]
        pending = {"removed": "", "added": ""}
        if part.text and found and found[-1].change == "kept":
            found[-1] = TextPart("kept", found[-1].text + part.text)
        elif part.text:
            found.append(part)
    return found


class Count(NamedTuple):
    """How many characters of a text were removed and added."""

    removed: int
    added: int


def counted(before: str, after: str) -> Count:
    """Returns the characters of `changes`."""
    lengths: dict[Change, int] = {"kept": 0, "removed": 0, "added": 0}
    for change, text in _pieces(before, after):
        lengths[change] += len(text)
    return Count(lengths["removed"], lengths["added"])


def marked(parts: Sequence[TextPart]) -> str:
    """Returns the parts as one text, `[-removed-]{+added+}`, with what is not seen by its name."""
    return "".join(named(part.text).join(_MARKS[part.change]) for part in parts)


def around(parts: Sequence[TextPart]) -> list[TextPart]:
    """Returns the changes with what stands near them: of longer texts between them only both ends."""
    found = []
    for place, part in enumerate(parts):
        text = shortened(part.text, most=2 * _CONTEXT)
        if part.change == "kept" and len(part.text) > 2 * _CONTEXT:
            last = len(parts) - 1
            text = f"{part.text[:_CONTEXT] if place else ''}...{part.text[-_CONTEXT:] if place < last else ''}"
        found.append(TextPart(part.change, text))
    return found


def first_of(parts: Sequence[TextPart], most: int) -> list[TextPart]:
    """Returns the parts up to so many characters."""
    found = []
    for part in parts:
        found.append(TextPart(part.change, part.text[:most]))
        most -= len(found[-1].text)
    return [part for part in found if part.text]


def shortened(text: str, *, most: int) -> str:
    """Returns a text, or its first `most` characters and dots."""
    return text if len(text) <= most else f"{text[:most]}..."


def wrapped_parts(parts: Sequence[TextPart], width: int) -> list[list[TextPart]]:
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


def text_lines(head: str, text: str) -> list[str]:
    """Returns a text behind its head as lines of the width of the terminal, as `wrapped_parts` has them."""
    lines = wrapped_parts([TextPart("kept", text)], max(16, columns() - len(head)))
    shown = ("".join(part.text for part in line).rstrip() for line in lines)
    return [f"{' ' * len(head) if place else head}{line}" for place, line in enumerate(shown)]


def _parts(cells: Sequence[tuple[Change, str]]) -> list[TextPart]:
    return [
        TextPart(change, "".join(character for _, character in run))
        for change, run in itertools.groupby(cells, key=operator.itemgetter(0))
    ]


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


Kind = Literal["text", "control", "unknown", "byte", "piece"]
KINDS: tuple[Kind, ...] = ("text", "control", "unknown", "byte", "piece")
"""`byte`: a byte that stands for itself, `<0xE2>`, because no other token has the character. `piece`: a token of a
byte-level vocabulary that is not whole characters. `unknown`: what stands for all that the vocabulary lacks."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"
"""How sentencepiece writes the space in front of a word."""


class VocabularyPiece(NamedTuple):
    """A token. data: the bytes of UTF-8 that it stands for, of a control token those of its name."""

    kind: Kind
    data: bytes

    def shown(self) -> str:
        """Returns the token for a person: a text in quotes, a control token as it is, other bytes in hex digits."""
        try:
            text = named(self.data.decode("utf-8"))
        except UnicodeDecodeError:
            return f"bytes {self.data.hex(' ').upper()}"
        return f'"{text}"' if self.kind in ("text", "piece", "byte") else text


class VocabularyPieces:
    """The tokens of a vocabulary by id."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        backend = vocabulary.open.backend
        document = json.loads(backend.to_str())
        model = document["model"]
        steps = (step for name in ("pre_tokenizer", "decoder") for step in _steps(document[name]))
        self._byte_of = _byte_alphabet() if any(step.get("type") == "ByteLevel" for step in steps) else None
        self._has_bytes = bool(model.get("byte_fallback"))
        self._control = vocabulary.control_ids
        self._added = {int(entry["id"]) for entry in document.get("added_tokens", [])}
        self._unknown = _unknown_id(model, backend)
        self._token: dict[int, str] = {number: token for token, number in backend.get_vocab().items()}
        codes = np.zeros(vocabulary.size, np.uint8)
        for number in self._token:
            codes[number] = KINDS.index(self.piece(number).kind)
        self.codes: Array = codes
        """uint8 [size of the vocabulary]: place of each token's kind in KINDS."""

    def piece(self, number: int) -> VocabularyPiece:
        """Returns the token of an id."""
        token = self._token.get(number, f"<id {number}>")
        if number in self._control:
            return VocabularyPiece("control", _utf8(token))
        if number == self._unknown:
            return VocabularyPiece("unknown", _utf8(token))
        if number in self._added:
            return VocabularyPiece("text", _utf8(token))
        if self._has_bytes and (match := _BYTE.fullmatch(token)):
            return VocabularyPiece("byte", bytes.fromhex(match[1]))
        if self._byte_of is None:
            return VocabularyPiece("text", _utf8(token.replace(_WORD_START, " ")))
        if any(character not in self._byte_of for character in token):
            return VocabularyPiece("text", _utf8(token))
        data = bytes(self._byte_of[character] for character in token)
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            return VocabularyPiece("piece", data)
        return VocabularyPiece("text", data)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _unknown_id(model: Mapping[str, Any], backend: Any) -> int | None:
    """Returns the id of the unknown token: a Unigram model names its id, others its text."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    found = None if token is None else backend.token_to_id(token)
    return None if found is None else int(found)


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields a step of a tokenizer and those that it is a sequence of."""
    if step is not None:
        yield step
        for name in ("pretokenizers", "decoders"):
            for each in step.get(name, ()):
                yield from _steps(each)


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for.

    Bytes that are printable in Latin-1 are their own characters, the others those from U+0100 on, in order (GPT-2).
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
