"""What a page says of images as their processor gives them: the declared form, sizes, and classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.inspect.listed_groups import form_rows
from forebay.inspect.report import charts
from forebay.inspect.report.markup import Html, tag
from forebay.inspect.report.plan_page import line, panel, table
from forebay.inspect.report.words import shortened

_MAX_CLASSES, _NAME = 16, 120


def size_charts(facts: Mapping[str, Any]) -> Iterator[Html]:
    """Yields histograms of the sides of images in pixels; of images of one size what it is."""
    sizes = facts.get("image_sizes")
    if not sizes:
        return
    if sizes["fixed"]:
        width, height = sizes["fixed"]
        text = tag("p", f"{width:,} × {height:,} pixels, all of them.", class_="about")
        yield panel("Size of images", text)
        return
    for name in ("longest", "shortest"):
        found = sizes[name]
        chart = charts.histogram(found["edges"], found["samples"], unit="px", what="images")
        yield panel(f"{name.capitalize()} side of images", chart)


def classes_panel(facts: Mapping[str, Any]) -> Html | None:
    """Returns how many samples have each class; None of a cache without classes."""
    found = facts.get("classes")
    if found is None:
        return None
    shown, whole = found["counts"][:_MAX_CLASSES], max(facts["num_samples"], 1)
    top = max([each["samples"] for each in shown] + [1])
    body = [
        line(
            shortened(each["class"], _NAME),
            f"{each['samples']:,} ({100 * each['samples'] / whole:.0f} %)",
            charts.bar(each["samples"] / top),
            numbers=1,
            title=f"number {each['number']}",
        )
        for each in shown
    ]
    more, absent = len(found["counts"]) - len(shown), found["absent"]
    notes = [f"and {more:,} more; forebay inspect --json lists them all"] if more > 0 else []
    notes += [f"{absent:,} classes have no sample"] if absent else []
    shown_notes = [tag("p", note, class_="note") for note in notes]
    return panel("Classes", table(["class", "samples", ""], body, numbers=1), shown_notes)


def form_panel(facts: Mapping[str, Any]) -> Html | None:
    """Returns the declared fields of batches; None of a cache that declares none."""
    if "form" not in facts:
        return None
    rows = [
        line(shortened(name, _NAME), *(shortened(cell, 200) for cell in cells)) for name, *cells in form_rows(facts)
    ]
    return panel("Batches", table(["field", "type", "shape", "stored as", ""], rows, numbers=0))
