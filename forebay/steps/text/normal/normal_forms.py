"""`nfkc` and `lower`: what Python's own tables of Unicode do.

`indic`: one form for letters with a nukta, the dot that makes another consonant of one (क and क़).

Source: the Unicode Standard, chapter 12, and UAX 15. A letter with a nukta can be one character (U+0958) or two (U+0915
U+093C), which look the same. NFC and NFKC write three of Devanagari's (U+0929, U+0931, U+0934) as one and all others,
composition exclusions, as two. This step writes all as two, as the IndicNLP library does.

`persian`: one form for the letters, digits and zero-width non-joiners (ZWNJ) of Persian.

Sources: ISIRI 6219 (the Iranian standard for Persian in Unicode) names the yeh U+06CC, the kaf U+06A9 and the digits
U+06F0 to U+06F9; Arabic keyboards and old code pages give U+064A, U+0649, U+0643 and U+0660 to U+0669 instead. What a
ZWNJ does follows from the joining types of its neighbours: the Unicode Standard, section 9.2, and ArabicShaping.txt.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from forebay.errors import ConfigError
from forebay.steps.text.normal.normal_step import NormalStep, Problem, Runner, Where, one_by_one, tongue


@dataclass(frozen=True, kw_only=True, slots=True)
class Nfkc(NormalStep):
    """Unicode NFKC (UAX 15); runs of white space become one space, the ends are stripped.

    White space is what `str.split` takes for it, line ends included.
    """

    name: ClassVar[str] = "nfkc"
    is_quick: ClassVar[bool] = True

    def open(self) -> Runner:
        return one_by_one(lambda text, _: " ".join(unicodedata.normalize("NFKC", text).split()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lower(NormalStep):
    """Lower case by Unicode's full mapping (`str.lower`), without regard to the language."""

    name: ClassVar[str] = "lower"
    is_quick: ClassVar[bool] = True

    def open(self) -> Runner:
        return one_by_one(lambda text, _: text.lower())


_INDIC = [chr(code) for code in range(0x0900, 0x0E00)]
"""Devanagari to Sinhala: the scripts of India in the basic plane."""
_NUKTA_CLASS = 7
"""The canonical combining class of nuktas, in every script."""
_NUKTAS = "".join(char for char in _INDIC if unicodedata.combining(char) == _NUKTA_CLASS)
_INDIC_LETTERS = "".join(char for char in _INDIC if unicodedata.category(char) == "Lo")
_INDIC_MARKS = "".join(char for char in _INDIC if unicodedata.category(char)[0] == "M" and char not in _NUKTAS)

_APART = str.maketrans(
    {char: parts for char in _INDIC if (parts := unicodedata.normalize("NFD", char)) != char and parts[-1] in _NUKTAS}
)
"""22 letters that hold a nukta, to the letter and the nukta."""

