"""The report on a cache as lines for a terminal: plain text, at most 100 columns where paths allow it."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.inspect.histogram import bars
from forebay.inspect.units import human_bytes, human_hours, human_share, printable

COLUMNS = 100
_BAR = 50
_MAX_LANGUAGES = 24
_LABEL = 14
_HELD = "\x00"
"""A space at which no line is broken, until it is printed."""


def report_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report on an opened cache; `facts` is the document of `cache_facts`."""
    yield from _identity(facts)
    for section in (_languages, _fields, _durations, _plans, _skipped, _recipe):
        yield ""
        yield from section(facts)


def verify_lines(verify: Mapping[str, Any]) -> Iterator[str]:
    """Yields what verifying found; `verify` is the document of a `VerifyReport`."""
    checked = human_bytes(verify["checked_bytes"])
    if verify["ok"]:
        yield f"verify: ok, {checked} are the bytes that were sealed"
        return
    yield f"verify: {len(verify['problems'])} problems, {checked} are the bytes that were sealed"
    yield from (f"  {printable(problem)}" for problem in verify["problems"])


def _identity(facts: Mapping[str, Any]) -> Iterator[str]:
    groups = facts["groups"]
    parts = ", ".join(f"{name} {human_bytes(group['size_bytes'])}" for name, group in groups.items())
    per_hour = "" if facts["bytes_per_hour"] is None else f"; {human_bytes(facts['bytes_per_hour'])} an hour"
    shards = " + ".join(f"{group['num_shards']} {name}" for name, group in groups.items())
    made_with = ", ".join(f"{name} {version}" for name, version in facts["made_with"].items())
    yield f"{Path(facts['folder']).name}: a sealed cache, format {facts['format_version']}"
    yield _entry("name", f"{facts['name']}, split {facts['split']}")
    yield _entry("folder", printable(facts["folder"]))
    yield _entry("key", facts["key"])
    yield _entry("recipe key", facts["recipe_key"])
    has_audio = facts["histogram"] is not None
    held = f"{human_hours(facts['hours'])} hours" if has_audio else f"{facts['num_tokens']:,} tokens, no audio"
    yield _entry("samples", f"{facts['num_samples']:,}, {held}")
    yield _entry("shards", f"{shards}, at most {facts['rows_per_shard']:,} rows each")
    yield _entry("size", f"{human_bytes(facts['size_bytes'])} ({parts}){per_hour}")
    yield _entry("made with", made_with)


def _languages(facts: Mapping[str, Any]) -> Iterator[str]:
    languages = sorted(facts["languages"].items(), key=lambda item: (-item[1]["hours"], -item[1]["samples"], item[0]))
    shown = languages[:_MAX_LANGUAGES]
    if facts["histogram"] is None:
        rows = [[printable(n), f"{e['samples']:,}", _share_of(e["samples"], facts["num_samples"])] for n, e in shown]
        yield from _table(["languages", "samples", "share"], rows, left=1)
    else:
        rows = [
            [printable(name), f"{e['samples']:,}", human_hours(e["hours"]), _share_of(e["hours"], facts["hours"])]
            for name, e in shown
        ]
        yield from _table(["languages", "samples", "hours", "share"], rows, left=1)
    if len(languages) > _MAX_LANGUAGES:
        yield f"  and {len(languages) - _MAX_LANGUAGES} more (--json lists them all)"


def _fields(facts: Mapping[str, Any]) -> Iterator[str]:
    fields = facts["fields"]
    tensors = {name: field for name, field in fields.items() if field["role"] == "tensor"}
    rows = [[n, f["dtype"], f"[{', '.join(map(str, f['shape']))}]", f["group"]] for n, f in tensors.items()]
    yield from _table(["fields", "dtype", "shape", "group"], rows, left=4)
    table = ", ".join(f"{name} ({field['dtype']})" for name, field in fields.items() if field["role"] == "table")
    yield from _wrapped("  row table: ", table)


