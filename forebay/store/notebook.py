"""The view of a cache, or of some of its samples, in a notebook: a few facts as HTML, for which no sample is read."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forebay.store.layout import FieldSpec
from forebay.store.source import SampleSource
from forebay.terminal import first_of
from forebay.visible import human_bytes, printable

_MAX_ROWS = 12
"""Languages, or fields, that are shown."""
_MAX_CHARACTERS = 300


def source_html(source: SampleSource) -> str:
    """Returns the facts of a cache or a selection as a table; other people's text is escaped."""
    return table_html(type(source).__name__, source_facts(source))


def table_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values. title, facts: plain text, whoever wrote it."""
    rows = "".join(
        f'<tr><th style="text-align:left">{_escaped(name)}</th><td style="text-align:left">{_escaped(value)}</td></tr>'
        for name, value in facts
    )
    return f"<div><strong>{_escaped(title)}</strong><table>{rows}</table></div>"


def source_facts(source: SampleSource) -> Iterator[tuple[str, str]]:
    """Yields what a source is, by name. Of a cache: what stands in its metadata."""
    choice, metadata = getattr(source, "choice", None), getattr(source, "metadata", None)
    yield "place", source.place
    yield "key", source.key[:16]
    yield "samples", f"{len(source):,}"
    if choice is not None:
        yield "filter", str(choice)
    if isinstance(metadata, Mapping):
        yield from _stored(metadata)
    yield "fields", first_of([_described(spec) for spec in source.fields.values() if spec.role == "tensor"], _MAX_ROWS)
    yield "columns", first_of([spec.name for spec in source.fields.values() if spec.role == "table"], _MAX_ROWS)


def _stored(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what the metadata of a cache say; anybody may have written them."""
    found = metadata.get("languages")
    rows = [
        (str(name), row["samples"], row["hours"])
        for name, row in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(row, Mapping) and _is_number(row.get("samples")) and _is_number(row.get("hours"))
    ]
    if hours := sum(row[2] for row in rows):
        yield "hours", f"{hours:,.2f}"
    if rows:
        rows.sort(key=lambda row: -row[1])
        yield "languages", first_of([f"{name} {samples:,}" for name, samples, _ in rows], _MAX_ROWS)
    size_bytes: Any = metadata.get("size_bytes")
    if _is_number(size_bytes):
        yield "size", human_bytes(size_bytes)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _described(spec: FieldSpec) -> str:
    return f"{spec.name} {spec.dtype} {['n', *spec.shape]}".replace("'", "")


def _escaped(text: str) -> str:
    shown = printable(text)
    return html.escape(shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:_MAX_CHARACTERS]}...")
