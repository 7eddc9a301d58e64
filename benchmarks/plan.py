"""Measures what plans cost and how little they pad.

python -m benchmarks.plan [--tiny] [--json] [--samples N] [--table-samples N]

Lengths are synthesised to the usual duration histogram. The first part is a table of ways to form batches under one
budget. The second part is times and sizes of a plan of many samples with 64 optimal edges. Times are medians of one
thread, with p99 if many calls are timed. All figures come from the same run. If lhotse is installed
(`benchmarks/requirements-peers.txt`), its DynamicBucketingSampler is in the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.report import table
from forebay.config import BucketConfig, WindowConfig
from forebay.config.plan import LengthsConfig
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import num_steps, turn
from forebay.plan.disk import AnyPlan, load_plan, save_plan
from forebay.plan.make import Samples, make_plan
from forebay.plan.names import plan_folder
from forebay.plan.pack.pack_plan import PackPlan
from forebay.plan.permutation import Permutations, derive_key
from forebay.plan.statistics import batch_statistics, padding_in_line, padding_of
from forebay.plan.window import WindowPlan

T = TypeVar("T")

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 160
EDGES_S = (1.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)
SHARES = (0.126, 0.248, 0.137, 0.353, 0.131, 0.005, 0.0001)
CACHE_KEY = "0" * 64
ROWS_PER_SHARD = 512
_PIECE = 2**20

KINDS: dict[str, tuple[type[LengthsConfig], dict[str, Any]]] = {
    "seven edges": (BucketConfig, {}),
    "64 optimal edges": (BucketConfig, {"k": 64}),
    "window of 32": (WindowConfig, {"window": 32}),
    "64 edges, shards:64": (BucketConfig, {"k": 64, "locality": "shards:64"}),
}

COLUMNS = (
    "batches",
    "padding_percent",
    "cv",
    "number",
    "displacement",
    "shard_spread",
    "mixed_steps_of_8",
    "build_s",
)


def usual_durations(count: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns int32 [count] durations in audio samples: the histogram 1-3, 3-5, ... 20-30 s, uniform inside a class."""
    rng = np.random.default_rng(seed)
    edges = np.array(EDGES_S) * SAMPLE_RATE_HZ
    found = np.empty(count, dtype=np.int32)
    for start in range(0, count, _PIECE):
        size = min(_PIECE, count - start)
        classes = rng.choice(len(SHARES), size=size, p=np.array(SHARES) / sum(SHARES))
        found[start : start + size] = edges[:-1][classes] + rng.random(size) * np.diff(edges)[classes]
    return found


def seconds(work: Callable[[], Any], *, repeats: int = 1) -> list[float]:
    """Returns the wall time of each call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def timed(work: Callable[[], T]) -> tuple[T, tuple[float, float]]:
    """Returns what a call gives, and its wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, (round(time.perf_counter() - wall, 3), round(time.process_time() - cpu, 3))


def _of_lengths(plan: AnyPlan) -> BucketPlan | WindowPlan:
    """Returns the plan, which is none of packs: `statistics` takes no other."""
    assert not isinstance(plan, PackPlan)
    return plan


