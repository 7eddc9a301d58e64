"""The report on a cache as lines for a terminal: plain text, at most 100 columns where paths allow it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forebay.inspect.histogram import bars
from forebay.inspect.image_lines import beside_float32, histogram_lines, images_lines
from forebay.inspect.layout import LABEL, entry, settings_text, table, wrapped
from forebay.inspect.units import human_bytes, human_hours, human_number, human_share
from forebay.visible import printable

_BAR = 50
_MAX_LANGUAGES = 24


def report_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report on an opened cache; `facts` is the document of `cache_facts`."""
    yield from _identity(facts)
    about = (images_lines, _fields, histogram_lines) if "images" in facts else (_languages, _fields, _durations)
    for section in (*about, _plans, _skipped, _recipe):
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
    yield entry("name", f"{facts['name']}, split {facts['split']}")
    yield entry("folder", printable(facts["folder"]))
    yield entry("key", facts["key"])
    yield entry("recipe key", facts["recipe_key"])
    yield entry("samples", f"{facts['num_samples']:,}, {_held(facts)}")
    yield entry("shards", f"{shards}, at most {facts['rows_per_shard']:,} rows each")
    yield entry("size", f"{human_bytes(facts['size_bytes'])} ({parts}){per_hour}")
    yield entry("made with", made_with)


def _held(facts: Mapping[str, Any]) -> str:
    if facts["histogram"] is not None:
        return f"{human_hours(facts['hours'])} hours"
    return f"{facts['num_tokens']:,} tokens{'' if 'images' in facts else ', no audio'}"


def _languages(facts: Mapping[str, Any]) -> Iterator[str]:
    languages = sorted(facts["languages"].items(), key=lambda item: (-item[1]["hours"], -item[1]["samples"], item[0]))
    shown = languages[:_MAX_LANGUAGES]
    if facts["histogram"] is None:
        rows = [[printable(n), f"{e['samples']:,}", _share_of(e["samples"], facts["num_samples"])] for n, e in shown]
        yield from table(["languages", "samples", "share"], rows, left=1)
    else:
        rows = [
            [printable(name), f"{e['samples']:,}", human_hours(e["hours"]), _share_of(e["hours"], facts["hours"])]
            for name, e in shown
        ]
        yield from table(["languages", "samples", "hours", "share"], rows, left=1)
    if len(languages) > _MAX_LANGUAGES:
        yield f"  and {len(languages) - _MAX_LANGUAGES} more (--json lists them all)"


def _fields(facts: Mapping[str, Any]) -> Iterator[str]:
    fields = facts["fields"]
    tensors = {name: field for name, field in fields.items() if field["role"] == "tensor"}
    rows = [[n, f["dtype"], f"[{', '.join(map(str, f['shape']))}]", f["group"]] for n, f in tensors.items()]
    yield from table(["fields", "dtype", "shape", "group"], rows, left=4)
    columns = ", ".join(f"{name} ({field['dtype']})" for name, field in fields.items() if field["role"] == "table")
    yield from wrapped("  row table: ", columns)


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
    cells = [[name, f"{count:,}", human_hours(hours), bar] for name, count, hours, bar in rows]
    yield from table(["durations (s)", "samples", "hours", ""], cells, left=0, last_left=True)


def _plans(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts["plans"]:
        yield "plans: none yet (forebay preprocess CONFIG makes the one of its [plan])"
        return
    yield "plans"
    for plan in facts["plans"]:
        yield from plan_lines(plan)


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields a plan in a few lines; `plan` is one of `plans_of`."""
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
        yield from table(["    bucket", "samples", "hours", "batch size", "batches", "padding"], rows, left=1)
    if "bytes_per_pack" in plan:
        held = beside_float32(plan["bytes_per_pack"], plan["float32_bytes_per_pack"], where="of the cache")
        yield f"    a pack: {held}"
    yield from wrapped("    settings: ", settings_text(plan["settings"]))


def _skipped(facts: Mapping[str, Any]) -> Iterator[str]:
    counts = {kind: facts[kind] for kind in ("excluded", "failed") if facts[kind]}
    if not counts and not facts["clipped"] and not facts["longer"]:
        yield "skipped: nothing"
        return
    yield "skipped"
    for kind, reasons in counts.items():
        text = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
        yield from wrapped(f"  {kind:<{LABEL - 2}}", text)
    if facts["clipped"]:
        clip_s = (facts["recipe"].get("audio") or {}).get("clip_s")
        yield entry("clipped", f"{facts['clipped']:,} kept for their first {human_number(clip_s)} s")
    if facts["longer"]:
        yield entry("longer", f"{facts['longer']:,} than their manifest says, kept as they are")
    if counts:
        yield entry("list", printable(facts["rejected"]))


def _recipe(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "recipe"
    for section, settings in facts["recipe"].items():
        text = settings_text(settings) if isinstance(settings, Mapping) else "none"
        yield from wrapped(f"  {section:<{LABEL - 2}}", text)


def _share_of(part: float, whole: float) -> str:
    return human_share(part / whole) if whole else "-"
