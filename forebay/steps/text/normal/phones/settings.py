"""What `[text] phones = {...}` may say."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

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