def padding_table(count: int, *, batch_seconds: float) -> list[dict[str, Any]]:
    """Returns a row for each way to form batches of `batch_seconds`: padding, spread of padded seconds, order."""
    durations = usual_durations(count)
    shards = (np.arange(count) // ROWS_PER_SHARD).astype(np.int32)
    rows = [random_row(durations, batch_seconds=batch_seconds)]
    for name, (kind, changes) in KINDS.items():
        settings = kind(batch_seconds=batch_seconds, **changes)
        start = time.perf_counter()
        samples = Samples(durations=durations, sample_rate_hz=SAMPLE_RATE_HZ, shards=lambda: shards)
        plan = _of_lengths(make_plan(samples, settings))
        build_s = time.perf_counter() - start
        stats = batch_statistics(plan, durations, shards=shards)
        rows.append(
            {
                "batches": name,
                "padding_percent": round(100 * stats["padding"], 2),
                "cv": stats["cv"],
                "number": stats["total_batches"],
                "displacement": stats["mean_displacement"],
                "shard_spread": stats["shard_spread"],
                "mixed_steps_of_8": stats["worlds"]["8"]["mixed_steps"],
                "build_s": round(build_s, 3),
            }
        )
    if importlib.util.find_spec("lhotse") is None:
        print("lhotse is not installed: no row of its DynamicBucketingSampler", file=sys.stderr)
    else:
        rows.append(lhotse_row(durations[: min(count, 100_000)], batch_seconds=batch_seconds))
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def random_row(durations: np.ndarray[Any, Any], *, batch_seconds: float) -> dict[str, Any]:
    """Returns the row of a shuffle, in batches of the size that pads to the budget on average."""
    line = durations[Permutations([len(durations)], derive_key("random"))(np.arange(len(durations)))]
    size = 1
    while True:
        found = padding_in_line(line, size + 1)
        if found.padded_to / found.batches > batch_seconds * SAMPLE_RATE_HZ:
            break
        size += 1
    found = padding_in_line(line, size)
    return {
        "batches": f"random order, {size} a batch",
        "padding_percent": round(100 * found.share, 2),
        "cv": found.cv,
        "number": found.batches,
    }


def lhotse_row(durations: np.ndarray[Any, Any], *, batch_seconds: float) -> dict[str, Any]:
    """Returns the row of lhotse's sampler as its documentation uses it: 30 buckets, shuffled, `max_duration`."""
    from lhotse import CutSet, MonoCut
    from lhotse.dataset.sampling import DynamicBucketingSampler

    cuts = CutSet.from_cuts(
        MonoCut(id=str(i), start=0.0, duration=int(n) / SAMPLE_RATE_HZ, channel=0) for i, n in enumerate(durations)
    )
    start = time.perf_counter()
    sampler = DynamicBucketingSampler(
        cuts, max_duration=batch_seconds, num_buckets=30, shuffle=True, seed=0, drop_last=False
    )
    batches = [np.array([int(cut.id) for cut in batch]) for batch in sampler]
    elapsed = time.perf_counter() - start
    found = padding_of(batches, durations)
    return {
        "batches": f"lhotse DynamicBucketingSampler, {len(durations)} samples, iterated in {elapsed:.1f} s",
        "padding_percent": round(100 * found.share, 2),
        "cv": found.cv,
        "number": found.batches,
    }


def measure(count: int, *, batch_seconds: float, seeks: int) -> dict[str, Any]:
    """Returns times and sizes of one plan of `count` samples with 64 optimal edges."""
    durations = usual_durations(count)
    settings = BucketConfig(batch_seconds=batch_seconds, k=64)
    samples = Samples(durations=durations, sample_rate_hz=SAMPLE_RATE_HZ)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan, build = timed(lambda: _of_lengths(make_plan(samples, settings)))
    after_build = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stats, counting = timed(lambda: batch_statistics(plan, durations, frames=-(-durations // FRAME_SAMPLES)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as root:
        folder = plan_folder(Path(root), dataset="bench", split="train", cache_key=CACHE_KEY, settings=settings)
        save_s = seconds(lambda: save_plan(plan, folder, cache_key=CACHE_KEY, settings=settings, statistics=stats))[0]
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())

        def opened() -> BucketPlan | WindowPlan:
            return _of_lengths(load_plan(folder, cache_key=CACHE_KEY, settings=settings, num_samples=count))

        open_s = seconds(opened, repeats=9)
        fresh = [opened() for _ in range(9)]
        first_s = [seconds(lambda p=p: p.order(1, 0).batch(0))[0] for p in fresh]
        order_figures = order_times(opened(), seeks=seeks)
    return {
        "samples": count,
        "hours": stats["total_hours"],
        "buckets": len(stats["buckets"]),
        "batches": stats["total_batches"],
        "build_s": build[0],
        "build_cpu_s": build[1],
        "statistics_s": counting[0],
        "statistics_cpu_s": counting[1],
        "save_s": round(save_s, 3),
        "size_mb": round(size_bytes / 1e6, 1),
        "bytes_per_sample": round(size_bytes / count, 3),
        "peak_before_mb": round(before * 1024 / 1e6),
        "peak_of_build_mb": round(after_build * 1024 / 1e6),
        "peak_of_all_mb": round(peak * 1024 / 1e6),
        "open_ms": round(float(np.median(open_s)) * 1e3, 3),
        "first_batch_ms": round(float(np.median(first_s)) * 1e3, 3),
        **order_figures,
        "padding": stats["padding"],
        "cv": stats["cv"],
        "padding_random_order": stats["padding_random_order"],
        "batch_seconds": batch_seconds,
        "mean_batch_size": stats["mean_batch_size"],
        "mean_displacement": stats["mean_displacement"],
        "mixed_steps": {world: found["mixed_steps"] for world, found in stats["worlds"].items()},
        "weightless_batches": {world: found["weightless_batches"] for world, found in stats["worlds"].items()},
    }


def order_times(plan: BucketPlan | WindowPlan, *, seeks: int) -> dict[str, float]:
    """Returns the times of a seek (a new epoch's order and one batch of it) and of a batch among 64 drawn together."""
    places = np.random.default_rng(1).integers(0, plan.num_batches, seeks).tolist()
    sought = [seconds(lambda p=p: plan.order(1, p).batch(p))[0] for p in places]
    order = plan.order(1, 0)
    runs = [np.arange(start, start + 64) % len(order) for start in places]
    drawn = [seconds(lambda run=run: order.batches(run))[0] / 64 for run in runs]
    # A run of 8 ranks goes on with 6: the place of its next step, and the batch there.
    elastic = [seconds(lambda p=p: _resumed(plan, p))[0] for p in places[: max(1, seeks // 10)]]
    return {
        "seek_p50_us": round(float(np.percentile(sought, 50)) * 1e6, 1),
        "seek_p99_us": round(float(np.percentile(sought, 99)) * 1e6, 1),
        "elastic_resume_p50_us": round(float(np.percentile(elastic, 50)) * 1e6, 1),
        "batch_of_64_us": round(float(np.median(drawn)) * 1e6, 2),
    }


def _resumed(plan: BucketPlan | WindowPlan, position: int) -> None:
    if num_steps(plan.num_batches, 6, tail=plan.tail, start=position):
        place = turn(plan.num_batches, 0, dp_rank=5, dp_world_size=6, tail=plan.tail, start=position)
        plan.order(1, 0).batch(place.position)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a run of a second, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--samples", type=int, default=75_200_000, help="of the plan that is timed")
    parser.add_argument("--table-samples", type=int, default=1_000_000, help="of the plans in the table")
    parser.add_argument("--batch-seconds", type=float, default=240.0)
    arguments = parser.parse_args()
    count, rows, seeks = (20_000, 20_000, 50) if arguments.tiny else (arguments.samples, arguments.table_samples, 2000)
    found = measure(count, batch_seconds=arguments.batch_seconds, seeks=seeks)
    found["table"] = padding_table(rows, batch_seconds=arguments.batch_seconds)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(table(found.pop("table")))
    print()
    for name, value in found.items():
        print(f"{name:22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
