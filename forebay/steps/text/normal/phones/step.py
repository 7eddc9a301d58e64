"""`phones`: the step that writes texts as phones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from forebay.steps.text.normal.phones.espeak import Espeak, Voices
from forebay.steps.text.normal.phones.lexicon import Lexicon, Readings, lexicon_digest, read_lexicon
from forebay.steps.text.normal.phones.written import Clause, Words, Writing
from forebay.steps.text.normal.step import NormalStep, Problem, Runner, Where

Speak = Callable[[Sequence[str], Sequence[str]], "list[Words | Problem]"]
"""(stretches of text, languages) -> the phones of each, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phones(NormalStep):
    """Texts as phones of the language that they are in. The fields are those of `text.phones`.

    separator: between the phones of a word. word_separator: between words. stress: whether marks of stress are kept.
    punctuation: "keep" writes the marks at which a clause ends, each as a phone of its own.
    """

    name: ClassVar[str] = "phones"
    is_idempotent: ClassVar[bool] = False
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

    @property
    def writing(self) -> Writing:
        """How the phones are written."""
        return Writing(
            separator=self.separator,
            word_separator=self.word_separator,
            stress=self.stress,
            punctuation=self.punctuation,
        )


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
        speak = spoken_by(program, program.voices(dict(self.voices), self.voice))
        return _runner(self.writing_of_ties(), speak)

    def writing_of_ties(self) -> Writing:
        """How the phones are written, ties among it."""
        return replace(self.writing, ties=self.ties)

    def found(self) -> Mapping[str, Any]:
        """Returns the digest of the program and its data."""
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
        speak = _looked_up(lexicon, keep=self.fallback == "keep", others=asked)
        return _runner(self.writing_of_ties(), speak)

    def found(self) -> Mapping[str, Any]:
        """Returns the digest of the program, where words are left to it."""
        return {"espeak": Espeak().found()} if self.fallback == "espeak" else {}


def spoken_by(program: Espeak, voices: Voices) -> Speak:
    """Returns what asks the program for phones, a batch a voice."""

    def speak(texts: Sequence[str], languages: Sequence[str]) -> list[Words | Problem]:
        chosen = {language: _usable(program, voices.of(language), language) for language in set(languages)}
        results: list[Words | Problem] = [_problem(chosen[language]) for language in languages]
        for voice in dict.fromkeys(voice for voice in chosen.values() if isinstance(voice, str)):
            mine = [i for i, language in enumerate(languages) if chosen[language] == voice]
            for i, found in zip(mine, program.speak([texts[i] for i in mine], voice), strict=True):
                results[i] = found
        return results

    return speak


def _usable(program: Espeak, voice: str | Problem, language: str) -> str | Problem:
    if isinstance(voice, Problem) or program.has(voice):
        return voice
    return Problem("unknown_language", f"espeak-ng cannot speak {language!r} (voice {voice}); name another in voices")


def _problem(voice: str | Problem) -> Words | Problem:
    return voice if isinstance(voice, Problem) else ()


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
        return [_all_phones([made[pair] for pair in found]) for found in pairs]

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


def _all_phones(found: Sequence[Words | Problem]) -> Words | Problem:
    problem = next((part for part in found if isinstance(part, Problem)), None)
    return problem or [word for part in found if not isinstance(part, Problem) for word in part]


def _runner(writing: Writing, speak: Speak) -> Runner:
    """Returns the step's work: clauses of texts go to `speak`, and their phones are written."""

    def run(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
        clauses = [writing.clauses(text) for text in texts]
        pairs = [(c.spoken, language) for of, language in zip(clauses, languages, strict=True) for c in of]
        found = iter(speak([spoken for spoken, _ in pairs], [language for _, language in pairs]))
        return [_written(text, writing, of, [next(found) for _ in of]) for text, of in zip(texts, clauses, strict=True)]

    return run


def _written(text: str, writing: Writing, clauses: Sequence[Clause], found: Sequence[Words | Problem]) -> str | Problem:
    problem = next((part for part in found if isinstance(part, Problem)), None)
    if problem is not None:
        return problem
    made = writing.text(clauses, [part for part in found if not isinstance(part, Problem)])
    return made or Problem("no_phones", f"nothing of {text[:80]!r} is spoken")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as the step has them: a table of voices as pairs in the order of their languages."""
    voices = tuple(sorted(settings.get("voices", {}).items()))
    return {**settings, **({"voices": voices} if voices else {})}
