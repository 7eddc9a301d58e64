"""The report on a plan as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay.inspect.image_lines import beside_float32, count_lines
from forebay.inspect.layout import entry, settings_text, table, wrapped
from forebay.inspect.terminal import plan_lines
from forebay.inspect.units import human_share
from forebay.visible import printable

_HELD = ("samples", "tokens", "patches", "images")


def plan_report_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report on a plan; `facts` is the document of `forebay inspect PLAN --json`."""
    yield f"{Path(facts['folder']).name}: a plan of kind {facts['kind']}"
    yield entry("folder", printable(facts["folder"]))
    yield entry("key", facts["key"])
    yield entry("cache", printable(facts["cache"] or f"not found here: key {facts['cache_keys'][0]}"))
    if facts["kind"] == "pack":
        yield from _packs(facts)
    else:
        yield entry("samples", f"{facts['num_samples']:,}")
        yield ""
        yield from plan_lines(facts)
    yield ""
    yield from _worlds(facts["statistics"])


def _packs(facts: Mapping[str, Any]) -> Iterator[str]:
    statistics = facts["statistics"]
    unplaced = {reason: count for reason, count in statistics["unplaced"].items() if count}
    left_out = ", ".join(f"{reason} {count:,}" for reason, count in unplaced.items()) or "none"
    yield entry("samples", f"{facts['num_samples']:,}; left out: {left_out}")
    fill = f"{human_share(facts['fill'])} fill, {statistics['pad_tokens']:,} tokens left over"
    yield entry("packs", f"{facts['num_packs']:,}, {fill}")
    if statistics.get("patch_fill") is not None:
        yield entry("patches", f"{human_share(statistics['patch_fill'])} of the packs' max_patches")
    if "bytes_per_pack" in facts:
        held = beside_float32(facts["bytes_per_pack"], facts["float32_bytes_per_pack"], where="of the cache")
        yield entry("a pack", held)
    yield from wrapped(entry("settings", ""), settings_text(facts["settings"]))
    yield ""
    held_of = {name: statistics[name] for name in _HELD if name in statistics}
    rows = [[n, f"{found['mean']:,.1f}", f"{found['min']:,}", f"{found['max']:,}"] for n, found in held_of.items()]
    yield from table(["of a pack", "mean", "least", "most"], rows, left=1)
    yield ""
    histogram = statistics["tokens"]["histogram"]
    yield from count_lines("tokens a pack", histogram["edges"], histogram["counts"], of="packs")


def _worlds(statistics: Mapping[str, Any]) -> Iterator[str]:
    names = ("steps", "mixed_steps", "dropped_batches", "repeated_batches", "weightless_batches")
    rows = [[size, *(f"{found[name]:,}" for name in names)] for size, found in statistics["worlds"].items()]
    yield from table(["ranks", *(name.removesuffix("_batches").replace("_", " ") for name in names)], rows, left=1)
