"""Measures mixtures: `python -m benchmarks.mixture [--tiny] [--json] [--samples N]`.

The mixture is twelve languages by the weights of a real run, in batches of 32. Lengths are synthesised to the usual
duration histogram. There are rows for one, seven and 64 length classes, with mixed batches and with batches of one
source; of seven classes also with weights that change 20 times. A row shows times of one thread (medians, and p99 of
seeks), and how far a language was from its share at any micro-batch, beside the bound. One row is a draw of every
sample by chance.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.plan import SAMPLE_RATE_HZ, seconds, usual_durations
from benchmarks.report import table
from forebay.config import BucketConfig
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.mix_sources import with_changes
from forebay.plan.mixture.mixture_plan import Batches, MixturePlan, mixture_plan
from forebay.plan.mixture.sources import PERIOD, Assignment, quantise

WEIGHTS = (0.1396, 0.1273, 0.1264, 0.1245, 0.1095, 0.0960, 0.0874, 0.0725, 0.0416, 0.0360, 0.0307, 0.0086)
EDGES_S = {1: (30.0,), 7: (3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0), 64: tuple(np.linspace(1, 30, 64).tolist())}
BATCH_SIZE = 32


def deviations(plan: MixturePlan, source_of: np.ndarray[Any, Any], *, num_batches: int) -> np.ndarray[Any, Any]:
    """Returns float64 [num_batches]: the largest distance of a source from its share, at each micro-batch."""
    counts, epoch = [], 0
    unit = BATCH_SIZE if plan.batches == "per_source" else 1
    while len(counts) < num_batches:
        order = plan.order(0, epoch)
        for start in range(0, min(len(order), num_batches - len(counts)), 256):
            batches = order.batches(np.arange(start, min(start + 256, len(order))))
            counts += [np.bincount(source_of[batch], minlength=len(plan.names)) for batch in batches]
        epoch += 1
    starts = np.array([change.at for change in plan.changes], np.int64)
    shares = plan.stretch_shares[np.searchsorted(starts, np.arange(len(counts)), side="right")]
    wanted = np.sum(counts, axis=1, keepdims=True) * shares
    off: np.ndarray[Any, Any] = np.abs(np.cumsum(counts - wanted, axis=0)).max(axis=1) / unit
    return off[:num_batches]


def measure(
    buckets: BucketPlan, source_of: np.ndarray[Any, Any], batches: Batches, *, seeks: int, changes: int = 0
) -> dict[str, Any]:
    names = [str(number) for number in range(len(WEIGHTS))]
    start = time.perf_counter()
    plan = mixture_plan(buckets, source_of, names=names, weights=WEIGHTS, batches=batches)
    if changes:
        turned = [tuple(np.roll(WEIGHTS, number + 1)) for number in range(changes)]
        places_of_changes = np.arange(1, changes + 1) * (40 * seeks // (changes + 1)) // 8 * 8
        plan = with_changes(plan, list(zip(places_of_changes.tolist(), turned, strict=True)))
        plan.order(1, 0).batch(0)  # the sequences of all stretches are made
    build_s = time.perf_counter() - start
    places = np.random.default_rng(1).integers(0, plan.num_batches, seeks).tolist()
    sought = [seconds(lambda p=p: plan.order(1, p % 9).batch(p))[0] for p in places]
    order = plan.order(1, 0)
    runs = [np.arange(start, start + 64) % len(order) for start in places[: max(seeks // 8, 5)]]
    drawn = [seconds(lambda run=run: order.batches(run))[0] / 64 for run in runs]
    off = deviations(plan, source_of, num_batches=40 * seeks)
    return {
        "classes": len(buckets.batch_sizes),
        "batches": batches,
        "changes": changes,
        "build_s": round(build_s, 3),
        "seek_p50_ms": round(float(np.percentile(sought, 50)) * 1e3, 2),
        "seek_p99_ms": round(float(np.percentile(sought, 99)) * 1e3, 2),
        "batch_us": round(float(np.median(drawn)) * 1e6, 1),
        "off_mean": round(float(off.mean()), 2),
        "off_max": round(float(off.max()), 2),
        "bound": plan.bound,
    }


def by_chance(*, num_batches: int) -> dict[str, Any]:
    """Returns the same figures for samples whose source is drawn at random."""
    shares = quantise(WEIGHTS) / PERIOD
    counts = np.cumsum(np.random.default_rng(2).multinomial(BATCH_SIZE, shares, size=num_batches), axis=0)
    off = np.abs(counts - counts.sum(1, keepdims=True) * shares).max(axis=1)
    return {"classes": 1, "batches": "by chance", "off_mean": round(off.mean(), 2), "off_max": round(off.max(), 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a run of seconds, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--samples", type=int, default=2_000_000)
    arguments = parser.parse_args()
    count, seeks = (20_000, 10) if arguments.tiny else (arguments.samples, 400)
    lengths = usual_durations(count)
    source_of = np.random.default_rng(3).integers(0, len(WEIGHTS), count).astype(np.uint16)
    assignment_s = float(np.median(seconds(lambda: Assignment(quantise(WEIGHTS)), repeats=3)))
    rows = []
    for edges in EDGES_S.values():
        settings = BucketConfig(edges_s=edges, batch_size=BATCH_SIZE)
        buckets = bucket_plan(lengths, sample_rate_hz=SAMPLE_RATE_HZ, settings=settings)
        modes: tuple[Batches, ...] = ("mixed", "per_source")
        rows += [measure(buckets, source_of, batches, seeks=seeks) for batches in modes]
        if len(edges) == 7:
            rows += [measure(buckets, source_of, batches, seeks=seeks, changes=20) for batches in modes]
    rows.append(dict.fromkeys(rows[0]) | by_chance(num_batches=40 * seeks))
    found = {"samples": count, "batch_size": BATCH_SIZE, "assignment_s": round(assignment_s, 4), "mixtures": rows}
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{count} samples, batches of {BATCH_SIZE}, assignment of one period in {assignment_s:.3f} s")
        print("off: largest distance of a language from its share, in samples (per_source: in micro-batches)")
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
