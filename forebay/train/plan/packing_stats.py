"""What a plan costs: padding, shapes and counts, exactly, for one epoch (`packing_stats.json`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import PlanError
from forebay.train.plan.bucket import Array, BucketPlan
from forebay.train.plan.order import Order
from forebay.train.plan.permutation import Permutations, derive_key
from forebay.train.plan.ranks import mixed_steps, num_steps

WORLD_SIZES = (1, 2, 4, 8)
_CHUNK = 2**18
"""Samples looked at in one go: their temporaries stay in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class _Frames:
    """Frames of batches that are padded to their own longest sample."""

    held: int = 0
    padded_to: int = 0

    def __add__(self, other: _Frames) -> _Frames:
        return _Frames(self.held + other.held, self.padded_to + other.padded_to)

    @property
    def padding(self) -> float:
        return round(1 - self.held / self.padded_to, 6) if self.padded_to else 0.0


def statistics(plan: BucketPlan, durations: Array, *, frames: Array | None = None, seed: int = 0) -> dict[str, Any]:
    """Returns the document of packing_stats.json: figures of epoch 0 under `seed`, every batch looked at.

    durations: int64 [num_samples], in audio samples, those that the plan was made from.
    frames: integers [num_samples], of what is padded (feature frames); left out: the durations.
    Padding is the share of padded frames in all frames, each batch padded to its own longest sample;
    `padding_random_order` is that of a shuffle without buckets at the same mean batch size. `worlds` says, for W ranks, the
    steps an epoch, those in which the ranks hold batches of more than one bucket, and what becomes of the epoch's end.
    `dropped` and `repeated` are samples (the end of a bucket), `*_batches` micro-batches (the end of the epoch).
    Hours count each sample once; durations are in seconds. O(num_samples) time.
    """
    durations = np.asarray(durations)
    frames = durations if frames is None else np.asarray(frames)
    for name, lengths in (("durations", durations), ("frames", frames)):
        if len(lengths) != len(plan.members):
            raise PlanError(f"{name} holds {len(lengths)} samples, the plan {len(plan.members)}")
    order = Order(plan, seed=seed, epoch=0)
    counted = [_bucket_frames(order, bucket, frames) for bucket in range(len(plan.batch_sizes))]
    total = int(durations.sum(dtype=np.int64))
    mean_size = max(1, round((len(durations) - plan.dropped.sum() + plan.repeated.sum()) / len(order)))
    return {
        "seed": seed,
        "total_samples": len(durations),
        "total_hours": _hours(total, plan),
        "total_batches": len(order),
        "mean_batch_size": mean_size,
        "padding": sum(counted, _Frames()).padding,
        "padding_random_order": _random_order(frames, mean_size, seed).padding,
        "dropped": int(plan.dropped.sum()),
        "repeated": int(plan.repeated.sum()),
        "lockstep": plan.lockstep,
        "tail": plan.tail,
        "worlds": _worlds(order),
        "buckets": [_bucket(plan, number, durations, total, found) for number, found in enumerate(counted)],
    }


def _bucket(plan: BucketPlan, bucket: int, durations: Array, total: int, found: _Frames) -> dict[str, Any]:
    own = durations[plan.members[plan.offsets[bucket] : plan.offsets[bucket + 1]]]
    held = int(own.sum(dtype=np.int64))
    low, high = (0.0, *plan.edges_s)[bucket], plan.edges_s[bucket]
    return {
        "bucket_id": bucket,
        "range": f"{float(low)}-{float(high)}s",
        "samples": len(own),
        "hours": _hours(held, plan),
        "pct_samples": round(100 * len(own) / len(durations), 4),
        "pct_hours": round(100 * held / total, 4) if total else 0.0,
        "mean_duration": round(held / len(own) / plan.sample_rate_hz, 4) if len(own) else 0.0,
        "max_duration": round(int(own.max(initial=0)) / plan.sample_rate_hz, 4),
        "batch_size": int(plan.batch_sizes[bucket]),
        "batches": int(plan.batch_counts[bucket]),
        "padding": found.padding,
        "dropped": int(plan.dropped[bucket]),
        "repeated": int(plan.repeated[bucket]),
    }


def _worlds(order: Order) -> dict[str, dict[str, int]]:
    tail, count = order.plan.tail, len(order)
    buckets = order.buckets(np.arange(count))
    worlds = {}
    for size in WORLD_SIZES:
        steps = num_steps(count, size, tail=tail)
        missing, left_over = max(steps * size - count, 0), max(count - steps * size, 0)
        worlds[str(size)] = {
            "steps": steps,
            "mixed_steps": mixed_steps(buckets, size, tail=tail),
            "dropped_batches": left_over,
            "repeated_batches": missing if tail == "pad" else 0,
            "weightless_batches": missing if tail == "short" else 0,
        }
    return worlds


def _bucket_frames(order: Order, bucket: int, frames: Array) -> _Frames:
    size = int(order.plan.batch_sizes[bucket])
    places = int(order.plan.bucket_sizes[bucket] - order.plan.dropped[bucket] + order.plan.repeated[bucket])
    found = _Frames()
    step = max(_CHUNK // size, 1) * size
    for start in range(0, places, step):
        found += _padded(frames[order.samples(bucket, np.arange(start, min(start + step, places)))], size)
    return found


def _random_order(frames: Array, size: int, seed: int) -> _Frames:
    line = Permutations([len(frames)], derive_key("forebay random order", seed))
    found = _Frames()
    step = max(_CHUNK // size, 1) * size
    for start in range(0, len(frames), step):
        found += _padded(frames[line(np.arange(start, min(start + step, len(frames))))], size)
    return found


def _padded(lengths: Array, size: int) -> _Frames:
    """Counts consecutive batches of `size`; the last one may be shorter."""
    full = lengths[: len(lengths) // size * size].reshape(-1, size)
    rest = lengths[full.size :]
    padded_to = int(full.max(axis=1, initial=0).sum(dtype=np.int64)) * size + int(rest.max(initial=0)) * len(rest)
    return _Frames(int(lengths.sum(dtype=np.int64)), padded_to)


def _hours(samples: int, plan: BucketPlan) -> float:
    return round(samples / plan.sample_rate_hz / 3600, 6)
