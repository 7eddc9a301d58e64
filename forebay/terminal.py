"""Lines of a report as a terminal of its width shows them, and how far long work is.

Lines are entries, wrapped text, tables, bars, numbers. Progress stands on standard error: a bar where a person looks
on, elsewhere a plain line every 30 s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO, TypeVar

from forebay.visible import human_bytes, json_text, printable

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


T = TypeVar("T")
LINE_EVERY_S = 30.0
"""Seconds between two plain lines: a log file of a day has 3,000 of them, and nobody waits a minute for a sign."""
QUIET_S = 1.0
"""Work that is done before that many seconds shows no bar."""


class Progress:
    """Counts what is done of some work, and shows it. A context; threads share it.

    On a terminal it is tqdm's bar, with rate and time left. Elsewhere (a pipe, a log file, a job) a line of its own
    every `LINE_EVERY_S` seconds says the same, also while nothing moves.
    """

    def __init__(
        self,
        total: int | None,
        *,
        desc: str,
        unit: str = "it",
        done: int = 0,
        is_shown: bool = True,
        needs_terminal: bool = False,
        leave: bool = True,
    ) -> None:
        """total: None where nobody knows it. unit: what is counted; "B" is shown as bytes. done: counted before.

        is_shown: False counts without a word. needs_terminal: no plain lines. leave: the full bar stays where it ended.
        """
        self.total, self.desc, self.unit, self.done, self.note = total, desc, unit, done, ""
        self.under_way: Callable[[], int] = int
        """How many more are done of pieces that are counted when they are whole; for the plain lines."""
        self._first, self._started_s = done, time.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._stream: TextIO = sys.stderr
        self._leave, self._bar = leave, None
        self._thread: threading.Thread | None = None
        self._is_terminal = self._stream.isatty()
        if is_shown and total != 0 and (self._is_terminal or not needs_terminal):
            self._thread = threading.Thread(target=self._tell, name=f"progress of {desc}", daemon=True)
            self._thread.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, count: int = 1, *, is_kept: bool = False) -> None:
        """Counts so many more. is_kept: they were done before, and say nothing of the rate."""
        with self._lock:
            self.done += count
            if is_kept:
                self._first += count
            if self._bar is not None:
                if is_kept:
                    self._bar.initial += count
                self._bar.update(count)

    def say(self, note: str) -> None:
        """Shows a note behind the figures, from the next time on that they are shown."""
        with self._lock:
            self.note = note
            if self._bar is not None:
                self._bar.set_postfix_str(note, refresh=False)

    def rename(self, desc: str) -> None:
        """Gives the work another name, from the next time on that it is shown."""
        with self._lock:
            self.desc = desc
            if self._bar is not None:
                self._bar.set_description(desc, refresh=False)

    def print(self, line: str) -> None:
        """Prints a line of its own above the bar."""
        with self._lock:
            if self._bar is not None:
                self._bar.clear()
            print(line, file=self._stream)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items, counts each when the next is asked for, and ends with them."""
        with self:
            for item in items:
                yield item
                self.update()

    def close(self) -> None:
        """Ends it; again does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    @property
    def is_shown(self) -> bool:
        """Whether it shows itself now, or would if it went on for long."""
        return self._thread is not None

    def line(self) -> str:
        """Returns how far it is: `preprocess: 1,200/13,100 clips, 35.2 clips/s, 6 min left, 0.35 h`."""
        elapsed_s = time.monotonic() - self._started_s
        done = self.done + self.under_way()
        of = "" if self.total is None else f"/{self._count(self.total)}"
        parts = [f"{self._count(done)}{of}{self._units()}"] if self.total is not None or done else []
        rate = (done - self._first) / elapsed_s if elapsed_s > 0 else 0.0
        if rate > 0:
            parts.append(f"{human_bytes(rate)}/s" if self.unit == "B" else f"{rate:,.3g}{self._units()}/s")
            if self.total is not None and self.total > done:
                parts.append(f"{duration((self.total - done) / rate)} left")
        if not parts or rate == 0:
            parts.append(f"for {duration(elapsed_s)}")
        return f"{self.desc}: {', '.join([*parts, *([self.note] if self.note else [])])}"

    def _count(self, number: int) -> str:
        return human_bytes(number) if self.unit == "B" else f"{number:,}"

    def _units(self) -> str:
        return "" if self.unit == "B" else f" {self.unit}s"

    def _tell(self) -> None:
        """Draws the bar each second, so that it lives where nothing moves, or prints the plain lines."""
        every_s = QUIET_S if self._is_terminal else LINE_EVERY_S
        while not self._ended.wait(every_s):
            # A terminal or a log that went away is no reason to stop the work.
            with self._lock, contextlib.suppress(OSError, ValueError):
                if not self._is_terminal:
                    print(self.line(), file=self._stream, flush=True)
                elif self._bar is None:
                    self._bar = self._drawn()
                else:
                    self._bar.refresh()

    def _drawn(self) -> Any:
        from tqdm import tqdm

        bar = tqdm(
            total=self.total,
            initial=self._first,
            unit=self.unit,
            unit_scale=self.unit == "B",
            desc=self.desc,
            postfix=self.note or None,
            file=self._stream,
            leave=self._leave,
            dynamic_ncols=True,
            smoothing=0,  # the rate of all of it: that of the last second would be the bar's own late beginning
            delay=1e-9,  # it is drawn when it knows how much was done
            bar_format="{desc}: {elapsed}{postfix}" if self.total is None else None,
        )
        bar.start_t -= time.monotonic() - self._started_s
        bar.update(self.done - self._first)
        bar.refresh()
        return bar


def during(desc: str, *, is_shown: bool = True) -> Progress:
    """Returns the progress of work that counts nothing: it says how long it has been going on."""
    return Progress(None, desc=desc, is_shown=is_shown, leave=False)


def duration(seconds: float) -> str:
    """Returns a time for a person, two digits or so: `42 s`, `6 min`, `3.2 h`, `4.1 days`."""
    if seconds < 99.5:
        return f"{max(seconds, 0.0):.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
