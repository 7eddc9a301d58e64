"""Lengths become a plan of buckets: their edges, and how many samples of each form a micro-batch.

Buckets end at the configured edges, or at `k` edges that leave the least padding. A micro-batch is as large as a
budget, a count or a calibrated table says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from forebay.config.plan import BucketConfig, LengthsConfig, bucket_names
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan, calibrated, grad_accs
from forebay.store.layout import Array

MAX_BINS = 1024
"""Of the histogram that edges are chosen on: 30 ms apart for 30 s. Twice as many gain 0.004 points of padding."""


def bucket_edges(durations: Array, *, sample_rate_hz: int, settings: BucketConfig) -> list[int]:
    """Returns the upper edges of the buckets, rising, in audio samples; with `k` at most so many as there are lengths.

    Configured edges are compared as the decimals that the config shows: 0.1 s at 16 kHz is 1600 samples.
    """
    if settings.k is None:
        return [math.ceil(Fraction(repr(edge)) * sample_rate_hz) for edge in settings.edges_s]
    return _optimal_edges(durations, k=settings.k)


def token_edges(tokens: Array, *, settings: BucketConfig) -> list[int]:
    """Returns the upper edges, in tokens and rising, of buckets of samples without audio: `edges`, else `k` optimal.

    tokens: integers [num_samples], not empty. Raises PlanError where neither is given.
    """
    if settings.edges is not None:
        return list(settings.edges)
    if settings.k is None:
        raise PlanError(
            f"{len(tokens)} samples have no audio, so edges_s cannot place them; give plan.edges in tokens (they have "
            f"{int(tokens.min())} to {int(tokens.max())}), for example edges = [32, 64, 128], or plan.k",
            code="FB504",
        )
    return _optimal_edges(tokens, k=settings.k)


def _optimal_edges(lengths: Array, *, k: int) -> list[int]:
    width = int(lengths.max()) // MAX_BINS + 1
    counts = np.zeros(MAX_BINS, dtype=np.int64)
    for start in range(0, len(lengths), _PIECE):
        counts += np.bincount(lengths[start : start + _PIECE] // width, minlength=MAX_BINS)
    held = np.flatnonzero(counts)
    tops = (held + 1) * width
    return [int(tops[last]) for last in optimal_cuts(counts[held], tops, k=k)]


def optimal_cuts(counts: Array, tops: Array, *, k: int) -> list[int]:
    """Returns the last bin of each of min(k, num_bins) buckets that together pad the least.

    counts: int64 [num_bins], samples a bin, each above 0. tops: int64 [num_bins], the lengths that bins end at, rising.
    The least is exact for samples padded to the upper edge of their bucket, sum over buckets of samples * edge: what a
    batch under a budget is sized by, and what the longest of a batch comes close to. Dynamic programme over (buckets,
    last bin), O(k * num_bins^2), in integers: the same edges on every machine; of equal ones those with the shorter
    first buckets.
    """
    num_bins = len(counts)
    below = np.concatenate(([0], np.cumsum(counts)))
    # Entry [first, last]: the cost of one bucket of these bins.
    cost = (below[1:] - below[:-1, None]) * tops
    impossible = np.iinfo(np.int64).max // 4
    cost[np.tril_indices(num_bins, -1)] = impossible
    best = cost[0]
    firsts: list[Array] = []
    for _ in range(min(k, num_bins) - 1):
        # Bins before `first` are in one bucket less.
        total = np.concatenate(([impossible], best[:-1]))[:, None] + cost
        firsts.append(total.argmin(axis=0))
        best = np.minimum(total.min(axis=0), impossible)
    cuts = [num_bins - 1]
    for chosen in reversed(firsts):
        cuts.append(int(chosen[cuts[-1]]) - 1)
    return cuts[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The limit on the size of one bucket's batches.

    samples: that it holds. length: in audio samples, its upper edge; of the last, open-ended bucket the longest sample;
    None where its samples have no audio.
    tokens: the most tokens that a sample of it has; None where they are not known.
    """

    samples: int
    length: int | None
    tokens: int | None = None


def batch_sizes(
    settings: BucketConfig, limits: Sequence[Limit], *, sample_rate_hz: int, edges_s: Sequence[float] = ()
) -> list[int]:
    """Returns the samples a micro-batch of each bucket. edges_s: the upper edges, which a calibration names them by.

    Under a budget floor(budget / longest), at least 1, so that only a sample that is itself over the budget exceeds it;
    under two budgets the smaller size. Many narrow buckets would have many incomplete batches: with `k` a bucket's size
    is lowered to the least that gives as many batches, so that its last one is nearly full too. Raises PlanError where
    a table is not one of these buckets, or tokens are missing.
    """
    if settings.calibration is not None:
        return [
            entry["batch_size"]
            for entry in calibrated(settings.calibration, bucket_names(edges_s, num_buckets=len(limits)))
        ]
    if isinstance(settings.batch_size, tuple):
        if len(settings.batch_size) != len(limits):
            raise PlanError(
                f"plan.batch_size has {len(settings.batch_size)} entries, these lengths have {len(limits)} buckets; "
                "lower plan.k, or give one number",
                code="FB505",
            )
        return list(settings.batch_size)
    if settings.batch_size is not None:
        return [settings.batch_size] * len(limits)
    sizes = [max(1, _affordable(settings, limit, sample_rate_hz)) for limit in limits]
    if settings.k is None:
        return sizes
    return [_even(limit.samples, size) for limit, size in zip(limits, sizes, strict=True)]


