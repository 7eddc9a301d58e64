"""Lines of a report as a terminal of its width shows them: entries, wrapped text, tables, bars, numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forebay.visible import json_text, printable

WIDEST, NARROWEST = 100, 30
LABEL = 14
"""Where what is said of a label begins."""
_HELD = "\x00"
"""A space at which no line is broken, until it is printed."""


class CommandReport:
    """A dataclass that a command prints: its `lines`, or its fields as one document."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values; their names are an interface."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]


def columns() -> int:
    """Returns how wide a line may be: as the terminal or COLUMNS says, 30 to 100. A pipe and a file have 100."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def settings_text(settings: Mapping[str, Any]) -> str:
    """Returns settings as `name = value` pairs, without those that are None, for `wrapped`."""
    return ", ".join(
        f"{name}{_HELD}={_HELD}{printable(_value(value))}" for name, value in settings.items() if value is not None
    )


def first_of(names: Sequence[str], most: int) -> str:
    """Returns the first of some names, and how many more there are: `hi, ta and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def counted(count: int, noun: str, *, is_exact: bool = True) -> str:
    """Returns a number and what is counted, a plural: `5,210 wav files`, `1 cache`, `about 1,200,000 clips`."""
    return f"{'' if is_exact else 'about '}{count:,} {noun.removesuffix('s') if count == 1 else noun}"


def _value(value: Any) -> str:
    # A digest of 64 digits says no more to a reader than its first 16.
    if isinstance(value, str) and len(value) == 64:
        value = f"{value[:16]}..."
    return json.dumps(value, ensure_ascii=False)


def entry(name: str, text: str) -> str:
    """Returns a label and what is said of it."""
    return f"  {name:<{LABEL - 2}}{text}"


def wrapped(head: str, text: str) -> list[str]:
    """Returns a text behind its head, words never broken."""
    indent = " " * len(head)
    # Neither hyphens nor long words break: names and digests stay whole for copying.
    lines = textwrap.wrap(text, _room(head), break_long_words=False, break_on_hyphens=False)
    return [f"{head if not i else indent}{line.replace(_HELD, ' ')}" for i, line in enumerate(lines or ["none"])]


def _room(head: str) -> int:
    return max(16, columns() - len(head))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, last_left: bool = False) -> list[str]:
    """Aligned columns, the first `left` and perhaps the last to the left; in words where the terminal is narrow."""
    indented = [list(head), *([f"  {row[0]}" if left else row[0], *row[1:]] for row in rows)]
    widths = [max(len(row[column]) for row in indented) for column in range(len(head))]
    widths[0] = max(widths[0], LABEL)

    def line(row: Sequence[str]) -> str:
        cells = [
            f"{cell:<{width}}" if i < left or (last_left and i == len(row) - 1) else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    lines = [line(row) for row in indented]
    return lines if max(map(len, lines)) <= columns() else _stacked(head, rows)


def _stacked(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(row: Sequence[str]) -> list[str]:
        cells = [_HELD.join(filter(None, (name, cell))) for name, cell in zip(head[1:], row[1:], strict=True) if cell]
        return [f"  {row[0]}", *wrapped("    ", ", ".join(cells))]

    return [head[0], *(part for row in rows for part in line(row))]


def bars(counts: Sequence[int], *, beside: int) -> list[str]:
    """Returns one bar of `#` a count, up to 50, at least one of what is not zero. beside: columns in front of it."""
    top, width = max(*counts, 1, 1), max(4, min(50, columns() - beside))
    return ["#" * (max(1, round(width * n / top)) if n else 0) for n in counts]


def paragraph(head: str, text: str) -> list[str]:
    """Returns other people's text behind its head: words that are longer than a line are broken."""
    lines = textwrap.wrap(text, _room(head), break_on_hyphens=False) or [""]
    return [f"{head if not i else ' ' * len(head)}{line}".rstrip() for i, line in enumerate(lines)]


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines to standard output, each on one line whatever it holds."""
    for line in lines:
        print(printable(line))


def print_json(document: Any) -> None:
    """Prints one JSON document to standard output."""
    print(json_text(document))


def human_hours(hours: float) -> str:
    """Returns hours with as many places as tell something: `12,345.6`, `1.23`, `0.0123`."""
    if hours >= 100:
        return f"{hours:,.1f}"
    return f"{hours:.2f}" if hours >= 1 else f"{hours:.4f}"


def human_share(share: float) -> str:
    """Returns a share of 1 in percent: `12.3 %`."""
    return f"{100 * share:.1f} %"


def human_number(value: float | None) -> str:
    """Returns an integer whole, another number in four digits; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if math.isfinite(value) else str(value)
