"""`forebay inspect CONFIG --seed N` of a mixture: the weights of its sources over the run, and what they draw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from forebay.errors import ConfigError
from forebay.plan.interface import Plan
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.terminal import entry, human_share, print_json, print_lines, table
from forebay.visible import printable

_MOST_COLUMNS = 6
"""Sources that a terminal shows, those whose share changes most."""


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
