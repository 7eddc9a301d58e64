"""Lengths to buckets: which samples share a length range, and how many of them form a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from forebay.config import PlanConfig
from forebay.errors import PlanError

Tail = Literal["short", "drop", "pad"]
Array = np.ndarray[Any, np.dtype[Any]]

_PIECE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketPlan:
    """Samples in buckets, and the rules by which `Order` makes micro-batches of them. No seed, no epoch: one for all.

    members: int32 (int64 from 2^31 samples on) [num_samples], sample indices bucket by bucket, rising inside one.
    offsets: int64 [num_buckets + 1]; bucket b holds members[offsets[b] : offsets[b + 1]].
    batch_sizes: int64 [num_buckets], samples a micro-batch.
    edges_s: the configured upper edges; sample_rate_hz: of the durations that the plan was made from.
    """

    members: Array
    offsets: Array
    batch_sizes: Array
    edges_s: tuple[float, ...]
    sample_rate_hz: int
    lockstep: int
    tail: Tail

    @property
    def bucket_sizes(self) -> Array:
        """int64 [num_buckets], samples a bucket."""
        sizes: Array = np.diff(self.offsets)
        return sizes

    @property
    def batch_counts(self) -> Array:
        """int64 [num_buckets], micro-batches of each bucket in one epoch; under `drop` only full ones."""
        counts: Array = np.asarray(self.bucket_sizes // self.batch_sizes)
        if self.tail != "drop":
            counts = counts + (self.bucket_sizes % self.batch_sizes > 0)
        return counts

    @property
    def num_batches(self) -> int:
        """Micro-batches of one epoch, over all ranks."""
        return int(self.batch_counts.sum())

    @property
    def dropped(self) -> Array:
        """int64 [num_buckets], samples that an epoch leaves out: under `drop` those of the incomplete batch, other ones each epoch."""
        rest: Array = self.bucket_sizes % self.batch_sizes
        return rest if self.tail == "drop" else np.zeros_like(rest)

    @property
    def repeated(self) -> Array:
        """int64 [num_buckets], samples taken a second time to fill the incomplete batch; above 0 under `pad` only."""
        missing: Array = -self.bucket_sizes % self.batch_sizes
        return missing if self.tail == "pad" else np.zeros_like(missing)


def bucket_plan(durations: Array, *, sample_rate_hz: int, settings: PlanConfig) -> BucketPlan:
    """Returns the plan in which every sample is in exactly one bucket.

    durations: int64 [num_samples], in audio samples. Bucket b holds [edge b-1, edge b); the last one is open-ended, so
    that what is longer than every edge stays. Edges are compared as the decimals that the config shows: 0.1 s at 16 kHz
    is 1600 samples.
    Batch sizes under `batch_seconds`: floor(budget / upper edge), for the last bucket floor(budget / its longest
    sample); at least 1, so that only a sample that is itself over the budget exceeds it.
    Raises PlanError for no samples, a negative duration (with its index), or when `drop` leaves no batch at all.
    """
    durations = np.asarray(durations)
    _check(durations, settings)
    edges = [math.ceil(Fraction(repr(edge)) * sample_rate_hz) for edge in settings.edges_s]
    buckets, counts = _buckets(durations, edges)
    order = np.argsort(buckets, kind="stable")
    members = order.astype(np.int32 if len(order) < 2**31 else np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    tops = [*edges[:-1], int(durations[members[offsets[-2] :]].max(initial=0)) or edges[-1]]
    plan = BucketPlan(
        members=members,
        offsets=offsets,
        batch_sizes=np.array(_batch_sizes(settings, tops, sample_rate_hz), dtype=np.int64),
        edges_s=settings.edges_s,
        sample_rate_hz=sample_rate_hz,
        lockstep=settings.lockstep,
        tail=settings.tail,
    )
    if plan.num_batches == 0:
        raise PlanError(
            f'plan.tail = "drop" leaves none of {len(durations)} samples: no bucket fills a batch of '
            f'{plan.batch_sizes.tolist()} (samples a bucket: {counts.tolist()}); set plan.tail = "short"'
        )
    return plan


def _check(durations: Array, settings: PlanConfig) -> None:
    if durations.ndim != 1 or durations.dtype.kind not in "iu":
        raise PlanError(f"durations are {durations.dtype} {list(durations.shape)}, wanted integers [num_samples]")
    if len(durations) == 0:
        raise PlanError("no samples to plan: the cache or the filters in [source] leave none")
    if durations.min() < 0:
        index = int(np.argmax(durations < 0))
        raise PlanError(f"duration of sample {index} is {int(durations[index])}, wanted 0 or more")
    if not all(math.isfinite(edge) for edge in settings.edges_s):
        raise PlanError(
            f"plan.edges_s must be finite, got {list(settings.edges_s)}; the last bucket is open-ended anyway"
        )
    if settings.batch_seconds is not None and not math.isfinite(settings.batch_seconds):
        raise PlanError(f"plan.batch_seconds must be finite, got {settings.batch_seconds}")
    if len(settings.edges_s) > 2**16:
        raise PlanError(f"plan.edges_s has {len(settings.edges_s)} edges, at most 65536 are possible")


def _buckets(durations: Array, edges: Sequence[int]) -> tuple[Array, Array]:
    """Returns the bucket of every sample, and the samples of every bucket.

    Small unsigned integers: numpy sorts them stably by radix, in linear time. In pieces: numpy's own results are int64.
    """
    inner = np.array(edges[:-1], dtype=np.int64)
    buckets = np.empty(len(durations), dtype=np.uint16 if len(edges) > 256 else np.uint8)
    counts = np.zeros(len(edges), dtype=np.int64)
    for start in range(0, len(durations), _PIECE):
        piece = np.searchsorted(inner, durations[start : start + _PIECE], side="right")
        buckets[start : start + _PIECE] = piece
        counts += np.bincount(piece, minlength=len(edges))
    return buckets, counts


def _batch_sizes(settings: PlanConfig, tops: Sequence[int], sample_rate_hz: int) -> list[int]:
    if isinstance(settings.batch_size, tuple):
        return list(settings.batch_size)
    if settings.batch_size is not None:
        return [settings.batch_size] * len(tops)
    budget = Fraction(repr(settings.batch_seconds)) * sample_rate_hz
    return [max(1, math.floor(budget / top)) for top in tops]
