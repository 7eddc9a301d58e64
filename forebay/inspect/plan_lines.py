"""Plans as lines for a terminal: the reports on a plan and a usage log, the cells of buckets, the weights of a mixture.

Cells: seconds downwards, label tokens to the right, darker where more samples lie. Weights over the run: `forebay
inspect CONFIG --seed N`, the share that each source is to have, and what it draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from forebay.errors import ConfigError
from forebay.inspect.facts import (
    bucket_range,
    has_lengths,
    held_rows,
    is_without_sound,
    plan_figures,
    shown_settings,
    unplaced_text,
)
from forebay.inspect.listed_groups import beside_float32
from forebay.inspect.seen_images import range_text
from forebay.plan.interface import Plan
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.terminal import (
    LABEL,
    bars,
    entry,
    human_hours,
    human_share,
    print_json,
    print_lines,
    settings_text,
    table,
    wrapped,
)
from forebay.visible import printable

_COLUMNS = 64
_SHADES = " .:+#"
_MOST_COLUMNS = 6
"""Sources that a terminal shows, those whose share changes most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellBox:
    """A cell in its row. start, end: as shares of the picture's width; shade: its samples as a share of the most."""

    start: float
    end: float
    shade: float
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRow:
    """The cells of one range of seconds, that of the fewest tokens first."""

    label: str
    cells: tuple[CellBox, ...]


def cell_rows(statistics: Mapping[str, Any]) -> list[CellRow]:
    """Returns the rows of a picture of a plan, the shortest seconds first; none for a plan without cells.

    statistics: of a plan, as packing_stats.json has them.
    """
    cells = [bucket for bucket in statistics.get("buckets") or () if bucket.get("tokens")]
    most = max((bucket["samples"] for bucket in cells), default=0) or 1
    widest = max((bucket["tokens"][1] for bucket in cells), default=0) or 1
    found = []
    for label, own in itertools.groupby(cells, key=lambda bucket: bucket_range({"range": bucket["range"]})):
        boxes = [
            CellBox(
                start=bucket["tokens"][0] / widest,
                end=bucket["tokens"][1] / widest,
                shade=bucket["samples"] / most,
                title=f"{label}, {bucket['tokens'][0]}-{bucket['tokens'][1]} tokens: {bucket['samples']:,} samples",
            )
            for bucket in own
        ]
        found.append(CellRow(label=label, cells=tuple(boxes)))
    return found


