"""Sections of settings as TOML with comments; a text of a stranger stays a text, whatever stands in it."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import ConfigError
from forebay.visible import printable

_WIDTH = 118
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


@dataclass(slots=True)
class Section:
    """Settings of one section; the name is empty for those in front of all sections.

    lines: name, value and comment of each setting. notes: comments above them. offers: settings below them that a
    person may take, as comments. is_entry: it is an entry of a list, `[[name]]`.
    """

    name: str
    lines: list[tuple[str, Any, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    offers: list[tuple[str, Any]] = field(default_factory=list)
    is_entry: bool = False

    def add(self, name: str, value: Any, comment: str = "") -> None:
        """Adds a setting."""
        self.lines.append((name, value, comment))


def text_of(sections: Sequence[Section], *, head: Sequence[str]) -> str:
    """Returns a TOML text of some sections, with comments at its head. Raises ConfigError for what TOML cannot hold."""
    return "\n".join([*_comments(head), *(line for section in sections for line in _section(section))]) + "\n"


def document_of(sections: Sequence[Section]) -> dict[str, Any]:
    """Returns what a TOML reader has to make of the text of some sections."""
    document: dict[str, Any] = {}
    for section in sections:
        at = document
        *above, last = section.name.split(".") if section.name else [""]
        for name in above:
            at = at.setdefault(name, {})
        values = {name: value for name, value, _ in section.lines}
        if not last:
            at.update(values)
        elif section.is_entry:
            at.setdefault(last, []).append(values)
        else:
            at.setdefault(last, {}).update(values)
    return document


def _section(section: Section) -> Iterator[str]:
    if section.name:
        yield ""
        yield f"[[{section.name}]]" if section.is_entry else f"[{section.name}]"
    yield from _comments(section.notes)
    for name, value, comment in section.lines:
        yield from _line(f"{name} = {value_of(value)}", comment)
    yield from (f"# {name} = {value_of(value)}" for name, value in section.offers)


def _line(setting: str, comment: str) -> Iterator[str]:
    if not comment:
        yield setting
        return
    shown = f"# {printable(comment)}"
    width = max(44, len(setting) + 2)
    if width + len(shown) > _WIDTH:
        yield from _comments([comment])
        yield setting
    else:
        yield f"{setting:{width}}{shown}"


def _comments(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        lines = textwrap.wrap(printable(text), _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        yield from (f"# {line}" for line in lines or [""])


def python_line(code: str) -> str:
    """Returns a command that runs some Python, quoted as a person would where a shell takes that."""
    return f"python -c {shlex.quote(code)}" if set(code) & set('"$`\\!') else f'python -c "{code}"'


def value_of(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_of, value))}]"
    return str(value).lower()  # also true, 1e-05, inf and nan


def _string(text: str) -> str:
    """Returns a basic string; what a person would not see is escaped."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ConfigError(
            f"{text!r} is not UTF-8, which is all that TOML can hold; rename it, or name a link to it (ln -s)"
        ) from err
    return f'"{"".join(c if c.isprintable() and c not in _SHORT else _escaped(c) for c in text)}"'


def _escaped(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")
