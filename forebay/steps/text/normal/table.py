"""The steps of `text.normalize` by their names, one line each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.config.code import spec_problem
from forebay.steps.text.normal.phones.settings import problems as phones_problems
from forebay.steps.text.normal.step import NormalStep, Where

NORMAL = {
    "nfkc": "forebay.steps.text.normal.plain:Nfkc",
    "lower": "forebay.steps.text.normal.plain:Lower",
    "numbers": "forebay.steps.text.normal.numbers:Numbers",
    "whisper_basic": "forebay.steps.text.normal.whisper:WhisperBasic",
    "whisper_english": "forebay.steps.text.normal.whisper:WhisperEnglish",
    "persian": "forebay.steps.text.normal.persian:Persian",
    "indic": "forebay.steps.text.normal.indic:Indic",
    "phones": "forebay.steps.text.normal.phones.step:Phones",
}
"""Name -> module and class. The module is imported when the name is asked for."""

CODE = "forebay.steps.text.normal.code:Code"
"""The step of an entry `file.py:function`."""

SIMPLE = {"nfkc": ("nfkc",), "none": ()}
"""What `text.normalize` as one word stands for."""


def entries(normalize: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the entries of `text.normalize`, also where it is one word. Raises KeyError for a word of no meaning."""
    return SIMPLE[normalize] if isinstance(normalize, str) else tuple(normalize)


def normal_step(entry: str) -> type[NormalStep]:
    """Returns the class of an entry. Raises KeyError for a name that is not in the table."""
    module, _, name = (CODE if is_code(entry) else NORMAL[entry]).partition(":")
    found: type[NormalStep] = getattr(importlib.import_module(module), name)
    return found


def is_code(entry: str) -> bool:
    """Whether an entry names a function of the user."""
    return ":" in entry


def code_in(settings: Mapping[str, Any]) -> list[str]:
    """Returns the entries of `text.normalize` that name functions of the user."""
    normalize = settings.get("normalize", "nfkc")
    return [] if isinstance(normalize, str) else [entry for entry in normalize if is_code(entry)]


def made_steps(normalize: str | Sequence[str], where: Where) -> tuple[NormalStep, ...]:
    """Returns the steps of `text.normalize`. Raises ConfigError as their `of` do."""
    return tuple(normal_step(entry).of(entry, where) for entry in entries(normalize))


def problems_of(settings: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with `text.normalize` and `text.phones`, without reading a file."""
    normalize, phones = settings.get("normalize", "nfkc"), settings.get("phones")
    if not isinstance(normalize, (list, tuple)) or not all(isinstance(entry, str) for entry in normalize):
        normalize = ()
    found = [_unknown(entry) for entry in normalize if not is_code(entry) and entry not in NORMAL]
    found += [
        f"text.normalize: {problem}" for entry in normalize if is_code(entry) and (problem := spec_problem(entry))
    ]
    twice = {entry for entry in normalize if list(normalize).count(entry) > 1}
    found += [f'text.normalize: "{entry}" stands twice; name it once' for entry in sorted(twice)]
    if {"nfkc", "indic"} <= {*normalize} and list(normalize).index("indic") < list(normalize).index("nfkc"):
        found.append('text.normalize: "nfkc" behind "indic" joins letters with their nukta again; put "nfkc" first')
    if ("phones" in normalize) != (phones is not None):
        given = "text.phones is given" if phones is not None else 'text.normalize has "phones"'
        found.append(f'{given}; both are needed: normalize = [..., "phones"] and phones = {{backend = "espeak"}}')
    return [*found, *(phones_problems(phones) if isinstance(phones, Mapping) else [])]


def _unknown(entry: str) -> str:
    import difflib
    import json

    near = difflib.get_close_matches(entry, NORMAL, n=1)
    hint = f"did you mean {json.dumps(near[0])}? " if near else ""
    return (
        f"text.normalize: unknown step {json.dumps(entry)}; {hint}wanted names of {', '.join(NORMAL)}, or "
        '"file.py:function"'
    )
