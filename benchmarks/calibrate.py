"""Trials that a calibration needs for one bucket, over devices that are functions of the batch.

    python -m benchmarks.calibrate

A device takes `base + slope * batch`; the line of the probes is off by up to a fifth, and fragments of up to 2 % come
on top, other ones at every size. A trial beyond the limit dies as an allocation does: without a figure. No target of
time: a trial is real training steps on a device, seconds to minutes, and all that a calibration costs.
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

from benchmarks import report
from forebay.measure.batch_search import MAX_TRIALS, Line, Search, TrialOutcome, granule, grid_up

MOST = 4096
DEVICES = (
    ("line exact", 0.0, 0.0),
    ("line off by 5 %", 0.05, 0.0),
    ("line off by 20 %", 0.2, 0.0),
    ("off by 20 %, fragments 2 %", 0.2, 0.02),
)


def one(draw: random.Random, *, error: float, fragments: float) -> tuple[int, int]:
    """Returns the trials of one search, and how many steps of the grid its answer is below the largest that fits."""
    base, slope, room = draw.uniform(1e8, 4e10), 10 ** draw.uniform(6.5, 9.5), 10 ** draw.uniform(0.9, 3.4)
    factor, noise = draw.uniform(1 - error, 1 + error), [draw.uniform(0, fragments) for _ in range(16)]
    limit = int(base + slope * room)

    def fits(size: int) -> bool:
        return base + factor * slope * size * (1 + noise[size // granule(size) % 16]) <= limit

    def trial(size: int) -> TrialOutcome:
        taken = base + factor * slope * size * (1 + noise[size // granule(size) % 16])
        return TrialOutcome(fits=True, peak_bytes=int(taken)) if fits(size) else TrialOutcome(fits=False)

    search = Search(limit_bytes=limit, least=1, most=MOST, line=Line(base=base, slope=slope))
    found = search.run(trial) or 0
    below = 0
    while found and grid_up(found) <= MOST and fits(grid_up(found)):
        found, below = grid_up(found), below + 1
    return search.trials, below


def rows(count: int) -> list[dict[str, Any]]:
    """Returns a row for each kind of device."""
    draw = random.Random(1)
    found = []
    for name, error, fragments in DEVICES:
        trials, below = zip(*(one(draw, error=error, fragments=fragments) for _ in range(count)), strict=True)
        found.append(
            {
                "device": name,
                "searches": count,
                "trials, mean": statistics.mean(trials),
                "trials, most": max(trials),
                "target": f"<= {MAX_TRIALS}",
                "reached": "yes" if max(trials) <= MAX_TRIALS else "no",
                "largest found, %": 100 * sum(steps == 0 for steps in below) / count,
                "steps below, most": max(below),
            }
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    options = report.arguments(__doc__, arguments)
    found = rows(200 if options.tiny else 20_000)
    if options.json:
        print(json.dumps({"machine": report.machine(), "trials": found}))
    else:
        print(report.table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
