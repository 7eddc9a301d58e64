"""What a bucket plan costs: `python -m benchmarks.plan [--tiny] [--json] [--samples N]`.

Lengths are synthesised to the usual duration histogram. Times are medians (and p99 where many calls are timed) of one
thread; every figure comes from the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import PlanConfig
from forebay.train.plan import BucketPlan, Order, bucket_plan, load_plan, plan_folder, save_plan, statistics

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 160
EDGES_S = (1.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)
SHARES = (0.126, 0.248, 0.137, 0.353, 0.131, 0.005, 0.0001)
CACHE_KEY = "0" * 64


def usual_durations(count: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns int64 [count] durations in audio samples: the histogram 1-3, 3-5, ... 20-30 s, uniform inside a class."""
    rng = np.random.default_rng(seed)
    classes = rng.choice(len(SHARES), size=count, p=np.array(SHARES) / sum(SHARES))
    edges = np.array(EDGES_S) * SAMPLE_RATE_HZ
    inside = rng.random(count) * np.diff(edges)[classes]
    return (edges[:-1][classes] + inside).astype(np.int64)


def seconds(work: Callable[[], Any], *, repeats: int = 1) -> list[float]:
    """Returns the wall time of each call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def measure(count: int, *, batch_seconds: float, seeks: int) -> dict[str, Any]:
    durations = usual_durations(count)
    settings = PlanConfig(batch_seconds=batch_seconds)

    def build() -> BucketPlan:
        return bucket_plan(durations, sample_rate_hz=SAMPLE_RATE_HZ, settings=settings)

    plan, build_s = build(), float(np.median(seconds(build, repeats=3)))
    start = time.perf_counter()
    stats = statistics(plan, durations, frames=-(-durations // FRAME_SAMPLES))
    statistics_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as root:
        folder = plan_folder(Path(root), dataset="bench", split="train", cache_key=CACHE_KEY, settings=settings)
        save_s = seconds(lambda: save_plan(plan, folder, cache_key=CACHE_KEY, settings=settings, statistics=stats))[0]
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        open_s = seconds(lambda: load_plan(folder, cache_key=CACHE_KEY, settings=settings), repeats=9)
        opened = load_plan(folder, cache_key=CACHE_KEY, settings=settings)
        timed = order_times(opened, seeks=seeks)
    return {
        "samples": count,
        "hours": stats["total_hours"],
        "batches": stats["total_batches"],
        "build_s": round(build_s, 4),
        "statistics_s": round(statistics_s, 4),
        "save_s": round(save_s, 4),
        "open_ms": round(float(np.median(open_s)) * 1e3, 3),
        "size_bytes": size_bytes,
        "bytes_per_sample": round(size_bytes / count, 3),
        **timed,
        "padding_seven_edges": stats["padding"],
        "padding_random_order": stats["padding_random_order"],
        "batch_seconds": batch_seconds,
        "mean_batch_size": stats["mean_batch_size"],
        "mixed_steps": {world: found["mixed_steps"] for world, found in stats["worlds"].items()},
    }


def order_times(plan: BucketPlan, *, seeks: int) -> dict[str, float]:
    """Returns the times of a seek (a new epoch's order and one batch of it) and of a batch among 64 drawn together."""
    places = np.random.default_rng(1).integers(0, plan.num_batches, seeks).tolist()
    sought = [seconds(lambda p=p: Order(plan, seed=1, epoch=p).batch(p))[0] for p in places]  # type: ignore[misc]
    order = Order(plan, seed=1, epoch=0)
    runs = [np.arange(start, start + 64) % len(order) for start in places]
    drawn = [seconds(lambda run=run: order.batches(run))[0] / 64 for run in runs]  # type: ignore[misc]
    return {
        "seek_p50_us": round(float(np.percentile(sought, 50)) * 1e6, 1),
        "seek_p99_us": round(float(np.percentile(sought, 99)) * 1e6, 1),
        "batch_of_64_us": round(float(np.median(drawn)) * 1e6, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a run of a second, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--samples", type=int, default=5_000_000)
    parser.add_argument("--batch-seconds", type=float, default=240.0)
    arguments = parser.parse_args()
    count, seeks = (20_000, 50) if arguments.tiny else (arguments.samples, 2000)
    found = measure(count, batch_seconds=arguments.batch_seconds, seeks=seeks)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name:22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
