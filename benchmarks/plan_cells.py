"""Measures what buckets of two lengths save: `python -m benchmarks.plan_cells [--tiny] [--json]`.

Every contestant fills batches to one budget of padded cost, seconds and label tokens at 0.02 s each. Beside forebay's
cells stand forebay's optimal edges of seconds alone, as many of them; random order; and, if lhotse is installed
(`benchmarks/requirements-peers.txt`), two-dimensional buckets as NeMo has them: lhotse's estimator of equal mass on the
seconds, then on the tokens of each range, and lhotse's dynamic sampler with a batch size a bucket, 10 by 3. The sets
are the demo's recordings, if they are there, read speech like LibriSpeech's, and conversations, short audio with long
texts. Idle is the share of 8 ranks' time that waits for the step's most costly batch.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import arguments, machine, show
from forebay.config import BucketConfig
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make import Samples, make_plan
from forebay.plan.permutation import Permutations, derive_key
from forebay.plan.statistics import padding_of

Array = np.ndarray[Any, Any]
RATE_HZ, TOKEN_COST, RANKS = 16_000, 320, 8
DEMO = Path(__file__).resolve().parent.parent / "demo" / "speech" / "train.parquet"


def read_speech(count: int) -> tuple[Array, Array]:
    """Returns seconds and tokens like LibriSpeech's: three of four clips of 12 to 17 s, 3.3 tokens a second."""
    rng = np.random.default_rng(0)
    seconds = np.where(rng.random(count) < 0.25, rng.uniform(2, 12, count), rng.normal(14.5, 1.2, count)).clip(1.5, 24)
    return seconds, (seconds * 3.3 * rng.gamma(40, 1 / 40, count)).astype(np.int64) + 5


def conversations(count: int) -> tuple[Array, Array]:
    """Returns short audio, of median 2.5 s, with texts of median 60 tokens that hardly depend on it."""
    rng = np.random.default_rng(0)
    seconds = np.exp(rng.normal(np.log(2.5), 0.8, count)).clip(0.3, 30)
    return seconds, (np.exp(rng.normal(np.log(60), 0.8, count)) + 3 * seconds).clip(4, 448).astype(np.int64)