def _durations(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["histogram"] is None:
        lengths = facts["lengths"]
        yield f"tokens a sample: {lengths['min']:,} to {lengths['max']:,}, mean {lengths['mean']:.1f}"
        return
    edges, counts = facts["histogram"]["edges_s"], facts["histogram"]["samples"]
    places = 1 if any(edge % 1 for edge in edges[:-1]) else 0
    names = [f"{low:.{places}f} - {high:.{places}f}" for low, high in itertools.pairwise(edges)]
    if round(edges[-1] - edges[-2], 6) > round(edges[1] - edges[0], 6):
        names[-1] = f"{edges[-2]:.{places}f} - {edges[-1]:.1f}"
    rows = zip(names, counts, facts["histogram"]["hours"], bars(np.array(counts), width=_BAR), strict=True)
    table = [[name, f"{count:,}", human_hours(hours), bar] for name, count, hours, bar in rows]
    yield from _table(["durations (s)", "samples", "hours", ""], table, left=0, last_left=True)


def _plans(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts["plans"]:
        yield "plans: none yet (forebay preprocess CONFIG makes the one of its [plan])"
        return
    yield "plans"
    for plan in facts["plans"]:
        yield from _plan(plan)


def _plan(plan: Mapping[str, Any]) -> Iterator[str]:
    statistics = plan["statistics"]
    parts = [f"{plan[name]:,} {name.removeprefix('num_')}" for name in ("num_batches", "num_packs") if name in plan]
    parts += [f"{human_share(plan[name])} {name}" for name in ("padding", "fill") if name in plan]
    if "padding_random_order" in statistics:
        parts.append(f"{human_share(statistics['padding_random_order'])} in random order")
    parts += [f"{statistics[name]:,} samples {name}" for name in ("dropped", "repeated") if statistics.get(name)]
    yield f"  {plan['kind']} {plan['key'][:16]}: {', '.join(parts)}"
    rows = [
        [
            f"  {b['range']}",
            f"{b['samples']:,}",
            human_hours(b["hours"]),
            f"{b['batch_size']:,}",
            f"{b['batches']:,}",
            human_share(b["padding"]),
        ]
        for b in statistics.get("buckets", ())
    ]
    if rows:
        yield from _table(["    bucket", "samples", "hours", "batch size", "batches", "padding"], rows, left=1)
    yield from _wrapped("    settings: ", _settings(plan["settings"]))


def _skipped(facts: Mapping[str, Any]) -> Iterator[str]:
    counts = {kind: facts[kind] for kind in ("excluded", "failed") if facts[kind]}
    if not counts and not facts["clipped"]:
        yield "skipped: nothing"
        return
    yield "skipped"
    for kind, reasons in counts.items():
        text = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
        yield from _wrapped(f"  {kind:<{_LABEL - 2}}", text)
    if facts["clipped"]:
        clip_s = facts["recipe"]["audio"].get("clip_s")
        yield _entry("clipped", f"{facts['clipped']:,} kept for their first {clip_s:g} s")
    if counts:
        yield _entry("list", printable(facts["rejected"]))


def _recipe(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "recipe"
    for section, settings in facts["recipe"].items():
        text = _settings(settings) if isinstance(settings, Mapping) else "none"
        yield from _wrapped(f"  {section:<{_LABEL - 2}}", text)


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}{_HELD}={_HELD}{printable(_value(value))}" for name, value in settings.items() if value is not None
    )


def _value(value: Any) -> str:
    # A digest of 64 digits says no more to a reader than its first 16.
    if isinstance(value, str) and len(value) == 64:
        value = f"{value[:16]}..."
    return json.dumps(value, ensure_ascii=False)


def _entry(name: str, text: str) -> str:
    return f"  {name:<{_LABEL - 2}}{text}"


def _share_of(part: float, whole: float) -> str:
    return human_share(part / whole) if whole else "-"


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    # Neither hyphens nor long words break: names and digests stay whole for copying.
    lines = textwrap.wrap(text, COLUMNS - len(head), break_long_words=False, break_on_hyphens=False)
    return [f"{head if not i else indent}{line.replace(_HELD, ' ')}" for i, line in enumerate(lines or ["none"])]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, last_left: bool = False) -> list[str]:
    """Aligned columns: the first `left` ones to the left, and the last one where `last_left` says so."""
    indented = [list(head), *([f"  {row[0]}" if left else row[0], *row[1:]] for row in rows)]
    widths = [max(len(row[column]) for row in indented) for column in range(len(head))]
    widths[0] = max(widths[0], _LABEL)

    def line(row: Sequence[str]) -> str:
        cells = [
            f"{cell:<{width}}" if i < left or (last_left and i == len(row) - 1) else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in indented]
