"""How phones are written: texts into clauses and marks, and their phones back into one text.

What `[text] phones = {...}` may say.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Words = Sequence[Sequence[str]]
"""The phones of every word."""
_ANYWHERE = "¿¡…—⸺‥。．、，！？；：।॥؟،؛۔՜՝՞։፡።፣፤፥፦፧၊။។៕"
_AT_THE_END = ",.;:!?"
_CLOSING = "\"'”’»›)\\]}」』）"
_MARKS = re.compile(rf"(?:[{_ANYWHERE}]|[{_AT_THE_END}]+(?=[{_AT_THE_END}{_ANYWHERE}{_CLOSING}]*(?:\s|$)))+")
"""Marks that end a clause. Those of ASCII stand inside of words and numbers too: `3.14`, `10:30`, `a.b`."""
_ENDS_WORD = re.compile(rf"[{_CLOSING}]*\s")
"""What stands behind marks that end a word too: white space, maybe behind quotes and brackets that are closed."""
_STRESS = re.compile(r"[ˈˌ]")
_ARPABET_STRESS = re.compile(r"(?<=[A-Z])[0-2]$")
_TIE = "\u0361"


@dataclass(frozen=True, slots=True)
class Clause:
    """A stretch of a text, and the marks behind it. Either may be empty.

    apart: whether white space stands between both. ends_word: whether white space stands behind the marks.
    """

    body: str
    marks: str = ""
    apart: bool = False
    ends_word: bool = False

    @property
    def spoken(self) -> str:
        """The clause as it is spoken, with its marks: `Mr.` is no `Mr`."""
        return self.body + " " * self.apart + self.marks if self.body else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """How phones are written.

    punctuation: whether the marks of clauses are kept. ties: whether the letters of one phone are tied.
    """

    separator: str
    word_separator: str
    stress: bool
    punctuation: Literal["keep", "drop"]
    ties: bool = False

    def clauses(self, text: str) -> list[Clause]:
        """Returns the parts of a text whose phones are asked for one by one: clauses where marks are kept."""
        return split(text) if self.punctuation == "keep" else [Clause(text)]

    def text(self, clauses: Sequence[Clause], words: Sequence[Words]) -> str:
        """Returns the phones of a text's clauses as one text; empty where no clause has any."""
        parts, is_spoken, glue = [], False, (self.separator, self.word_separator)
        for clause, found in zip(clauses, words, strict=True):
            spoken_words = (self.separator.join(filter(None, map(self._phone, word))) for word in found if word)
            spoken = self.word_separator.join(spoken_words)
            is_spoken |= bool(spoken)
            parts += [spoken, glue[clause.apart]] if spoken and clause.marks else [spoken]
            parts += [self.separator.join(clause.marks), glue[clause.ends_word]]
        return self._trimmed("".join(parts)) if is_spoken else ""

    def _trimmed(self, text: str) -> str:
        """Returns a text without separators at its ends."""
        for part in sorted({self.word_separator, self.separator} - {""}, key=len, reverse=True):
            while text.startswith(part):
                text = text.removeprefix(part)
            while text.endswith(part):
                text = text.removesuffix(part)
        return text

    def _phone(self, phone: str) -> str:
        if not self.stress:
            phone = _ARPABET_STRESS.sub("", _STRESS.sub("", phone))
        return tied(phone) if self.ties else phone


def split(text: str) -> list[Clause]:
    """Returns the clauses of a text in their order; together they hold every character but white space.

    Marks stand at the end of their clause. Those inside of words and numbers (`3.14`, `don't`) are no marks.
    """
    clauses, start = [], 0
    for match in _MARKS.finditer(text):
        body = text[start : match.start()]
        ends_word = _ENDS_WORD.match(text, match.end()) is not None
        clauses.append(Clause(body.strip(), match[0], apart=body[-1:].isspace(), ends_word=ends_word))
        start = match.end()
    rest = text[start:].strip()
    return [*clauses, Clause(rest)] if rest or not clauses else clauses


def tied(phone: str) -> str:
    """Returns a phone whose neighbouring letters are tied: `tʃ` becomes `t͡ʃ`. A letter written twice is a long one."""
    made = ""
    for letter in phone:
        if made and letter != made[-1] and _is_letter(letter) and _is_letter(made[-1]):
            made += _TIE
        made += letter
    return made


def _is_letter(character: str) -> bool:
    return unicodedata.category(character) in ("Ll", "Lu", "Lo")


_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "backend": ('"espeak" or "lexicon"', lambda value: value in ("espeak", "lexicon")),
    "separator": ("a string of one line", lambda value: isinstance(value, str) and value.isprintable()),
    "word_separator": ("a string of one line", lambda value: isinstance(value, str) and value.isprintable()),
    "stress": ("true or false", lambda value: isinstance(value, bool)),
    "punctuation": ('"keep" or "drop"', lambda value: value in ("keep", "drop")),
    "ties": ("true or false", lambda value: isinstance(value, bool)),
    "voice": ("the name of a voice of espeak-ng", lambda value: _is_voice(value)),
    "voices": (
        'a table of languages and voices of espeak-ng, as {en = "en-us"}',
        lambda value: isinstance(value, Mapping) and all(isinstance(k, str) and _is_voice(v) for k, v in value.items()),
    ),
    "lexicon": ("the path of a file", lambda value: isinstance(value, str) and value != ""),
    "fallback": ('"fail", "keep" or "espeak"', lambda value: value in ("fail", "keep", "espeak")),
    "readings": ('"refuse" or "first"', lambda value: value in ("refuse", "first")),
}
_OF_LEXICON = ("lexicon", "fallback", "readings")
_OF_ESPEAK = ("voice", "voices", "ties")
_VOICE = re.compile(r"[A-Za-z0-9][\w-]*(?:/[A-Za-z0-9][\w-]*)*(?:\+[\w-]+)?")
"""No path that leads out of the program's own data, and no option."""


def problems(settings: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with `text.phones`, by dotted names; reads no file and asks no program."""
    found = []
    for name, value in settings.items():
        if name not in _WANTED:
            near = difflib.get_close_matches(str(name), _WANTED, n=1)
            hint = f"did you mean text.phones.{near[0]}?" if near else f"wanted one of {', '.join(_WANTED)}"
            found.append(f"text.phones.{name}: unknown field; {hint}")
        elif not _WANTED[name][1](value):
            found.append(f"text.phones.{name}: wants {_WANTED[name][0]}, got {value!r:.200}")
    return found or _contradictions(settings)


def _contradictions(settings: Mapping[str, Any]) -> list[str]:
    backend = settings.get("backend")
    if backend is None:
        return ['text.phones.backend: missing; name "espeak" or "lexicon"']
    if backend == "lexicon" and "lexicon" not in settings:
        return ['text.phones.lexicon: missing; backend = "lexicon" needs the path of a file of word, tab, phones']
    asks_espeak = "espeak" in (backend, settings.get("fallback"))
    unused = [name for name in (_OF_LEXICON if backend == "espeak" else ()) if name in settings]
    unused += [name for name in _OF_ESPEAK if name in settings and not asks_espeak]
    owner = dict.fromkeys(_OF_LEXICON, 'backend = "lexicon"') | dict.fromkeys(_OF_ESPEAK, "espeak-ng")
    return [
        f"text.phones.{name}: only for {owner[name]}, and backend = {json.dumps(backend)}; leave it out"
        for name in unused
    ]


def _is_voice(value: Any) -> bool:
    return isinstance(value, str) and _VOICE.fullmatch(value) is not None