def demo_speech() -> tuple[Array, Array]:
    """Returns seconds and tokens, a byte each three letters or so, of the demo's manifest."""
    import pyarrow.parquet as pq

    table = pq.read_table(DEMO)
    seconds = np.minimum(np.array(table["duration_s"].to_pylist()), 30.0)
    return seconds, np.array([len(text.encode()) // 3 + 5 for text in table["transcript"].to_pylist()])


def cost_of(batches: Sequence[Array], durations: Array, tokens: Array) -> Array:
    """Returns the padded cost of each batch, in audio samples."""
    return np.array([len(b) * (int(durations[b].max()) + TOKEN_COST * int(tokens[b].max())) for b in batches])


def row(name: str, batches: Sequence[Array], durations: Array, tokens: Array, *, took_s: float) -> dict[str, Any]:
    """Returns the figures of an epoch, its batches in their order."""
    costs = cost_of(batches, durations, tokens)
    steps = costs[: len(costs) // RANKS * RANKS].reshape(-1, RANKS)
    used = np.concatenate(batches)  # lhotse repeats samples to fill its last steps
    held = int(durations[used].sum()) + TOKEN_COST * int(tokens[used].sum())
    idle = 1 - steps.mean(1).sum() / steps.max(1).sum() if len(steps) else None
    return {
        "batches": name,
        "number": len(batches),
        "frames_%": round(100 * padding_of(list(batches), durations).share, 2),
        "tokens_%": round(100 * padding_of(list(batches), tokens).share, 2),
        "cost_%": round(100 * (1 - held / costs.sum()), 2),
        "idle_%": None if idle is None else round(100 * idle, 2),
        "made_s": round(took_s, 2),
    }


def random_order(durations: Array, tokens: Array, budget: int) -> list[Array]:
    """Returns a shuffle in batches of the largest size whose cost is the budget on average."""
    line = Permutations([len(durations)], derive_key("random"))(np.arange(len(durations)))
    best = [line[i : i + 1] for i in range(len(line))]
    for size in range(2, len(line)):
        tried = [line[i : i + size] for i in range(0, len(line), size)]
        if cost_of(tried, durations, tokens)[: len(line) // size].mean() > budget:
            break
        best = tried
    return best


def planned(durations: Array, tokens: Array, settings: BucketConfig) -> tuple[BucketPlan, list[Array]]:
    """Returns a plan, and its epoch."""
    plan = make_plan(Samples(durations=durations, sample_rate_hz=RATE_HZ, tokens=lambda: tokens), settings)
    assert isinstance(plan, BucketPlan)
    return plan, list(plan.order(1, 0).batches(np.arange(plan.num_batches)))


def one_length(durations: Array, tokens: Array, budget: int, k: int) -> list[Array]:
    """Returns batches of optimal edges of seconds, each bucket's as large as its longest lengths leave room for."""
    plan, _ = planned(durations, tokens, BucketConfig(k=k, batch_size=1))
    parts = [plan.members[a:b] for a, b in itertools.pairwise(plan.offsets)]
    longest = [int(durations[own].max()) + TOKEN_COST * int(tokens[own].max()) for own in parts]
    sizes = tuple(max(budget // one, 1) for one in longest)
    return planned(durations, tokens, BucketConfig(k=k, batch_size=sizes))[1]


def lhotse_cells(durations: Array, tokens: Array, budget: int, shape: tuple[int, int]) -> list[Array]:
    """Returns the batches of lhotse's sampler on 8 ranks, over buckets estimated as NeMo does."""
    from lhotse import CutSet, MonoCut, SupervisionSegment
    from lhotse.dataset.sampling import DynamicBucketingSampler
    from lhotse.dataset.sampling import dynamic_bucketing as lhotse

    edges = [*lhotse.estimate_duration_buckets(_Sized.of(durations / RATE_HZ), shape[0], constraint=_Sized()), np.inf]
    rows = np.searchsorted(edges[:-1], durations / RATE_HZ, side="right")
    tops: list[tuple[float, float]] = []
    for number, edge in enumerate(edges):
        own = tokens[rows == number]
        inner = lhotse.estimate_duration_buckets(_Sized.of(own), shape[1], constraint=_Sized()) if len(own) > 9 else []
        tops += [(edge, top) for top in (*dict.fromkeys(inner), np.inf)]
    lengths = np.stack([durations / RATE_HZ, tokens], 1)

    def bucket(seconds: float, held: float) -> int:
        return next(i for i, (edge, top) in enumerate(tops) if seconds < edge and held < top)

    owner = np.array([bucket(*pair) for pair in lengths.tolist()])
    longest = [lengths[owner == i].max(0, initial=0) @ (RATE_HZ, TOKEN_COST) for i in range(len(tops))]
    sizes = [max(int(budget // max(one, 1)), 1) for one in longest]

    class ByTwoLengths(lhotse.FixedBucketBatchSizeConstraint):
        def measure_length(self, example: Any) -> int:
            return int(owner[int(example.id)])

        def select_bucket(self, buckets: Any, example: Any = None, example_len: Any = None) -> int:  # noqa: ARG002
            return self.measure_length(example) if example_len is None else int(example_len)

    def sampler(rank: int) -> Any:
        made = ByTwoLengths(max_seq_len_buckets=list(range(len(tops))), batch_sizes=sizes)
        bins = list(map(float, range(len(tops) - 1)))
        options = {"shuffle": True, "drop_last": False, "buffer_size": 20_000, "world_size": RANKS, "seed": 0}
        return iter(DynamicBucketingSampler(cuts, constraint=made, duration_bins=bins, rank=rank, **options))

    cuts = CutSet.from_cuts(
        MonoCut(str(i), 0.0, float(n) / RATE_HZ, 0, supervisions=[SupervisionSegment(str(i), str(i), 0.0, 1.0)])
        for i, n in enumerate(durations)
    )
    steps = zip(*map(sampler, range(RANKS)), strict=False)
    return [np.array([int(cut.id.partition("_")[0]) for cut in batch]) for step in steps for batch in step]


class _Sized:
    """A length as lhotse's estimator asks for it."""

    @staticmethod
    def of(lengths: Array) -> list[float]:
        return [float(length) for length in lengths]

    def measure_length(self, length: float) -> float:
        return length


def rows_of(lengths: tuple[Array, Array], *, budget_s: float, shape: tuple[int, int]) -> list[dict[str, Any]]:
    """Returns a row for each way to form batches of one set."""
    durations, tokens = (lengths[0] * RATE_HZ).astype(np.int64), lengths[1]
    budget, k = int(budget_s * RATE_HZ), shape[0] * shape[1]
    cells = BucketConfig(by=("duration", "tokens"), k=k, batch_seconds=budget_s)
    ways: dict[str, Callable[[], list[Array]]] = {
        "random order": lambda: random_order(durations, tokens, budget),
        f"{k} edges of seconds": lambda: one_length(durations, tokens, budget, k),
        f"{k} cells": lambda: planned(durations, tokens, cells)[1],
    }
    if importlib.util.find_spec("lhotse") is None:
        print("lhotse is not installed: no row of its buckets", file=sys.stderr)
    else:
        ways[f"lhotse, {shape[0]} by {shape[1]}"] = lambda: lhotse_cells(durations, tokens, budget, shape)
    found = []
    for name, way in ways.items():
        start = time.perf_counter()
        batches = way()
        found.append(row(name, batches, durations, tokens, took_s=time.perf_counter() - start))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    count = 2000 if options.tiny else 50_000
    found = {
        "read speech": rows_of(read_speech(count), budget_s=240.0, shape=(10, 3)),
        "conversations": rows_of(conversations(count), budget_s=240.0, shape=(10, 3)),
    }
    if DEMO.is_file():
        found["demo"] = rows_of(demo_speech(), budget_s=20.0, shape=(4, 2))
    rows = [{"set": name, **each} for name, own in found.items() for each in own]
    show({"machine": machine("numpy"), "padding and idle ranks": rows}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
