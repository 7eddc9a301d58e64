"""Figures of this machine as people read them: shares, times, cells of tables, and the frame of a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import MissingExtraError
from forebay.inspect.picture import write_figure
from forebay.store.files import write_bytes
from forebay.terminal import duration
from forebay.visible import from_here, human_bytes, json_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, OTHERS = "#c2410c", ("#52606d", "#2b6cb0", "#9aa5b1", "#2f855a", "#805ad5")
"""Colours of the first way, or run, and of those beside it."""
TableRow = tuple[str, str] | tuple[str, str, str] | tuple[str, str, str, float]
"""A row of a table: label, name of the figure, its form (`bytes`, or one of `str.format`), and a factor."""


def percent(share: float) -> str:
    """Returns a share as a person reads it."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def ms_text(ms: float) -> str:
    """Returns milliseconds with their unit."""
    return f"{short_number(ms)} ms"


def short_number(value: float) -> str:
    """Returns a number in three digits, from 1000 on whole."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def duration_text(seconds: float) -> str:
    """Returns a time that was measured, in three digits below 100 s."""
    if seconds < 1:
        return ms_text(1e3 * seconds)
    return f"{seconds:.3g} s" if seconds < 99.5 else duration(seconds)


def cells(rows: Sequence[TableRow], columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the cells of rows, one a column behind the label: `-` for None, quartiles in brackets."""
    return [[row[0], *(_cell(column[row[1]], *row[2:]) for column in columns)] for row in rows]


def _cell(value: Any, form: str = "{:.0f}", factor: float = 1.0) -> str:
    if value is None:
        return "-"
    if form == "bytes":
        return human_bytes(value)
    if isinstance(value, dict):
        return f"{form} ({form} to {form})".format(value["median"], value["low"], value["high"])
    return form.format(factor * value)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def write_report(
    folder: Path,
    stem: str,
    document: Mapping[str, Any],
    draw: Callable[[], Figure],
    *,
    log: Callable[[str], None],
    lines: Iterator[str] | None = None,
) -> None:
    """Makes a folder hold a document as `STEM.json`, its lines, if there are any, as `STEM.md`, and its `STEM.png`.

    A picture that cannot be drawn is a line of a log, which names the extra.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / f"{stem}.json", json_text(document).encode())
    if lines is not None:
        write_bytes(folder / f"{stem}.md", ("\n".join(lines) + "\n").encode())
    try:
        write_figure(draw(), folder / f"{stem}.png")
    except MissingExtraError as err:
        log(str(err))


def largest_difference(first: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any]:
    """Returns the largest difference between the losses of two runs at equal steps, the step, and how many are equal.

    Losses that are not finite, as under fp16, are passed over. `step` and `difference` are None without an equal step.
    """
    found = {step: abs(loss - other[step]) for step, loss in first.items() if step in other}
    found = {step: value for step, value in found.items() if math.isfinite(value)}
    step = max(found, key=lambda each: found[each], default=None)
    return {"equal_steps": len(found), "step": step, "difference": None if step is None else found[step]}


def written_line(folder: str | Path, names: Sequence[str]) -> str:
    """Returns the line that says which files are in a folder now."""
    return f"written to {from_here(folder)}: {', '.join(names)}"