def cell_lines(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yields the picture in characters, a line for each range of seconds; nothing for a plan without cells."""
    rows = cell_rows(statistics)
    if not rows:
        return
    widest = max(bucket["tokens"][1] for bucket in statistics["buckets"] if bucket.get("tokens"))
    beside = max(len(row.label) for row in rows)
    yield f"    cells: 0 to {widest} label tokens to the right; # is where most samples lie"
    for row in rows:
        line = ""
        for box in row.cells:
            room = max(round(box.end * _COLUMNS) - len(line) - 1, 1)
            line += _SHADES[math.ceil(box.shade * (len(_SHADES) - 1))] * room + "|"
        yield f"      {row.label:>{beside}} |{line}"


def show_weights(plan: Plan, *, seed: int, as_json: bool) -> int:
    """Prints the weights of a mixture over the run, and returns 0. seed: of the order. ConfigError for another plan."""
    if not isinstance(plan, MixturePlan):
        raise ConfigError("--seed shows the weights of a mixture, and this config has no [mixture]")
    document = {"seed": seed, **weight_facts(plan)}
    print_json(document) if as_json else print_lines(weight_lines(document))
    return 0


def weight_facts(plan: MixturePlan) -> dict[str, Any]:
    """Returns the stretches of a run with weights of their own, the last one up to the end of the epoch it begins in.

    Each has `from` and `to` (micro-batches of the global order), `epoch` and `position` of a loader's state, and by
    source `weight`, the share that it is to have, and `drawn`, the share of the stretch's samples that it has; of
    batches of one source each, of micro-batches. Shares do not depend on the seed.
    """
    begins = [0, *(plan.group_of(change.at) * plan.lockstep for change in plan.changes)]
    last = (begins[-1] // plan.num_batches + 1) * plan.num_batches
    found = []
    for number, (start, end) in enumerate(zip(begins, [*begins[1:], last], strict=True)):
        counts = _drawn(plan, end) - _drawn(plan, start)
        drawn = counts / max(counts.sum(), 1)
        epoch, position = divmod(start, plan.num_batches)
        made: dict[str, Any] = {"from": start, "to": end, "epoch": epoch, "position": position}
        made["is_revision"] = bool(number and plan.changes[number - 1].is_revision)
        shares = zip(plan.names, plan.stretch_shares[number].tolist(), drawn.tolist(), strict=True)
        made["sources"] = {name: {"weight": round(w, 6), "drawn": round(d, 6)} for name, w, d in shares}
        found.append(made)
    return {"num_batches": plan.num_batches, "bound": plan.bound, "batches": plan.batches, "stretches": found}


def _drawn(plan: MixturePlan, position: int) -> Any:
    """Returns what the first micro-batches of the run have of each source: samples, or batches of one source each."""
    cells = plan.draw.cells(position // plan.lockstep, 0)
    return cells.sum(1) if plan.batches == "mixed" else (cells / plan.batch_sizes).sum(1)


def weight_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yields the document of `weight_facts`, with its seed, for a terminal."""
    stretches = document["stretches"]
    weights = {name: [made["sources"][name]["weight"] for made in stretches] for name in stretches[0]["sources"]}
    shown = sorted(weights, key=lambda name: min(weights[name]) - max(weights[name]))[:_MOST_COLUMNS]
    unit = "samples" if document["batches"] == "mixed" else "micro-batches"
    yield f"weights over the run, seed {document['seed']}: the share to have, and in brackets that drawn"
    yield entry("epoch", f"{document['num_batches']:,} micro-batches")
    yield entry("bound", f"at every micro-batch a source is within {document['bound']:,} {unit} of its share")
    rows = []
    for made in stretches:
        parts = [made["sources"][name] for name in shown]
        place = f"{made['from']:,}{' (change)' if made['is_revision'] else ''}"
        shares = [f"{human_share(part['weight'])} ({human_share(part['drawn'])})" for part in parts]
        rows.append([place, f"{made['epoch']} + {made['position']:,}", *shares])
    yield from table(["micro-batch", "epoch", *(printable(PurePath(name).name) for name in shown)], rows, left=1)
    if len(weights) > len(shown):
        yield f"and {len(weights) - len(shown)} more sources (--json lists them all)"


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields a plan in a few lines; `plan` is one of `plans_of`. Of samples without sound nothing is said in hours."""
    statistics, parts = plan["statistics"], plan_figures(plan)
    parts += [f"{statistics[name]:,} samples {name}" for name in ("dropped", "repeated") if statistics.get(name)]
    yield f"  {plan['kind']} {plan['key'][:16]}: {', '.join(parts)}"
    if buckets := statistics.get("buckets"):
        found: dict[str, list[str]] = {
            "    bucket": [f"  {bucket_range(bucket)}" for bucket in buckets],
            "samples": [f"{bucket['samples']:,}" for bucket in buckets],
            **({} if is_without_sound(plan) else {"hours": [human_hours(bucket["hours"]) for bucket in buckets]}),
            "batch size": [f"{bucket['batch_size']:,}" for bucket in buckets],
            "batches": [f"{bucket['batches']:,}" for bucket in buckets],
            **({"padding": [human_share(bucket["padding"]) for bucket in buckets]} if has_lengths(plan) else {}),
        }
        yield from table(list(found), list(zip(*found.values(), strict=True)), left=1)
        yield from cell_lines(statistics)
    if "bytes_per_pack" in plan:
        held = beside_float32(plan["bytes_per_pack"], plan["float32_bytes_per_pack"], where="of the cache")
        yield f"    a pack: {held}"
    yield from wrapped("    settings: ", settings_text(shown_settings(plan)))


def count_lines(
    head: str, edges: Sequence[int], counts: Sequence[int], *, of: str, is_exact: bool = False
) -> Iterator[str]:
    """Yields a histogram: bins [edges[i], edges[i + 1]), the last one closed, and how many there are `of` in each.

    Empty neighbours are one bin. is_exact: bins are those of `count_histogram`; one of width 1 holds one number.
    """
    bins: list[tuple[str, int]] = []
    for is_empty, run in itertools.groupby(range(len(counts)), key=lambda i: counts[i] == 0):
        places = list(run)
        for first, last in [(places[0], places[-1])] if is_empty else zip(places, places, strict=True):
            is_whole = is_exact and edges[1] - edges[0] == 1
            bins.append((range_text(edges[first], edges[last + 1], is_exact=is_whole), counts[first]))
    drawn = bars([count for _, count in bins], beside=max(LABEL, len(head), *(len(name) for name, _ in bins)) + 12)
    rows = [[name, f"{count:,}", bar] for (name, count), bar in zip(bins, drawn, strict=True)]
    yield from table([head, of, ""], rows, left=0, last_left=True)


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
    names = ("steps", "mixed_steps", "dropped_batches", "repeated_batches", "weightless_batches")
    worlds = facts["statistics"]["worlds"].items()
    rows = [[size, *(f"{found[name]:,}" for name in names)] for size, found in worlds]
    yield from table(["ranks", *(name.removesuffix("_batches").replace("_", " ") for name in names)], rows, left=1)


def _packs(facts: Mapping[str, Any]) -> Iterator[str]:
    statistics = facts["statistics"]
    yield entry("samples", f"{facts['num_samples']:,}; left out: {unplaced_text(statistics) or 'none'}")
    if cut := statistics.get("cut"):
        yield entry("cut", ", ".join(f"{name} {count:,}" for name, count in cut.items()))
    fill = f"{human_share(facts['fill'])} fill, {statistics['pad_tokens']:,} tokens left over"
    yield entry("packs", f"{facts['num_packs']:,}, {fill}")
    for units, share in (("patches", "patch_fill"), ("frames", "frame_fill")):
        if statistics.get(share) is not None:
            yield entry(units, f"{human_share(statistics[share])} of the packs' max_{units}")
    if "bytes_per_pack" in facts:
        held = beside_float32(facts["bytes_per_pack"], facts["float32_bytes_per_pack"], where="of the cache")
        yield entry("a pack", held)
    yield from wrapped(entry("settings", ""), settings_text(facts["settings"]))
    yield ""
    yield from table(["of a pack", "mean", "least", "most"], held_rows(statistics), left=1)
    yield ""
    histogram = statistics["tokens"]["histogram"]
    yield from count_lines("tokens a pack", histogram["edges"], histogram["counts"], of="packs")


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
    never = facts["never_used"]
    kinds = [kind for kind in ("parts", "languages", "sources", "shards") if never.get(kind)]
    yield from (f"never used: {_listed(kind, never[kind])}" for kind in kinds)
    if never["samples"] is None:
        yield "never used samples: not recorded; set train.usage_ids = true"
    elif never["samples"]:
        yield f"never used: {_listed('samples', never['sample_ids'] or never['samples'])}"
    elif not kinds:
        yield "never used: nothing"


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


def _listed(kind: str, values: Sequence[Any]) -> str:
    shown = ", ".join(printable(str(value)) for value in values[:_MAX_LISTED])
    more = f" and {len(values) - _MAX_LISTED:,} more (--json lists them all)" if len(values) > _MAX_LISTED else ""
    return f"{len(values):,} {kind}: {shown}{more}"
