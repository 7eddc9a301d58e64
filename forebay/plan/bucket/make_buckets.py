"""Lengths become a plan of buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forebay.config.plan import BucketConfig, LengthsConfig
from forebay.errors import PlanError
from forebay.plan.bucket.bucket_plan import BucketPlan
from forebay.plan.bucket.bucket_sizes import Limit, batch_sizes, bucket_edges, grad_accs, token_edges
from forebay.store.layout import Array

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
