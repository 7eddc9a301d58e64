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


def _at_least(rows: list[Row], measure: str, found: float | None, wanted: float) -> None:
    if found is not None:
        rows.append(
            {"measure": measure, "found": found, "target": f">= {wanted:g}", "reached": _yes(reached=found >= wanted)}
        )


def _at_most(rows: list[Row], measure: str, found: float, wanted: float) -> None:
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
