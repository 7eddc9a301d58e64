"""Pictures of plans for a terminal: the cells of buckets, and the weights of a mixture over the run.

Cells: seconds downwards, label tokens to the right, darker where more samples lie. Weights: `forebay inspect CONFIG
--seed N`, the share that each source is to have, and what it draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from forebay.errors import ConfigError
from forebay.inspect.facts import bucket_range
from forebay.plan.interface import Plan
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.terminal import entry, human_share, print_json, print_lines, table
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
