"""A cache as one self-contained HTML file of at most 10 MB, and what its template shows of an overview."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.inspect.checks.limits import PACE
from forebay.inspect.facts import bucket_range, has_lengths, held_rows, plan_figures, shown_settings, unplaced_text
from forebay.inspect.listed_groups import form_rows
from forebay.inspect.page.cards import Card, embedded
from forebay.inspect.page.overview import MAX_ROWS, Overview
from forebay.inspect.page.page_samples import LABEL, NEAR_S, SHOWN
from forebay.inspect.page.words import page, recipe_lines
from forebay.inspect.plan_lines import cell_rows
from forebay.inspect.seen_images import count_histogram
from forebay.store.files import write_bytes
from forebay.terminal import Progress

MAX_BYTES = 10_000_000
"""The most that a file has."""


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
        data = _document(overview, kept, most_rows=bounds.rows).encode("utf-8")
        if len(data) <= MAX_BYTES:
            break
    write_bytes(path, data)
    return len(data)


def _document(overview: Overview, cards: Sequence[Card], *, most_rows: int) -> str:
    shown = [card.index for card in cards]
    whole = len(overview.columns)
    listed = overview.rows.chosen(shown)[:most_rows]
    note = (
        f"All {whole:,}."
        if len(listed) == whole
        else (
            f"{len(listed):,} of {whole:,}: those above, those to look at, and others spread evenly. "
            "forebay inspect --serve lists all."
        )
    )
    data = {"rows": overview.rows.of(listed), "cards": shown}
    return cache_page(overview, cards, data=data, note=note, title="forebay report", shown=set(shown))


def cache_page(
    overview: Overview,
    cards: Sequence[Card],
    *,
    data: Mapping[str, Any],
    note: str,
    title: str,
    root: str = "",
    origin: str = "",
    shown: Collection[int] = (),
) -> str:
    """Returns the page about a cache. data: what the script reads beside the columns of the table.

    note: which rows the table has. root: where samples have pages of their own; without it `shown` are those on this.
    """
    columns = [
        {"name": column.name, "number": column.is_number, "places": column.places} for column in overview.rows.shown
    ]
    languages = overview.columns.languages[0][:500]
    return page(
        "cache.html",
        f"{overview.facts['name']}: {title}",
        data={"columns": columns, "languages": languages, "far": PACE.deviations, **data},
        origin=origin,
        links=_LINKS,
        cards=cards,
        note=note,
        root=root,
        shown=shown,
        **sections_of(overview),
    )


_LINKS = (
    ("#shape", "Shape"),
    ("#samples", "Samples"),
    ("#plan", "Plan"),
    ("#doubts", "To look at"),
    ("#left-out", "Left out"),
    ("#all", "All samples"),
    ("#made", "How it was made"),
)


def sections_of(overview: Overview) -> dict[str, Any]:
    """Returns all that the sections say of a cache but for its cards, by the names of the template."""
    facts, columns, checks = overview.facts, overview.columns, Counter(overview.doubts.checks.values())
    languages = {} if set(facts["languages"]) == {"unknown"} else facts["languages"]
    part = "samples" if facts["histogram"] is None else "hours"
    names, codes = columns.sources
    counts = np.bincount(codes, minlength=len(names))
    return {
        "overview": overview,
        "facts": facts,
        "columns": columns,
        "doubts": overview.doubts,
        "near_s": NEAR_S,
        "pace": PACE,
        "folder": Path(facts["folder"]).name,
        "lead": _lead(overview),
        "counts": facts.get("histograms") or {"tokens": count_histogram(columns.tokens)},
        "sizes": facts.get("image_sizes"),
        "languages": sorted(languages.items(), key=lambda item: (-item[1][part], item[0])),
        "checks": [f"{name} {checks[name]:,}" for name in sorted(checks)],
        "recipe_lines": list(recipe_lines(facts["recipe"], made_by=facts.get("processor", {}).get("made_by", ""))),
        "form": form_rows(facts) if "form" in facts else [],
        "sources": [(names[i], int(counts[i])) for i in np.argsort(-counts, kind="stable") if any(names)],
        "recipe": json.dumps(facts["recipe"], indent=1, ensure_ascii=False),
        "settings_of": _settings,
        **{
            each.__name__: each
            for each in (bucket_range, cell_rows, has_lengths, held_rows, plan_figures, unplaced_text)
        },
    }


def _settings(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the first settings of a plan as text."""
    given = [(name, value) for name, value in shown_settings(plan).items() if value is not None]
    return [(name, json.dumps(value)) for name, value in given[:60]]


def _lead(overview: Overview) -> str:
    """Returns what a sample holds, in a sentence."""
    recipe = overview.facts["recipe"]
    lines = dict(recipe_lines(recipe))
    if "processor" in overview.facts:
        lines["vision"] = f"images as {overview.facts['processor']['made_by']} gives them"
    named = [lines[section].split("; processor")[0] for section in ("audio", "vision") if section in lines]
    parts = [line.replace("; ", ", ") for line in named]
    prompt = (recipe.get("text") or {}).get("prompt", overview.columns.cache.constants.get("prompt"))
    if prompt not in (None, "none"):
        parts.append("a class each" if prompt == LABEL else f"texts under the prompt {prompt}")
    return "; ".join(parts)
