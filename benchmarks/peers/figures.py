"""The figures that the formats are measured for, each with its target beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import formats
from benchmarks.report import Cost, median

Costs = Mapping[str, Sequence[Cost]]
Row = dict[str, Any]


def targets(
    read: Mapping[str, Any], behind: Any, written: Mapping[str, Any], files: Mapping[str, Sequence[Row]]
) -> list[Row]:
    """Returns a row for each figure; a figure whose peer is not installed has none."""
    rows: list[Row] = []
    shuffled = read["shuffled"]
    for peer, wanted in (
        (formats.ARROW, 2.5),
        (formats.MDS, 4.0),
        (formats.FOLDERS, 15.0),
        (formats.FOLDERS_OPENED, 15.0),
    ):
        _at_least(rows, f"shuffled batches, times as fast as {peer}", _ratio(shuffled, peer), wanted)
    rows += _handed_over(read)
    for order in ("shuffled", "buckets"):
        for limit in (formats.LIMIT, formats.LIMIT_PADDED):
            found = _cpu(read[order], formats.OURS) / _cpu(read[order], limit)
            _at_most(rows, f"CPU a sample, {order}, over {limit}", found, 2.0)
    for mode in (formats.OURS, formats.THREADED):
        for limit in (formats.LIMIT, formats.LIMIT_PADDED):
            share = 1 / _ratio(read["by duration"], mode, limit)
            _at_least(rows, f"by duration, {mode}: share of the speed of {limit}", share, 0.85)
    others = [name for name in behind if not name.startswith(formats.OURS)]
    if others:
        best = min(others, key=lambda name: _wall(behind[name]))
        _at_least(rows, f"2 threads against 2 workers of {best}", _ratio(behind, best), 6.0)
        found = _ratio(behind, best, formats.RAGGED)
        _at_least(rows, f"2 threads, ragged, against 2 workers of {best}", found, 8.0)
    for workload, wanted in (("A", 1.2), ("B", 1.0)):
        found_writers = [name for name in formats.WRITERS if name in written[workload]]
        if found_writers:
            best = min(found_writers, key=lambda name: _wall(written[workload][name]))
            for ours_written in (formats.SHARDS, formats.SHARDS_AT_ONCE):
                how = ours_written.removeprefix(formats.SHARDS)
                found = _ratio(written[workload], best, ours_written)
                _at_least(rows, f"writing shards of {workload}{how}, times as fast as {best}", found, wanted)
        ours = next(row for row in files[workload] if row["format"] == formats.OURS)
        _at_most(rows, f"bytes over payload, {workload}", float(ours["bytes / payload"]), 1.005)
    return rows


def _handed_over(read: Mapping[str, Any]) -> list[Row]:
    """Returns the figures of ragged and of padded batches, of a first epoch and of two threads."""
    rows: list[Row] = []
    shuffled = read["shuffled"]
    ragged = formats.RAGGED
    for order, wanted in (("shuffled", 0.88), ("by duration", 0.85)):
        share = 1 / _ratio(read[order], ragged, formats.LIMIT)
        _at_least(rows, f"{order}, {ragged}: share of the speed of {formats.LIMIT}", share, wanted)
    for peer, wanted in ((formats.ARROW, 2.5), (formats.ARROW_RAGGED, 1.0)):
        found = _ratio(shuffled, peer, ragged)
        _at_least(rows, f"shuffled, {ragged}: times as fast as {peer}", found, wanted)
    for one, two in ((ragged, formats.RAGGED_THREADED), (formats.OURS, formats.THREADED)):
        _at_least(rows, f"shuffled, {two}: times as fast as {one}", _ratio(shuffled, one, two), 1.6)
    for order, costs in read.items():
        share = 1 / _ratio(costs, formats.OURS, formats.LIMIT_PADDED)
        _at_least(rows, f"{order}, {formats.OURS}: share of the speed of {formats.LIMIT_PADDED}", share, 0.9)
        _at_least(rows, f"{order}: times as fast as {formats.REUSED}", _ratio(costs, formats.REUSED), 1.0)
        _at_most(rows, f"{order}, first epoch over the next", _ratio(costs, formats.FIRST_EPOCH), 1.25)
    return rows


def _at_least(rows: list[Row], measure: str, found: float | None, wanted: float) -> None:
    if found is not None:
        rows.append(
            {"measure": measure, "found": found, "target": f">= {wanted:g}", "reached": _yes(reached=found >= wanted)}
        )


def _at_most(rows: list[Row], measure: str, found: float | None, wanted: float) -> None:
    if found is None:
        return
    rows.append(
        {"measure": measure, "found": found, "target": f"<= {wanted:g}", "reached": _yes(reached=found <= wanted)}
    )


def _yes(*, reached: bool) -> str:
    return "yes" if reached else "no"


def _ratio(costs: Any, name: str, base: str = formats.OURS) -> Any:
    return formats.against(costs, name, base)


def _wall(costs: Sequence[Cost]) -> float:
    return median(cost.wall_s for cost in costs)


def _cpu(costs: Costs, name: str) -> float:
    return median(cost.cpu_s for cost in costs[name])
