"""The reports on a plan and on a usage log as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.inspect.items import beside_float32
from forebay.inspect.plans import HELD
from forebay.inspect.terminal.report import count_lines, plan_lines
from forebay.terminal import entry, human_share, settings_text, table, wrapped
from forebay.visible import printable


def plan_report_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report on a plan; `facts` is the document of `forebay inspect PLAN --json`."""
    yield f"{Path(facts['folder']).name}: a plan of kind {facts['kind']}"
    yield entry("folder", printable(facts["folder"]))
    yield entry("key", facts["key"])
    yield entry("cache", printable(facts["cache"] or f"not found here: key {facts['cache_keys'][0]}"))
    if "filter" in facts:
        yield from wrapped(entry("filter", ""), printable(facts["filter"]))
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
    held_of = {name: statistics[name] for name in HELD if name in statistics}
    rows = [[n, f"{found['mean']:,.1f}", f"{found['min']:,}", f"{found['max']:,}"] for n, found in held_of.items()]
    yield from table(["of a pack", "mean", "least", "most"], rows, left=1)
    yield ""
    histogram = statistics["tokens"]["histogram"]
    yield from count_lines("tokens a pack", histogram["edges"], histogram["counts"], of="packs")


def _worlds(statistics: Mapping[str, Any]) -> Iterator[str]:
    names = ("steps", "mixed_steps", "dropped_batches", "repeated_batches", "weightless_batches")
    rows = [[size, *(f"{found[name]:,}" for name in names)] for size, found in statistics["worlds"].items()]
    yield from table(["ranks", *(name.removesuffix("_batches").replace("_", " ") for name in names)], rows, left=1)


_MAX_LISTED = 20


def usage_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report for a terminal; `facts` is the document of `usage_facts`."""
    where = f"epoch {facts['epoch']}, micro-batch {facts['position']:,} of {facts['num_batches']:,}"
    yield f"{printable(facts['file'])}: {facts['steps']:,} steps, up to {where}, seed {facts['seed']}"
    passes = facts["samples"] / facts["num_samples"]
    yield (
        f"  {facts['samples']:,} samples in {facts['batches']:,} micro-batches, {passes:.2f} times "
        f"the {facts['num_samples']:,} there are; {facts['repeats']:,} repeated in their epoch; "
        f"padding {human_share(facts['padding'])}"
    )
    yield from (f"  nothing is recorded of steps {first + 1:,} to {last:,}" for first, last in facts["gaps"])
    for title in ("parts", "languages", "sources"):
        yield from _column_lines(title, facts.get(title, {}))
    shards = facts["shards"]
    if shards["num"]:
        spread = f"{shards['min_passes']:.2f} to {shards['max_passes']:.2f} times"
        yield f"shards: {shards['touched']:,} of {shards['num']:,} touched, each used {spread}"
    yield from _never_lines(facts["never_used"])


def _column_lines(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    # The largest differences first: they are what one looks for.
    ordered = sorted(rows.items(), key=lambda item: (-abs(item[1]["share"] - item[1]["expected"]), item[0]))
    shown = {printable(name): row for name, row in ordered[:_MAX_LISTED]}
    width = max(map(len, [title, *shown]), default=0) + 2
    yield f"{title:<{width}}  {'samples':>12}  {'share':>8}  {'expected':>8}  {'there':>12}"
    for name, row in shown.items():
        shares = f"{human_share(row['share']):>8}  {human_share(row['expected']):>8}"
        yield f"  {name:<{width - 2}}  {row['samples']:>12,}  {shares}  {row['there']:>12,}"
    if len(rows) > len(shown):
        yield f"  and {len(rows) - len(shown)} more, nearer to what was expected (--json lists them all)"


def _never_lines(never: Mapping[str, Any]) -> Iterator[str]:
    found = False
    for kind in ("parts", "languages", "sources", "shards"):
        if never.get(kind):
            found = True
            yield f"never used: {_listed(kind, never[kind])}"
    if never["samples"] is None:
        yield "never used samples: not recorded; set train.usage_ids = true"
    elif never["samples"]:
        yield f"never used: {_listed('samples', never['sample_ids'] or never['samples'])}"
    elif not found:
        yield "never used: nothing"


def _listed(kind: str, values: Sequence[Any]) -> str:
    shown = ", ".join(printable(str(value)) for value in values[:_MAX_LISTED])
    more = f" and {len(values) - _MAX_LISTED:,} more (--json lists them all)" if len(values) > _MAX_LISTED else ""
    return f"{len(values):,} {kind}: {shown}{more}"
