"""What the tokens of a vocabulary are: texts, control tokens, the unknown one, bytes, pieces of characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import Array
from forebay.visible import named

Kind = Literal["text", "control", "unknown", "byte", "piece"]

KINDS: tuple[Kind, ...] = ("text", "control", "unknown", "byte", "piece")
"""`byte`: a byte that stands for itself, `<0xE2>`, because no other token has the character. `piece`: a token of a
byte-level vocabulary that is not whole characters. `unknown`: what stands for all that the vocabulary lacks."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"
"""How sentencepiece writes the space in front of a word."""


class Piece(NamedTuple):
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


class Pieces:
    """The tokens of a vocabulary by id."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        backend = vocabulary.tokenizer.backend_tokenizer
        document = json.loads(backend.to_str())
        model = document["model"]
        self._byte_of = _byte_alphabet() if _is_byte_level(document) else None
        self._has_bytes = bool(model.get("byte_fallback"))
        self._control = vocabulary.control_ids
        self._added = {int(entry["id"]) for entry in document.get("added_tokens", [])}
        self._unknown = _unknown_id(model, backend)
        self._token: dict[int, str] = {number: token for token, number in vocabulary.tokenizer.get_vocab().items()}
        codes = np.zeros(vocabulary.size, np.uint8)
        for number in self._token:
            codes[number] = KINDS.index(self.piece(number).kind)
        self.codes: Array = codes
        """uint8 [size of the vocabulary]: place of each token's kind in KINDS."""

    def piece(self, number: int) -> Piece:
        """Returns the token of an id."""
        token = self._token.get(number, f"<id {number}>")
        if number in self._control:
            return Piece("control", _utf8(token))
        if number == self._unknown:
            return Piece("unknown", _utf8(token))
        if number in self._added:
            return Piece("text", _utf8(token))
        if self._has_bytes and (match := _BYTE.fullmatch(token)):
            return Piece("byte", bytes.fromhex(match[1]))
        if self._byte_of is None:
            return Piece("text", _utf8(token.replace(_WORD_START, " ")))
        if any(character not in self._byte_of for character in token):
            return Piece("text", _utf8(token))
        data = bytes(self._byte_of[character] for character in token)
        return Piece("text" if _is_whole(data) else "piece", data)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _is_whole(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _unknown_id(model: Mapping[str, Any], backend: Any) -> int | None:
    """Returns the id of the unknown token: a Unigram model names its id, others its text."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    found = None if token is None else backend.token_to_id(token)
    return None if found is None else int(found)


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    return any(
        step.get("type") == "ByteLevel" for name in ("pre_tokenizer", "decoder") for step in _steps(document[name])
    )


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
