"""`whisper_basic` and `whisper_english`: the normalisers of Whisper's evaluation (Radford et al. 2022, appendix C).

Both are transformers' own functions; the ends of what they give are stripped, since every sign leaves a space.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from forebay.errors import ConfigError
from forebay.steps.text.normal.normal_step import NormalStep, Problem, Runner, Where, one_by_one, tongue

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
