"""Measures what a batch costs: `python -m benchmarks.loader [--tiny] [--json]`.

The samples are ragged float16 frames with the usual speech durations. They stand in one read-only array, as in a mapped
shard, and are read in batches of 32. The limit is a loop of `np.copyto` of the same slices into one reused float16
buffer [32, longest, n_mels], in the same order, without transposition, change of dtype, padding or text. The first
batches of every loader are compared with those of a plain loop before the loader counts. CPU seconds stand beside wall
time. Ratios are to the limit of the same run, medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.config import BucketConfig

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.plan import usual_durations
from forebay.plan.bucket_plan import BucketPlan, Order
from forebay.plan.make import Planned
from forebay.plan.make_buckets import bucket_plan
from forebay.store.layout import Constants, FieldSpec
from forebay.store.source import SampleSource
from forebay.train.loader import Loader, LoaderSettings

SAMPLES_PER_FRAME = 160
BATCH_SIZE = 32
NUM_TOKENS = 30

Array = np.ndarray[Any, Any]


class FlatSource(SampleSource):
    """Frames of all samples in one read-only array, as a shard holds them; tokens likewise."""

    def __init__(self, *, count: int, features: str, n_mels: int, prompt: str | None) -> None:
        durations = usual_durations(count)
        frames = np.minimum(durations // SAMPLES_PER_FRAME, 3000)
        self.offsets = np.concatenate(([0], np.cumsum(frames)))
        noise = np.random.default_rng(0).normal(size=(10_007, n_mels)).astype(np.float16)
        self.frames = np.resize(noise, (int(self.offsets[-1]), n_mels))
        self.frames.flags.writeable = False
        self.ids = np.arange(5, 5 + NUM_TOKENS, dtype=np.int32)
        self.key = self.recipe_key = "0" * 64
        audio, text = {"features": features, "n_mels": n_mels}, {"prompt": prompt, "pad_token_id": 0}
        self.constants = Constants({"audio": audio, "text": text})
        self.fields = {"input_features": FieldSpec(name="input_features", dtype="float16", shape=(n_mels,))}
        self.lengths = {"num_audio_samples": durations, "num_frames": frames, "num_tokens": np.full(count, NUM_TOKENS)}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample_id(self, index: int) -> str:
        return f"flat-{index}"

    def ids_digest(self) -> str:
        return self.key

    def read(self, index: int) -> dict[str, Array]:
        frames = self.frames[self.offsets[index] : self.offsets[index + 1]]
        one = np.array([1], dtype=np.int32)
        pad = np.array([-0.5], dtype=np.float32)
        return {
            "input_features": frames,
            "input_ids": self.ids,
            "prefix_len": one,
            "audio_index": one - 1,
            "pad_value": pad,
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one epoch."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], None]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def copy_loop(source: FlatSource, plan: BucketPlan) -> Callable[[], None]:
    order = Order(plan, seed=0, epoch=0)
    batches = [indices.tolist() for indices in order.batches(range(len(order)))]
    starts, ends = source.offsets[:-1].tolist(), source.offsets[1:].tolist()
    out = np.zeros((BATCH_SIZE, 3000, source.frames.shape[1]), dtype=np.float16)

    def work() -> None:
        for indices in batches:
            for row, index in enumerate(indices):
                values = source.frames[starts[index] : ends[index]]
                np.copyto(out[row, : len(values)], values)

    return work


def check(loader: Loader, source: FlatSource, plan: BucketPlan) -> None:
    """Raises AssertionError unless the loader's first batches are those of a plain loop."""
    order = Order(plan, seed=0, epoch=loader.epoch)
    for position, batch in zip(range(3), loader, strict=False):
        for row, index in zip(batch["input_features"], order.batch(position).tolist(), strict=True):
            values = torch.from_numpy(source.read(index)["input_features"].T.copy()).to(row.dtype)
            assert torch.equal(row[:, : values.shape[1]], values), (position, index)


def measure(features: str, *, n_mels: int, count: int, rounds: int) -> list[dict[str, Any]]:
    prompt = {"log_mel": "whisper", "qwen3_asr": "qwen3_asr"}[features]
    source = FlatSource(count=count, features=features, n_mels=n_mels, prompt=prompt)
    settings = BucketConfig(batch_size=BATCH_SIZE)
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)
    works: dict[str, Any] = {"np.copyto, float16": copy_loop(source, plan)}
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        for num_threads in (0, 2):
            loader = Loader(source, Planned(plan=plan, key="0"), LoaderSettings(dtype=dtype, num_threads=num_threads))
            check(loader, source, plan)
            name = f"loader, {str(dtype).removeprefix('torch.')}, {num_threads} threads"
            works[name] = lambda loader=loader: [None for _ in loader] and None
    costs: dict[str, list[Cost]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():  # in turn, so that a busy neighbour meets all of them
            costs[name].append(timed(work))
    limit = costs["np.copyto, float16"]
    return [
        {
            "features": features,
            "what": name,
            "samples_per_s": count / float(np.median([cost.wall_s for cost in found])),
            "cpu_us_per_sample": 1e6 * float(np.median([cost.cpu_s for cost in found])) / count,
            "cpu_ratio": float(np.median([cost.cpu_s / base.cpu_s for cost, base in zip(found, limit, strict=True)])),
            "wall_ratio": float(
                np.median([cost.wall_s / base.wall_s for cost, base in zip(found, limit, strict=True)])
            ),
        }
        for name, found in costs.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    count, rounds = (200, 1) if arguments.tiny else (3_000, 5)
    rows = [
        row
        for features, n_mels in (("log_mel", 80), ("qwen3_asr", 128))
        for row in measure(features, n_mels=n_mels, count=count, rounds=rounds)
    ]
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "numpy": np.__version__, "rows": rows}))
        return 0
    print(f"{'features':10} {'':31} {'samples/s':>10} {'us CPU':>8} {'x CPU':>7} {'x wall':>7}")
    for row in rows:
        print(
            f"{row['features']:10} {row['what']:31} {row['samples_per_s']:10.0f} {row['cpu_us_per_sample']:8.1f} "
            f"{row['cpu_ratio']:7.2f} {row['wall_ratio']:7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
