"""A cache as one self-contained HTML file of at most 10 MB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.inspect.page import page_sections as sections
from forebay.inspect.page.card_page import card_element
from forebay.inspect.page.cards import embedded
from forebay.inspect.page.chosen_cards import SHOWN
from forebay.inspect.page.markup import Child, Html, joined, page, tag
from forebay.inspect.page.overview import MAX_ROWS, Overview
from forebay.inspect.page.plan_page import plans
from forebay.progress import Progress
from forebay.steps.text.pace import PACE
from forebay.store.files import write_bytes

MAX_BYTES = 10_000_000
"""Of a file, always."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bounds:
    """How much a file holds. media: bytes of sound and pictures; is_whole: tokens and rows of the samples shown."""

    media: int
    rows: int = MAX_ROWS
    cards: int = 200
    is_whole: bool = True


_TRIED = (
    _Bounds(media=6_000_000),
    _Bounds(media=3_000_000),
    _Bounds(media=1_000_000),
    _Bounds(media=0),
    _Bounds(media=0, rows=300, is_whole=False),
    _Bounds(media=0, rows=0, cards=SHOWN, is_whole=False),
)
"""In turn, until the file is small enough; texts, ids and lists have bounds of their own."""


def write_report(overview: Overview, path: Path, *, progress: bool = False) -> int:
    """Makes `path` the report on a cache, whole or not at all; returns its bytes, never more than 10,000,000."""
    readings = []
    with Progress(len(overview.chosen), desc="samples", unit="sample", is_shown=progress, leave=False) as shown:
        for chosen in overview.chosen:
            readings.append(overview.reader.read(chosen))
            shown.update(1)
    data = b""
    for bounds in _TRIED:
        cards = embedded(readings[: bounds.cards], rate_hz=overview.rate_hz, budget=bounds.media)
        kept = cards if bounds.is_whole else [replace(card, pieces=(), row={}) for card in cards]
        data = _document(overview, [card_element(card) for card in kept], most_rows=bounds.rows).encode("utf-8")
        if len(data) <= MAX_BYTES:
            break
    write_bytes(path, data)
    return len(data)


def _document(overview: Overview, cards: Sequence[Html], *, most_rows: int) -> str:
    shown = [chosen.index for chosen in overview.chosen[: len(cards)]]
    whole = len(overview.columns)
    listed = overview.rows.chosen(shown)[:most_rows]
    count = len(listed)
    note = (
        f"All {whole:,}."
        if count == whole
        else (
            f"{count:,} of {whole:,}: those above, those to look at, and others spread evenly. "
            "forebay inspect --serve lists all."
        )
    )
    names = set(shown)
    body = body_of(overview, cards, link=lambda index: _link(overview, index, is_shown=index in names), note=note)
    data = {
        "columns": columns_json(overview),
        "languages": overview.columns.languages[0][:500],
        "rows": overview.rows.of(listed),
        "cards": shown,
        "far": PACE.deviations,
    }
    return page(f"{overview.facts['name']}: forebay report", body, data=data)


def columns_json(overview: Overview) -> list[dict[str, Any]]:
    """Returns the columns of the table as the script reads them."""
    return [
        {"name": column.name, "number": column.is_number, "places": column.places} for column in overview.rows.shown
    ]


def _link(overview: Overview, index: int, *, is_shown: bool) -> Html:
    name = tag("code", overview.columns.ids[index].as_py()[:80])
    return tag("a", name, href=f"#s{index}") if is_shown else name


def body_of(overview: Overview, cards: Sequence[Html], *, link: object, note: str) -> Html:
    """Returns what a page about a cache shows."""
    content = [
        sections.hero(overview),
        sections.lengths(overview),
        sections.samples(overview, cards),
        plans(overview),
        sections.doubts(overview, link),
        sections.left_out(overview),
        sections.rows_section(overview, note=note),
        sections.made(overview),
    ]
    return frame(content, home="#top", links=_LINKS)


_LINKS = (
    ("#shape", "Shape"),
    ("#samples", "Samples"),
    ("#plan", "Plan"),
    ("#doubts", "To look at"),
    ("#left-out", "Left out"),
    ("#all", "All samples"),
    ("#made", "How it was made"),
)


def frame(content: Sequence[Child], *, home: str, links: Sequence[tuple[str, str]]) -> Html:
    """Returns content between what every page has: its head with links, and the keys that it knows."""
    nav = tag("nav", [tag("a", name, href=where) for where, name in links], aria_label="sections")
    theme = tag("button", "Theme", type="button", id="theme", aria_label="switch between dark and light")
    keys = tag("button", "?", type="button", id="help", aria_label="keys")
    head = tag(
        "header",
        tag("a", "forebay", href=home, class_="brand"),
        nav,
        tag("div", keys, theme, class_="tools"),
        class_="top",
    )
    skip = tag("a", "Skip to the samples", href="#samples", class_="skip")
    return joined([skip, head, tag("main", content), _keys()])


_KEYS = (
    ("j  k", "the next, the previous sample"),
    ("space", "play or stop its sound"),
    ("/", "search"),
    ("t", "dark or light"),
    ("g", "grids of patches on or off"),
    ("?", "these keys"),
    ("Esc", "close, leave"),
)


def _keys() -> Html:
    rows = [tag("div", tag("dt", tag("kbd", key)), tag("dd", what)) for key, what in _KEYS]
    close = tag("button", "Close", type="button", id="close")
    return tag("dialog", tag("h2", "Keys"), tag("dl", rows, class_="row"), close, id="keys", aria_label="keys")
