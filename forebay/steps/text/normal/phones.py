"""`phones`: the step that writes texts as phones.

Phones by a lexicon: a file of lines `word<TAB>phones`, phones parted by spaces.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from forebay.errors import ConfigError
from forebay.steps.text.normal.espeak import Espeak, Voices, all_words
from forebay.steps.text.normal.normal_step import NormalStep, Problem, Runner, Where
from forebay.steps.text.normal.written_phones import Clause, Words, Writing

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


Speak = Callable[[Sequence[str], Sequence[str]], "list[Words | Problem]"]
"""(stretches of text, languages) -> the phones of each, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phones(NormalStep):
    """Texts as phones of the language that they are in. The fields are those of `text.phones`.

    separator: between the phones of a word. word_separator: between words. stress: whether marks of stress are kept.
    punctuation: "keep" writes the marks at which a clause ends, each as a phone of its own.
    """

    name: ClassVar[str] = "phones"
    reads_language: ClassVar[bool] = True
    of_prompts: ClassVar[bool] = False

    separator: str = " "
    word_separator: str = " | "
    stress: bool = True
    punctuation: Literal["keep", "drop"] = "drop"

    @classmethod
    def of(cls, spec: str, where: Where) -> Phones:  # noqa: ARG003
        """Returns the step of `text.phones`: reads the lexicon for its digest, asks no program."""
        settings = dict(where.phones or {})
        if settings.pop("backend", None) == "lexicon":
            return LexiconPhones.of_settings(settings, where.folder)
        return EspeakPhones(**_plain(settings))


@dataclass(frozen=True, kw_only=True, slots=True)
class EspeakPhones(Phones):
    """Phones by the program espeak-ng, in the letters of the IPA.

    voices: pairs of a language and the voice that speaks it; other languages have the program's own voice for their
    code. voice: of texts whose language is not known. ties: whether the letters of one phone are tied (`t͡ʃ`).
    """

    voices: tuple[tuple[str, str], ...] = ()
    voice: str = ""
    ties: bool = False

    def open(self) -> Runner:
        """Returns what asks the program. Raises ConfigError where it is not there, or lacks a voice."""
        program = Espeak()
        return _runner(self.writing, spoken_by(program, program.voices(dict(self.voices), self.voice)))

    @property
    def writing(self) -> Writing:
        """How the phones are written."""
        return Writing(**{each.name: getattr(self, each.name) for each in fields(Writing)})

    def found(self) -> Mapping[str, Any]:
        return {"espeak": Espeak().found()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LexiconPhones(EspeakPhones):
    """Phones by a lexicon. lexicon: the digest of the file at `path`.

    fallback: what becomes of a word that the lexicon has not: the text fails, the word is kept as it is written, or
    espeak-ng speaks it. readings: what becomes of a lexicon that gives a word twice.
    """

    lexicon: str
    fallback: Literal["fail", "keep", "espeak"] = "fail"
    readings: Readings = "refuse"
    path: Path = field(compare=False)

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], folder: Path) -> LexiconPhones:
        """Returns the step of settings. folder: of the config, from which a relative path leads to the lexicon."""
        plain = _plain(settings)
        path = folder / plain.pop("lexicon")
        return cls(**plain, lexicon=lexicon_digest(path), path=path)

    def open(self) -> Runner:
        """Returns what looks words up. Raises ConfigError where the lexicon, or the program, cannot be used."""
        lexicon = read_lexicon(self.path, digest=self.lexicon, readings=self.readings)
        program = Espeak() if self.fallback == "espeak" else None
        asked = None if program is None else spoken_by(program, program.voices(dict(self.voices), self.voice))
        return _runner(self.writing, _looked_up(lexicon, keep=self.fallback == "keep", others=asked))

    def found(self) -> Mapping[str, Any]:
        """Returns the digest of the program, where words are left to it."""
        return {"espeak": Espeak().found()} if self.fallback == "espeak" else {}


def spoken_by(program: Espeak, voices: Voices) -> Speak:
    """Returns what asks the program for phones, a batch a voice."""

    def speak(texts: Sequence[str], languages: Sequence[str]) -> list[Words | Problem]:
        chosen = {language: _usable(program, voices.of(language), language) for language in set(languages)}
        said = [chosen[language] for language in languages]
        results: list[Words | Problem] = [voice if isinstance(voice, Problem) else () for voice in said]
        for voice in dict.fromkeys(voice for voice in chosen.values() if isinstance(voice, str)):
            mine = [i for i, found in enumerate(said) if found == voice]
            for i, words in zip(mine, program.speak([texts[i] for i in mine], voice), strict=True):
                results[i] = words
        return results

    return speak


def _usable(program: Espeak, voice: str | Problem, language: str) -> str | Problem:
    if isinstance(voice, Problem) or program.has(voice):
        return voice
    return Problem("unknown_language", f"espeak-ng cannot speak {language!r} (voice {voice}); name another in voices")


def _looked_up(lexicon: Lexicon, *, keep: bool, others: Speak | None) -> Speak:
    """Returns what looks words up. keep: words that are missing are written as they are. others: speaks them."""

    def speak(texts: Sequence[str], languages: Sequence[str]) -> list[Words | Problem]:
        words = [lexicon.parts(text) for text in texts]
        pairs = [[(word, language) for word in found] for found, language in zip(words, languages, strict=True)]
        different = dict.fromkeys(pair for found in pairs for pair in found)
        made: dict[tuple[str, str], Words | Problem] = {
            (word, language): [phones] for word, language in different if (phones := lexicon.phones(word))
        }
        made |= _missing([pair for pair in different if pair not in made], keep=keep, others=others)
        return [all_words([made[pair] for pair in found]) for found in pairs]

    return speak


def _missing(
    pairs: Sequence[tuple[str, str]], *, keep: bool, others: Speak | None
) -> dict[tuple[str, str], Words | Problem]:
    """Returns what becomes of words that the lexicon has not."""
    if others is not None:
        made = others([word for word, _ in pairs], [language for _, language in pairs])
        return dict(zip(pairs, made, strict=True))
    if keep:
        return {(word, language): [(word,)] for word, language in pairs}
    message = 'the lexicon has no {!r}; add it, or set fallback = "keep" or "espeak" in text.phones'
    return {pair: Problem("unknown_word", message.format(pair[0])) for pair in pairs}


def _runner(writing: Writing, speak: Speak) -> Runner:
    """Returns the step's work: clauses of texts go to `speak`, and their phones are written."""

    def run(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
        clauses = [writing.clauses(text) for text in texts]
        pairs = [(c.spoken, language) for of, language in zip(clauses, languages, strict=True) for c in of]
        found = iter(speak([spoken for spoken, _ in pairs], [language for _, language in pairs]))
        return [_written(text, writing, of, [next(found) for _ in of]) for text, of in zip(texts, clauses, strict=True)]

    return run


def _written(text: str, writing: Writing, clauses: Sequence[Clause], found: Sequence[Words | Problem]) -> str | Problem:
    words = [part for part in found if not isinstance(part, Problem)]
    if len(words) < len(found):
        return next(part for part in found if isinstance(part, Problem))
    return writing.text(clauses, words) or Problem("no_phones", f"nothing of {text[:80]!r} is spoken")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as the step has them: a table of voices as pairs in the order of their languages."""
    voices = tuple(sorted(settings.get("voices", {}).items()))
    return {**settings, **({"voices": voices} if voices else {})}
