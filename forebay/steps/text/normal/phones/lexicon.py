"""Phones by a lexicon: a file of lines `word<TAB>phones`, phones parted by spaces."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.errors import ConfigError

Readings = Literal["refuse", "first"]

_NUMBERED = re.compile(r"(.+)\((\d+)\)")
"""A further reading of a word as the CMU dictionary writes it: `read(2)`."""
_PARTS = re.compile(r"[-‐‑/]+")


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Words with their phones. lower: words in lower case, where a text writes them otherwise than the file does."""

    words: Mapping[str, tuple[str, ...]]
    lower: Mapping[str, tuple[str, ...]]

    def phones(self, word: str) -> tuple[str, ...] | None:
        """Returns the phones of a word: as it is written, else in any case. None where the lexicon has it not."""
        return self.words.get(word) or self.lower.get(word.lower())

    def parts(self, text: str) -> list[str]:
        """Returns the words of a text, without the marks around them; of `well-known` both, where it is no entry."""
        found: list[str] = []
        for written in unicodedata.normalize("NFC", text).split():
            whole = next((form for form in (written, bare(written)) if self.phones(form)), None)
            found += [whole] if whole else [bare(part) for part in _PARTS.split(bare(written))]
        return [word for word in found if word]


def lexicon_digest(path: Path) -> str:
    """Returns the sha256 of a lexicon, 64 hex digits. Raises ConfigError where the file cannot be read."""
    return hashlib.sha256(_content(path)).hexdigest()


def read_lexicon(path: Path, *, digest: str, readings: Readings) -> Lexicon:
    """Returns the lexicon of a file. readings: what is done with a word that has several: refused, or the first one.

    A reading that stands twice is one reading. Raises ConfigError, which names file and line, where a line is no word
    with phones, where a word has two readings that are refused, and where the file is another than that of `digest`.
    """
    content = _content(path)
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ConfigError(
            f"text.phones.lexicon: {path} has digest {found[:16]}, the recipe was made with {digest[:16]}; "
            "the file changed in between: run the command again",
            code="FB118",
        )
    return _parsed(content, str(path), readings)


def bare(word: str) -> str:
    """Returns a word without the marks at its ends: a letter, digit, or mark of a letter is first and last."""
    start, stop = 0, len(word)
    while start < stop and not _is_of_word(word[start]):
        start += 1
    while stop > start and not _is_of_word(word[stop - 1]):
        stop -= 1
    return word[start:stop]


def _parsed(content: bytes, path: str, readings: Readings) -> Lexicon:
    words: dict[str, tuple[str, ...]] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        entry = _entry(line, f"{path}, line {number}")
        if entry is None:
            continue
        word, phones = entry
        first = words.setdefault(word, phones)
        line_of_first = lines.setdefault(word, number)
        if first != phones and readings == "refuse":
            raise ConfigError(
                f"text.phones.lexicon: {path} has two readings of {word!r}: line {line_of_first} says "
                f'{" ".join(first)!r}, line {number} {" ".join(phones)!r}; remove one, or set readings = "first"',
                code="FB118",
            )
    if not words:
        raise ConfigError(f"text.phones.lexicon: {path} has no words; wanted lines of word, tab, phones", code="FB118")
    lower: dict[str, tuple[str, ...]] = {}
    for word, phones in words.items():
        lower.setdefault(word.lower(), phones)
    return Lexicon(words, lower)


def _entry(line: bytes, where: str) -> tuple[str, tuple[str, ...]] | None:
    """Returns the word and the phones of a line, None for an empty line and for a comment of the CMU dictionary."""
    try:
        text = line.rstrip(b"\r").decode("utf-8")
    except UnicodeDecodeError as err:
        message = f"text.phones.lexicon: {where}: byte {err.start + 1} is not UTF-8; write the file in UTF-8"
        raise ConfigError(message, code="FB118") from err
    if not text.strip() or text.startswith(";;;"):
        return None
    word, tab, phones = text.partition("\t")
    word, parts = unicodedata.normalize("NFC", word.strip()), tuple(phones.split())
    if not tab or "\t" in phones or "\0" in text or not word or not parts:
        raise ConfigError(
            f"text.phones.lexicon: {where} is {text[:80]!r}, wanted a word, a tab, and phones parted by spaces",
            code="FB118",
        )
    numbered = _NUMBERED.fullmatch(word)
    return (numbered[1] if numbered else word), parts


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise ConfigError(f"text.phones.lexicon: cannot read {path}: {err.strerror}", code="FB118") from err


def _is_of_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LNM"
