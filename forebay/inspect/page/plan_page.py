"""The section of a page about plans: padding of buckets, fill of packs, some of them drawn to scale.

What a page says of images as their processor gives them: the declared form, sizes, and classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.inspect.listed_groups import form_rows
from forebay.inspect.page import markup
from forebay.inspect.page.markup import Child, Html, joined, tag
from forebay.inspect.page.overview import Overview
from forebay.inspect.page.plan_history import PlanView
from forebay.inspect.page.words import shortened
from forebay.inspect.plan_facts import HELD, bucket_range, has_lengths, shown_settings

_NAME = 120


def table(head: Sequence[str], body: Sequence[Html], *, numbers: int | None = None) -> Html:
    """Returns a table whose first column is names; numbers: how many columns behind it are numbers."""
    count = len(head) - 1 if numbers is None else numbers
    cells = [tag("th", name, scope="col", class_="n" if 0 < i <= count else None) for i, name in enumerate(head)]
    whole = tag("table", tag("thead", tag("tr", cells)), tag("tbody", body))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=f"table of {head[0]}")


def line(name: Child, *cells: Child, numbers: int = 0, title: str | None = None) -> Html:
    """Returns a row of `table`: its name, numbers, then other cells, of which an element, a bar, is wide."""
    kinds = ["n" if i < numbers else "wide" if isinstance(cell, Html) else None for i, cell in enumerate(cells)]
    found = [tag("td", cell, class_=kind) for cell, kind in zip(cells, kinds, strict=True)]
    return tag("tr", tag("th", name, scope="row", title=title), found)


def panel(name: str, *children: Child) -> Html:
    """Returns what stands under a name."""
    return tag("figure", tag("figcaption", name), children, class_="panel")


def plans(overview: Overview) -> Html:
    """Returns the plans: padding of buckets, fill of packs, some of them drawn to scale."""
    if not overview.plans:
        text = "None yet: forebay preprocess CONFIG makes the one of its [plan]."
        return tag("section", tag("h2", "Plan"), tag("p", text, class_="about"), id="plan")
    line = overview.filter_line
    note = None if line is None else tag("p", f"The config's [filter] leaves {shortened(line, 400)}.", class_="about")
    return tag("section", tag("h2", "Plan"), note, [_plan(overview, view) for view in overview.plans], id="plan")


def _plan(overview: Overview, view: PlanView) -> Html:
    facts = view.facts
    names = [f"{facts[name]:,} {name.removeprefix('num_')}" for name in ("num_batches", "num_packs") if name in facts]
    padded = ("padding",) if has_lengths(facts) else ()
    names += [f"{100 * facts[name]:.1f} % {name}" for name in (*padded, "fill") if name in facts]
    random = facts["statistics"].get("padding_random_order") if padded else None
    names += [] if random is None else [f"{100 * random:.1f} % in random order"]
    whose = "the plan of this config" if view.is_wanted else "a plan beside this cache"
    kept = "" if view.is_kept else ", made for this page and not kept"
    if "filter" in facts:
        kept += f", of what a filter left: {shortened(str(facts['filter']), 300)}"
    head = [
        tag("h3", f"{facts['kind']}: {', '.join(names)}"),
        tag("p", f"{whose}{kept}, key {facts['key'][:16]}", class_="note"),
    ]
    parts = [_pixels(view), _packs(view), _buckets(view), _batches(overview, view), _settings(shown_settings(facts))]
    return tag("div", head, parts, class_="plan")


def _pixels(view: PlanView) -> Html | None:
    if view.pixel_padding is None:
        return None
    text = f"About {100 * view.pixel_padding:.1f} % of the pixels of a batch are padding beside larger images."
    return tag("p", text, class_="about")


def _packs(view: PlanView) -> Html | None:
    if view.fills is None:
        return None
    statistics = view.facts["statistics"]
    unplaced = ", ".join(f"{reason} {count:,}" for reason, count in statistics["unplaced"].items() if count)
    text = f"Left out of every pack: {unplaced}." if unplaced else "Every sample is in a pack."
    held = {name: statistics[name] for name in HELD if name in statistics}
    rows = [
        line(name, f"{found['mean']:,.1f}", f"{found['min']:,}", f"{found['max']:,}", numbers=3)
        for name, found in held.items()
    ]
    legend = tag(
        "p",
        tag("span", "text", class_="k text"),
        tag("span", "image", class_="k image"),
        tag("span", "empty", class_="k pad"),
        class_="legend",
    )
    scale = panel("Packs to scale, from the emptiest to the fullest", legend, markup.packs(view.drawn))
    figures = panel("Of a pack", table(["", "mean", "least", "most"], rows))
    return joined(
        [
            tag("p", text, class_="about"),
            scale,
            tag("div", panel("How full packs are", markup.fills(view.fills)), figures, class_="charts"),
        ]
    )


def _buckets(view: PlanView) -> Html | None:
    buckets = view.facts["statistics"].get("buckets") or []
    if not buckets:
        return None
    if not has_lengths(view.facts):
        sizes = ", ".join(f"{bucket['batches']:,} batches of {bucket['batch_size']:,}" for bucket in buckets[:64])
        return tag("p", f"Samples have no lengths: {sizes}.", class_="about")
    top = max([bucket["samples"] for bucket in buckets] + [1])
    body = [
        line(
            shortened(bucket_range(bucket), _NAME),
            *(f"{bucket[name]:,}" for name in ("samples", "batch_size", "batches")),
            f"{100 * bucket['padding']:.1f} %",
            markup.bar(bucket["samples"] / top, held=1 - bucket["padding"]),
            numbers=4,
        )
        for bucket in buckets[:64]
    ]
    head = ["bucket", "samples", "batch size", "batches", "padding", ""]
    return panel("Buckets and their padding", table(head, body, numbers=4))


def _batches(overview: Overview, view: PlanView) -> Html | None:
    drawn = [batch for batch in view.drawn if batch.rows] if view.fills is None else []
    if not drawn:
        return None
    unit = "tokens" if overview.columns.seconds is None else "s"
    scale = max(batch.room for batch in drawn)
    body = [
        tag(
            "div",
            tag("span", batch.label, class_="label"),
            markup.batch(batch, scale=scale, unit=unit),
            tag("span", f"{batch.left_out} rows not drawn", class_="note") if batch.left_out else None,
            class_="batch",
        )
        for batch in drawn
    ]
    legend = tag("p", tag("span", "sample", class_="k text"), tag("span", "padding", class_="k pad"), class_="legend")
    return panel("A batch of each bucket to scale, drawn at random", legend, body)


def _settings(settings: Mapping[str, Any]) -> Html | None:
    cells = [(name, json.dumps(value)) for name, value in settings.items() if value is not None]
    if not cells:
        return None
    rows = [tag("div", tag("dt", shortened(name, 80)), tag("dd", shortened(value, 300))) for name, value in cells[:60]]
    return tag("details", tag("summary", "its settings"), tag("dl", rows, class_="row"), class_="cells")


_MAX_CLASSES, _FIELD = 16, 120


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
        chart = markup.histogram(found["edges"], found["samples"], unit="px", what="images")
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
            shortened(each["class"], _FIELD),
            f"{each['samples']:,} ({100 * each['samples'] / whole:.0f} %)",
            markup.bar(each["samples"] / top),
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
        line(shortened(name, _FIELD), *(shortened(cell, 200) for cell in cells)) for name, *cells in form_rows(facts)
    ]
    return panel("Batches", table(["field", "type", "shape", "stored as", ""], rows, numbers=0))
