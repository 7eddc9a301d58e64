"""Other people's text, as a person sees it: nothing in it moves the cursor, changes a terminal or turns text."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TextIO

_JOINERS = ("\u200c", "\u200d")
"""Zero-width (non-)joiner: part of Hindi and Persian words and of emoji."""
_WIDE_SPACE = "\u3000"
"""The space of Chinese and Japanese text."""


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Returns the end of a message with the nearest of some names; empty where none is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def printable(text: str) -> str:
    """Returns a text on one line in which every character is seen; any other is escaped, `\\x1b` for example.

    Escaped are control characters (line ends and tabs too), what turns the direction of writing round or is invisible,
    and lone surrogates, which stand for bytes that are no UTF-8. Letters of any script stay, with their marks.
    """
    if text.isprintable():
        return text
    return "".join(_shown(c, before) for before, c in zip(f" {text}", text, strict=False))


def an(noun: str) -> str:
    """Returns a noun behind `a` or `an`, as its first letters sound: `an extractor`, `a UnivNetModel`, `a list`."""
    start = noun.lower()
    is_open = start.startswith(("a", "e", "i", "o", "u")) and not start.startswith(("uni", "use", "eu", "one"))
    return f"{'an' if is_open else 'a'} {noun}"


def _shown(character: str, before: str) -> str:
    # Behind an ASCII letter a joiner joins nothing: there it would only make two names look the same.
    is_joined = character in _JOINERS and not before.isascii() and before.isprintable()
    if character.isprintable() or character == _WIDE_SPACE or is_joined:
        return character
    return character.encode("unicode_escape").decode("ascii")


_BLANK = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""What shows nothing although it counts as printable: fillers, variation selectors, the blank of Braille."""
_CONTROLS = {"\0": "NUL", "\t": "TAB", "\n": "LINE FEED", "\r": "CARRIAGE RETURN", "\x1b": "ESCAPE", "\x7f": "DELETE"}
"""Names of the characters that Unicode's own table has none for."""


def named(text: str) -> str:
    """Returns a text in which every character that is not seen stands by its name: `<ZERO WIDTH NON-JOINER>`.

    These are: what `printable` escapes, joiners, spaces other than the common one, fillers. A combining mark is named
    where there is nothing that it stands on, and where the two of them look like one other character.
    """
    if text.isascii() and text.isprintable():
        return text
    shown, before = [], ""
    for character in text:
        is_seen = _is_seen(character, before)
        shown.append(character if is_seen else f"<{_name(character)}>")
        before = character if is_seen and character != " " else ""
    return "".join(shown)


def _is_seen(character: str, before: str) -> bool:
    if unicodedata.category(character) in ("Mn", "Mc", "Me") and not _BLANK.match(character):
        return before != "" and len(unicodedata.normalize("NFC", before + character)) > 1
    return character.isprintable() and not _BLANK.match(character)


def _name(character: str) -> str:
    code = f"U+{ord(character):04X}"
    if unicodedata.category(character) == "Cs":
        return f"LONE SURROGATE {code}"
    return _CONTROLS[character] if character in _CONTROLS else str(unicodedata.name(character, code))


def printable_lines(text: str) -> str:
    """Returns a text whose lines are each as `printable` makes them."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def one_message(text: str) -> str:
    """Returns a message whose further lines are indented, so that none of them looks like a message of its own."""
    return re.sub(r"\n(?! )", "\n  ", text)


def json_text(document: Any) -> str:
    """Returns a document as indented JSON in printable ASCII; NaN and infinity, which JSON has not, are null."""
    finite = json.loads(json.dumps(document), parse_constant=lambda _: None)
    # DEL is the one control character that json.dumps leaves as it is; it can only stand in a string.
    return json.dumps(finite, indent=1).replace("\x7f", "\\u007f")


def human_bytes(size_bytes: float) -> str:
    """Returns a size in decimal units, three digits: `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB" if size_bytes < 999.5 else f"{size_bytes:,.0f} TB"


def from_here(path: str | os.PathLike[str]) -> str:
    """Returns a path as a person would write it from the current folder."""
    here, name = os.getcwd(), os.fspath(path)
    return os.path.relpath(name, here) if name.startswith(here + os.sep) else name


def quoted(text: str) -> str:
    """Returns a text as one word of bash; one that no terminal shows is written byte by byte."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(text)) + "'"


class VisibleStream:
    """A text stream that writes printable text only, in the stream's own encoding, escaped where that lacks
    a character.

    A carriage return at the beginning of what is written stays: with it a progress bar draws itself again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text made printable; returns the length of what was given."""
        start = "\r" if text.startswith("\r") else ""
        self._stream.write(self._encodable(start + printable_lines(text[len(start) :])))
        return len(text)

    def write_styled(self, text: str, style: str) -> None:
        """Writes the text made printable in a style of the terminal: `31` is red (ECMA-48, SGR)."""
        self._stream.write(f"\x1b[{style}m{self._encodable(printable(text))}\x1b[0m")

    def _encodable(self, text: str) -> str:
        encoding = self._stream.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def has_colours(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that shows colours, and nobody asked for none (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def visible_output() -> Iterator[None]:
    """Makes printable what is written to standard output and standard error within it: prints, logs, bars, warnings."""
    out: Any = VisibleStream(sys.stdout)
    err: Any = VisibleStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
