"""`indic`: one form for letters with a nukta, the dot that makes another consonant of one (क and क़).

Source: the Unicode Standard, chapter 12, and UAX 15. A letter with a nukta can be one character (U+0958) or two (U+0915
U+093C), which look the same. NFC and NFKC write three of Devanagari's (U+0929, U+0931, U+0934) as one and all others,
composition exclusions, as two. This step writes all as two, as the IndicNLP library does.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forebay.steps.text.normal.step import NormalStep, Problem, Runner

_BLOCKS = [chr(code) for code in range(0x0900, 0x0E00)]
"""Devanagari to Sinhala: the scripts of India in the basic plane."""

_NUKTA_CLASS = 7
"""The canonical combining class of nuktas, in every script."""

_NUKTAS = "".join(char for char in _BLOCKS if unicodedata.combining(char) == _NUKTA_CLASS)
_LETTERS = "".join(char for char in _BLOCKS if unicodedata.category(char) == "Lo")
_MARKS = "".join(char for char in _BLOCKS if unicodedata.category(char)[0] == "M" and char not in _NUKTAS)

_APART = str.maketrans(
    {char: parts for char in _BLOCKS if (parts := unicodedata.normalize("NFD", char)) != char and parts[-1] in _NUKTAS}
)
"""22 letters that hold a nukta, to the letter and the nukta."""

_WITH_NUKTA = re.compile(f"([{_LETTERS}])([{_MARKS}]*[{_NUKTAS}][{_MARKS}{_NUKTAS}]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Indic(NormalStep):
    """One form of letters with a nukta, in the scripts of India: the letter, its one nukta, then its vowel sign.

    A nukta that was typed behind the vowel sign (`\u0921\u093e\u093c`) is put before it, where Unicode wants it, and a
    second one goes. Joiners (ZWJ, ZWNJ) stay: they change what is seen. Nothing else changes, and no other script.
    `nfkc` behind this step would join three letters of Devanagari with their nukta again: name `nfkc` first.
    """

    name: ClassVar[str] = "indic"

    def open(self) -> Runner:
        """Returns what writes nuktas in one form."""
        return _indic


def _indic(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:  # noqa: ARG001
    return [_WITH_NUKTA.sub(_one_nukta, text.translate(_APART)) for text in texts]


def _one_nukta(found: re.Match[str]) -> str:
    letter, marks = found.groups()
    nukta = next(mark for mark in marks if mark in _NUKTAS)
    return letter + nukta + "".join(mark for mark in marks if mark not in _NUKTAS)