def _even(samples: int, size: int) -> int:
    """Returns the least size with which the samples make no more batches."""
    batches = max(-(-samples // size), 1)
    return max(-(-samples // batches), 1)


def _affordable(settings: BucketConfig, limit: Limit, sample_rate_hz: int) -> int:
    sizes = []
    if limit.length is None and settings.batch_tokens is None:
        raise PlanError(
            f"plan.batch_seconds = {settings.batch_seconds} is no budget for {limit.samples} samples without audio; "
            "give plan.batch_tokens, beside it or alone",
            code="FB504",
        )
    if settings.batch_seconds is not None and limit.length is not None:
        sizes.append(math.floor(Fraction(repr(settings.batch_seconds)) * sample_rate_hz / max(limit.length, 1)))
    if settings.batch_tokens is not None:
        if limit.tokens is None:
            raise PlanError(
                "plan.batch_tokens needs a cache with tokens: add a [text] section, or use plan.batch_seconds",
                code="FB504",
            )
        sizes.append(settings.batch_tokens // max(limit.tokens, 1))
    return min(sizes)


_PIECE = 2**20


def bucket_plan(
    durations: Array,
    *,
    sample_rate_hz: int,
    settings: BucketConfig,
    tokens: Array | None = None,
    shards: Array | None = None,
    shard_run: int = 1,
    texts: Array | None = None,
) -> BucketPlan:
    """Returns the plan in which every sample is in exactly one bucket.

    durations: integers [num_samples], in audio samples. Bucket b holds [edge b-1, edge b); the last one is open-ended,
    so that what is longer than every edge stays.
    tokens: integers [num_samples], label tokens, for `batch_tokens`. shards: integers [num_samples], the shard that
    each sample lies in, for `locality`; shard_run: see there. texts: bool [num_samples], the samples without audio,
    where there are some: they have buckets of their own by tokens, behind those by duration, which are left out where
    no sample has audio.
    Raises PlanError for no samples, a negative duration (with its index), a table of other buckets, missing tokens or
    shards, or when `drop` leaves no batch at all.
    """
    durations = np.asarray(durations)
    check_lengths(durations, settings)
    _check_edges(settings.edges_s)
    is_heard = texts is None or not texts.all()
    heard = durations if texts is None else durations[~texts]
    edges = bucket_edges(heard, sample_rate_hz=sample_rate_hz, settings=settings) if is_heard else []
    read = _tokens_of(texts, tokens)
    text_edges = token_edges(read, settings=settings) if len(read) else []
    buckets, counts = _buckets(durations, edges, num_buckets=len(edges) + len(text_edges))
    if texts is not None and text_edges:
        buckets[texts] = len(edges) + np.searchsorted(text_edges[:-1], read, side="right")
        counts = np.bincount(buckets, minlength=len(counts))
    local = settings.locality_shards is not None
    members = _by_bucket(buckets, counts, line=_shard_line(shards, len(durations)) if local else None)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    tops: list[int | None] = [*edges, *[None] * len(text_edges)]
    if edges and counts[len(edges) - 1]:
        tops[len(edges) - 1] = int(heard.max())
    limits = _limits(tops, counts, tokens=tokens, buckets=buckets)
    edges_s = settings.edges_s if settings.k is None and edges else tuple(edge / sample_rate_hz for edge in edges)
    sizes = batch_sizes(settings, limits, sample_rate_hz=sample_rate_hz, edges_s=edges_s)
    plan = BucketPlan(
        members=members,
        offsets=offsets,
        batch_sizes=np.array(sizes, dtype=np.int64),
        edges_s=edges_s,
        sample_rate_hz=sample_rate_hz,
        lockstep=settings.lockstep,
        tail=settings.tail,
        grad_accs=grad_accs(settings, edges_s=edges_s, num_buckets=len(counts)),
        shard_counts=_shard_counts(shards, buckets, len(counts)) if local and shards is not None else None,
        locality_shards=settings.locality_shards,
        shard_run=max(1, min(shard_run, (settings.locality_shards or 0) // 2)),
        edges=tuple(text_edges),
    )
    if plan.num_batches == 0:
        raise PlanError(
            f'plan.tail = "drop" leaves none of {len(durations)} samples: no bucket fills a batch of '
            f'{plan.batch_sizes.tolist()} (samples a bucket: {counts.tolist()}); set plan.tail = "split"',
            code="FB502",
        )
    return plan


def check_lengths(durations: Array, settings: LengthsConfig) -> None:
    """Raises PlanError for lengths and settings that no plan can be made of."""
    if durations.ndim != 1 or durations.dtype.kind not in "iu":
        raise PlanError(f"durations are {durations.dtype} {list(durations.shape)}, wanted integers [num_samples]")
    if len(durations) == 0:
        raise PlanError("no samples to plan: the cache or the filters in [source] leave none", code="FB501")
    if durations.min() < 0:
        index = int(np.argmax(durations < 0))
        raise PlanError(f"duration of sample {index} is {int(durations[index])}, wanted 0 or more")
    if settings.batch_seconds is not None and not math.isfinite(settings.batch_seconds):
        raise PlanError(f"plan.batch_seconds must be finite, got {settings.batch_seconds}")


def _check_edges(edges_s: Sequence[float]) -> None:
    if not all(math.isfinite(edge) for edge in edges_s):
        raise PlanError(f"plan.edges_s must be finite, got {list(edges_s)}; the last bucket is open-ended anyway")
    if len(edges_s) > 2**16:
        raise PlanError(f"plan.edges_s has {len(edges_s)} edges, at most 65536 are possible")


def _tokens_of(texts: Array | None, tokens: Array | None) -> Array:
    if texts is None or not texts.any():
        return np.zeros(0, np.int64)
    if tokens is None:
        raise PlanError(
            f"{int(texts.sum())} samples have no audio and no tokens: they have no length to plan by", code="FB504"
        )
    return tokens[texts]


def _buckets(durations: Array, edges: Sequence[int], *, num_buckets: int) -> tuple[Array, Array]:
    """Returns the bucket of every sample, and the samples of every bucket.

    Small unsigned integers: numpy sorts them stably by radix, in linear time. In pieces: numpy's own results are int64.
    """
    inner = np.array(edges[:-1], dtype=np.int64)
    buckets = np.empty(len(durations), dtype=np.uint16 if num_buckets > 256 else np.uint8)
    counts = np.zeros(num_buckets, dtype=np.int64)
    for start in range(0, len(durations), _PIECE):
        piece = np.searchsorted(inner, durations[start : start + _PIECE], side="right")
        buckets[start : start + _PIECE] = piece
        counts += np.bincount(piece, minlength=num_buckets)
    return buckets, counts


def _by_bucket(buckets: Array, counts: Array, *, line: Array | None) -> Array:
    """Returns the sample indices bucket by bucket, inside one in the order of `line`, rising where that is left out.

    A counting sort in pieces: a sort of all at once would hold the indices three times, as int64.
    """
    members = np.empty(len(buckets), dtype=np.int32 if len(buckets) < 2**31 else np.int64)
    ends = np.cumsum(counts) - counts
    for start in range(0, len(buckets), _PIECE):
        own = slice(start, start + _PIECE) if line is None else line[start : start + _PIECE]
        piece = buckets[own]
        order = np.argsort(piece, kind="stable")
        found = order + start if line is None else line[start : start + _PIECE][order]
        parts = np.bincount(piece, minlength=len(counts))
        stops = np.cumsum(parts)
        for bucket in np.flatnonzero(parts).tolist():
            size, stop = int(parts[bucket]), int(stops[bucket])
            members[ends[bucket] : ends[bucket] + size] = found[stop - size : stop]
        ends += parts
    return members


def _shard_line(shards: Array | None, num_samples: int) -> Array:
    """Returns the samples shard by shard, rising inside one."""
    if shards is None:
        raise PlanError(
            'plan.locality needs a cache, whose samples lie in shards; set plan.locality = "global"', code="FB504"
        )
    if len(shards) != num_samples:
        raise PlanError(f"shards holds {len(shards)} samples, durations {num_samples}")
    return np.argsort(shards, kind="stable")


def _shard_counts(shards: Array, buckets: Array, num_buckets: int) -> Array:
    num_shards = int(shards.max()) + 1
    counts = np.zeros(num_shards * num_buckets, dtype=np.int32)
    for start in range(0, len(shards), _PIECE):
        cells = shards[start : start + _PIECE].astype(np.int64) * num_buckets + buckets[start : start + _PIECE]
        found, times = np.unique(cells, return_counts=True)
        counts[found] += times.astype(np.int32)
    return counts.reshape(num_shards, num_buckets)


def _limits(tops: Sequence[int | None], counts: Array, *, tokens: Array | None, buckets: Array) -> list[Limit]:
    """Returns what limits each bucket's batches; the last bucket is open-ended, so there its longest sample does."""
    if tokens is None:
        return [Limit(samples=int(n), length=top) for n, top in zip(counts, tops, strict=True)]
    if len(tokens) != len(buckets):
        raise PlanError(f"tokens holds {len(tokens)} samples, durations {len(buckets)}")
    most = np.zeros(len(tops), dtype=np.int64)
    np.maximum.at(most, buckets, tokens)
    return [Limit(samples=int(n), length=top, tokens=int(t)) for n, top, t in zip(counts, tops, most, strict=True)]