_WITH_NUKTA = re.compile(f"([{_INDIC_LETTERS}])([{_INDIC_MARKS}]*[{_NUKTAS}][{_INDIC_MARKS}{_NUKTAS}]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Indic(NormalStep):
    """One form of letters with a nukta, in the scripts of India: the letter, its one nukta, then its vowel sign.

    A nukta that was typed behind the vowel sign (`\u0921\u093e\u093c`) is put before it, where Unicode wants it, and a
    second one goes. Joiners (ZWJ, ZWNJ) stay: they change what is seen. Nothing else changes, and no other script.
    `nfkc` behind this step would join three letters of Devanagari with their nukta again: name `nfkc` first.
    """

    name: ClassVar[str] = "indic"

    def open(self) -> Runner:
        return one_by_one(lambda text, _: _WITH_NUKTA.sub(_one_nukta, text.translate(_APART)))


def _one_nukta(found: re.Match[str]) -> str:
    letter, marks = found.groups()
    nukta = next(mark for mark in marks if mark in _NUKTAS)
    return letter + nukta + "".join(mark for mark in marks if mark not in _NUKTAS)


_PERSIAN_LETTERS = str.maketrans(
    {
        "\u064a": "\u06cc",  # Arabic yeh
        "\u0649": "\u06cc",  # alef maksura, which looks like a Persian yeh at the end of a word
        "\u0643": "\u06a9",  # Arabic kaf
        **{chr(0x0660 + digit): chr(0x06F0 + digit) for digit in range(10)},
    }
)

_ZWNJ, _ZWJ = "\u200c", "\u200d"
_UNJOINED = "\u0621\u0674\u06e5\u06e6"
"""Letters of joining type U, which join nothing: hamza and three signs."""

_JOINED_ON_THE_RIGHT = (
    "\u0622\u0623\u0624\u0625\u0627\u0629\u062f\u0630\u0631\u0632\u0648\u0671\u0672\u0673\u0675\u0676\u0677\u0688\u0689"
    "\u068a\u068b\u068c\u068d\u068e\u068f\u0690\u0691\u0692\u0693\u0694\u0695\u0696\u0697\u0698\u0699\u06c0\u06c3\u06c4\u06c5\u06c6\u06c7"
    "\u06c8\u06c9\u06ca\u06cb\u06cd\u06cf\u06d2\u06d3\u06d5\u06ee\u06ef\u0759\u075a\u075b\u076b\u076c\u0771\u0773\u0774\u0778\u0779"
)
"""Letters of joining type R, which never join the next one: alef, dal, zal, reh, zain, zheh, waw and their like."""

_PERSIAN_BLOCKS = [chr(code) for code in (*range(0x0600, 0x0700), *range(0x0750, 0x0780))]
"""Arabic and its supplement."""
_ARABIC = frozenset(_PERSIAN_BLOCKS)
_JOINING = frozenset(char for char in _PERSIAN_BLOCKS if unicodedata.category(char) in ("Lo", "Lm"))
_JOINS_NEXT = _JOINING - frozenset(_JOINED_ON_THE_RIGHT + _UNJOINED)
_JOINS_LAST = _JOINING - frozenset(_UNJOINED)
_PERSIAN_MARKS = "".join(char for char in _PERSIAN_BLOCKS if unicodedata.category(char) == "Mn")
"""Vowel signs and their like, joining type T: the letters on both sides join as if no mark were there."""
_STRETCH = re.compile(f"(?<![{_PERSIAN_MARKS}{_ZWNJ}])[{_PERSIAN_MARKS}]*+{_ZWNJ}[{_PERSIAN_MARKS}{_ZWNJ}]*+")
"""All ZWNJs that stand between two characters, with the marks there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Persian(NormalStep):
    """Persian yeh, kaf and digits for Arabic ones; a ZWNJ where it is seen, and nowhere else.

    A ZWNJ stays, once, between two letters that it keeps from joining. It goes at the ends of words, beside spaces,
    signs and digits, and behind letters that never join the next one (alef, dal, reh, waw and their like): there it
    shows nothing, and one word would have two spellings. Digits 0 to 9 of ASCII, vowel signs and spacing stay as they
    are, and so do texts of a known language that is not Persian, and texts without a letter of the Arabic script.
    """

    name: ClassVar[str] = "persian"
    reads_language: ClassVar[bool] = True

    def open(self) -> Runner:
        return one_by_one(_persian)


def _persian(text: str, language: str) -> str:
    if tongue(language)[0] not in ("", "fa") or _JOINING.isdisjoint(text):
        return text
    text = text.translate(_PERSIAN_LETTERS)
    return _STRETCH.sub(_zwnj, text) if _ZWNJ in text else text


def _zwnj(found: re.Match[str]) -> str:
    """Returns the marks of a stretch, with one ZWNJ where that is seen; all as it is beside other scripts and ZWJ."""
    text, stretch = found.string, found[0]
    last, following = text[found.start() - 1 : found.start()], text[found.end() : found.end() + 1]
    if _ZWJ in (last, following) or not (_is_ours(last) and _is_ours(following)):
        return stretch
    head, _, tail = stretch.partition(_ZWNJ)
    is_seen = last in _JOINS_NEXT and following in _JOINS_LAST
    return f"{head}{_ZWNJ if is_seen else ''}{tail.replace(_ZWNJ, '')}"


def _is_ours(char: str) -> bool:
    """Says whether a ZWNJ beside this means what it means in Persian: not beside letters of other scripts than Latin.

    char: empty at the ends of a text.
    """
    return char in _ARABIC or char.isascii() or unicodedata.category(char)[0] not in "LM"


SPELLINGS = "normalizer.json"
"""The file of a Whisper tokenizer's folder that maps British spellings to American ones."""


class _OfTransformers(NormalStep):
    """A step whose results are transformers' own."""

    __slots__ = ()

    def found(self) -> Mapping[str, Any]:
        """Returns the version of transformers: no key names it."""
        return {"transformers": importlib.metadata.version("transformers")}


@dataclass(frozen=True, kw_only=True, slots=True)
class WhisperBasic(_OfTransformers):
    """transformers' `BasicTextNormalizer()`: small letters, no brackets with what is in them, no signs.

    It takes combining marks for signs, as Whisper does: the vowel signs of Hindi, Bengali, Thai and their like become
    spaces. For such languages take `nfkc` and `indic`. Twice can change more than once: `\u2110` with a dot above it.
    """

    name: ClassVar[str] = "whisper_basic"

    def open(self) -> Runner:
        """Returns what normalises texts of any language; imports transformers' normalisers."""
        from transformers.models.whisper.english_normalizer import BasicTextNormalizer

        made = BasicTextNormalizer()
        return one_by_one(lambda text, _: _normalized(made, text, self.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class WhisperEnglish(_OfTransformers):
    """transformers' `EnglishTextNormalizer`: also contractions, titles, spelled numbers and British spellings.

    Texts of a known language that is not English stay as they are: their accents would go, and their words would be
    read as English ones. `one hundred` becomes `100`, and such results can change again if they are normalised twice.
    The spellings are those of `normalizer.json` in the tokenizer's folder; their content is in the key.
    """

    name: ClassVar[str] = "whisper_english"
    reads_language: ClassVar[bool] = True

    spellings: str = ""
    """sha256 of the file of spellings."""
    path: Path = field(default=Path(SPELLINGS), compare=False)

    @classmethod
    def of(cls, spec: str, where: Where) -> WhisperEnglish:  # noqa: ARG003
        """Returns the step with the spellings of the tokenizer's folder. Raises ConfigError where it has none."""
        path = where.tokenizer / SPELLINGS
        return cls(spellings=hashlib.sha256(_read(path)).hexdigest(), path=path)

    def open(self) -> Runner:
        """Returns what normalises English texts. Raises ConfigError where the file is not the one of the key."""
        from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

        content = _read(self.path)
        if (found := hashlib.sha256(content).hexdigest()) != self.spellings:
            raise ConfigError(
                f"{self.path} has changed: its sha256 was {self.spellings[:16]} and is {found[:16]}; run it again"
            )
        made: Callable[[str], str] = EnglishTextNormalizer(_words(content, self.path))

        def write(text: str, language: str) -> str | Problem:
            return _normalized(made, text, self.name) if tongue(language)[0] in ("", "en") else text

        return one_by_one(write)


def _normalized(make: Callable[[str], str], text: str, name: str) -> str | Problem:
    """Returns what transformers makes of a text; a Problem where its code raises (it has checks of its own)."""
    try:
        return str(make(text)).strip()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as err:
        return Problem("step_failed", f"text.normalize: transformers' {name} raised {type(err).__name__}: {err!s:.200}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise ConfigError(
            f'text.normalize: "whisper_english" reads its spellings from {path}: {err.strerror}; copy the file from a '
            'published Whisper, for example openai/whisper-small, or take "whisper_basic"'
        ) from err


def _words(content: bytes, path: Path) -> dict[str, str]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f'text.normalize: "whisper_english": {path} is not JSON: {err}; restore it') from err
    if not isinstance(found, dict) or not all(isinstance(word, str) for word in found.values()):
        raise ConfigError(f'text.normalize: "whisper_english": {path} holds no table of words by words; restore it')
    return found
