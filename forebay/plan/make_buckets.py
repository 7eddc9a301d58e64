"""Lengths become a plan of buckets: their edges, and how many samples of each form a micro-batch.

Buckets end at the configured edges, or at `k` edges that leave the least padding, of one length alone, or of seconds
and label tokens together. The cost of a sample is what it is padded to: the upper edges of its bucket. One length gives
buckets, two give cells: each range of seconds has token edges of its own, and a dynamic programme says how many. All in
integers, so that every machine finds the same edges. A micro-batch is as large as a budget, a count or a calibrated
table says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from forebay.config.plan import BucketConfig, BucketRange, LengthsConfig, bucket_ranges
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan, calibrated, grad_accs, token_cost
from forebay.store.layout import Array

MAX_BINS = 1024
"""Of the histogram that edges are chosen on: 30 ms apart for 30 s. Twice as many gain 0.004 points of padding."""
CANDIDATES = 64
"""Edges on each axis that cells may have: the optimal ones of that axis alone. Twice as many gain 0.1 point of cost."""
PIECE = 2**20
"""Samples looked at in one go: numpy's own results are int64."""
IMPOSSIBLE = np.iinfo(np.int64).max // 4


def optimal_edges(lengths: Array, *, k: int) -> list[int]:
    """Returns the upper edges, rising, of at most `k` buckets of lengths, integers [num_samples]."""
    width = int(lengths.max()) // MAX_BINS + 1
    counts = np.zeros(MAX_BINS, dtype=np.int64)
    for start in range(0, len(lengths), PIECE):
        counts += np.bincount(lengths[start : start + PIECE] // width, minlength=MAX_BINS)
    held = np.flatnonzero(counts)
    tops = (held + 1) * width
    return [int(tops[last]) for last in optimal_cuts(counts[held], tops, k=k)]


def optimal_cells(
    durations: Array, tokens: Array, *, token_cost: int, k: int
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Returns the upper edges of ranges of durations, and for each its upper edges in tokens: at most `k` cells.

    durations, tokens: integers [num_samples], not empty. token_cost: of a token, in units of a duration. The least is
    exact for samples padded to the upper edges of their cell, where an axis has at most `CANDIDATES` lengths.
    """
    edges, token_edges = optimal_edges(durations, k=CANDIDATES), optimal_edges(tokens, k=CANDIDATES)
    shape = len(edges), len(token_edges)
    counts = np.zeros(shape, dtype=np.int64)
    for start in range(0, len(durations), PIECE):
        pairs = zip((edges, token_edges), (durations, tokens), strict=True)
        rows, columns = (np.searchsorted(tops, found[start : start + PIECE], side="right") for tops, found in pairs)
        counts += np.bincount(rows * shape[1] + columns, minlength=counts.size).reshape(shape)
    tops, token_tops = np.array(edges), np.array(token_edges)
    padded = _costs(counts.sum(1), tops) + token_cost * _least_tokens(counts, token_tops, k=k)
    found_edges, cells, first = [], [], 0
    for last, number in cheapest(padded, k=k):
        own = counts[first : last + 1].sum(0)
        held = np.flatnonzero(own)
        cuts = optimal_cuts(own[held], token_tops[held], k=number)
        found_edges.append(edges[last])
        cells.append(tuple(token_tops[held[cuts]].tolist()))
        first = last + 1
    return found_edges, tuple(cells)


def optimal_cuts(counts: Array, tops: Array, *, k: int) -> list[int]:
    """Returns the last bin of each of min(k, num_bins) buckets that together pad the least.

    counts: int64 [num_bins], samples a bin, each above 0. tops: int64 [num_bins], the lengths that bins end at, rising.
    The least is exact for samples padded to the upper edge of their bucket, sum over buckets of samples * edge: what a
    batch under a budget is sized by, and what the longest of a batch comes close to. O(k * num_bins^2); of equal
    edges those with the shorter first buckets.
    """
    return [last for last, _ in cheapest(_costs(counts, tops)[None], k=k)]


def _costs(counts: Array, tops: Array) -> Array:
    """Returns the cost of one bucket of the bins from `first` to `last`: int64 [first, last]."""
    below = np.concatenate(([0], np.cumsum(counts)))
    cost: Array = (below[1:] - below[:-1, None]) * tops
    cost[np.tril_indices(len(counts), -1)] = IMPOSSIBLE
    return cost


def cheapest(costs: Array, *, k: int) -> list[tuple[int, int]]:
    """Returns the last bin and the cells of each range, where all ranges together cost least with at most `k` cells.

    costs: int64 [most, num_bins, num_bins]: of a range with 1 to `most` cells, by its first and last bin. Dynamic
    programme over (cells so far, last bin).
    """
    most, num_bins = costs.shape[:2]
    start = np.full(num_bins + 1, IMPOSSIBLE)
    start[0] = 0
    best, chosen = [start], [np.zeros(num_bins, np.int64)]
    for cells in range(1, min(k, most * num_bins) + 1):
        # The bins before `first` have the other cells.
        before = np.stack([best[cells - own][:-1] for own in range(1, min(cells, most) + 1)])
        total = (before[:, :, None] + costs[: len(before)]).reshape(-1, num_bins)
        chosen.append(total.argmin(axis=0))
        best.append(np.concatenate(([IMPOSSIBLE], np.minimum(total.min(axis=0), IMPOSSIBLE))))
    left, end, found = int(np.argmin([reached[-1] for reached in best])), num_bins, []
    while end:
        own, first = divmod(int(chosen[left][end - 1]), num_bins)
        found.append((end - 1, own + 1))
        left, end = left - own - 1, first
    return found[::-1]


def _least_tokens(counts: Array, tops: Array, *, k: int) -> Array:
    """Returns the tokens, padded, of ranges with at most 1 to min(k, num_tops) cells: int64 [cells, first, last].

    counts: int64 [num_bins, num_tops]. Ranges that end before they begin have 0.
    """
    num_bins, num_tops = counts.shape
    found = np.zeros((min(k, num_tops), num_bins, num_bins), np.int64)
    for first in range(num_bins):
        own = np.cumsum(counts[first:], axis=0)
        highest = num_tops - 1 - np.argmax(own[:, ::-1] > 0, axis=1)
        costs = np.stack([_costs(row, tops) for row in own])
        best = costs[:, 0]
        for number in range(len(found)):
            found[number, first, first:] = np.take_along_axis(best, highest[:, None], axis=1)[:, 0]
            before = np.concatenate((np.full((len(own), 1), IMPOSSIBLE), best[:, :-1]), axis=1)
            best = np.minimum(best, (before[:, :, None] + costs).min(axis=1))
    return found


def bucket_edges(durations: Array, *, sample_rate_hz: int, settings: BucketConfig) -> list[int]:
    """Returns the upper edges of the buckets, rising, in audio samples; with `k` at most so many as there are lengths.

    Configured edges are compared as the decimals that the config shows: 0.1 s at 16 kHz is 1600 samples.
    """
    if settings.k is None:
        return [math.ceil(Fraction(repr(edge)) * sample_rate_hz) for edge in settings.edges_s]
    return optimal_edges(durations, k=settings.k)


def token_edges(tokens: Array, *, settings: BucketConfig) -> list[int]:
    """Returns the upper edges, in tokens and rising, of buckets of samples without audio: `edges`, else `k` optimal.

    tokens: integers [num_samples], not empty. Raises PlanError where neither is given.
    """
    if settings.edges is not None:
        return list(settings.edges)
    if settings.k is None:
        raise _refused(
            f"{len(tokens)} samples have no audio, so edges_s cannot place them; give plan.edges in tokens (they have "
            f"{int(tokens.min())} to {int(tokens.max())}), for example edges = [32, 64, 128], or plan.k"
        )
    return optimal_edges(tokens, k=settings.k)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The limit on the size of one bucket's batches.

    samples: that it holds. length: in audio samples, its upper edge; of the last, open-ended bucket the longest sample;
    None where its samples have no audio. Of a cell, tokens count in it.
    tokens: the most tokens that a sample of it has; None where they are not known.
    """

    samples: int
    length: int | None
    tokens: int | None = None


def batch_sizes(
    settings: BucketConfig, limits: Sequence[Limit], *, sample_rate_hz: int, ranges: Sequence[BucketRange] = ()
) -> list[int]:
    """Returns the samples a micro-batch of each bucket. ranges: of the buckets, which a calibration names them by.

    Under a budget floor(budget / longest), at least 1, so that only a sample that is itself over the budget exceeds it;
    under two budgets the smaller size. Many narrow buckets would have many incomplete batches: with `k` a bucket's size
    is lowered to the least that gives as many batches, so that its last one is nearly full too. Raises PlanError where
    a table is not one of these buckets, or tokens are missing.
    """
    if settings.calibration is not None:
        return [entry["batch_size"] for entry in calibrated(settings.calibration, ranges)]
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
        raise _refused(
            f"plan.batch_seconds = {settings.batch_seconds} is no budget for {limit.samples} samples without audio; "
            "give plan.batch_tokens, beside it or alone"
        )
    if settings.batch_seconds is not None and limit.length is not None:
        sizes.append(math.floor(Fraction(repr(settings.batch_seconds)) * sample_rate_hz / max(limit.length, 1)))
    if settings.batch_tokens is not None:
        if limit.tokens is None:
            raise _refused(
                "plan.batch_tokens needs a cache with tokens: add a [text] section, or use plan.batch_seconds"
            )
        sizes.append(settings.batch_tokens // max(limit.tokens, 1))
    return min(sizes)


def bucket_plan(
    durations: Array,
    *,
    sample_rate_hz: int,
    settings: BucketConfig,
    tokens: Array | None = None,
    shards: Array | None = None,
    shard_run: int = 1,
    texts: Array | None = None,
    shapes: Sequence[str] = (),
) -> BucketPlan:
    """Returns the plan in which every sample is in exactly one bucket.

    durations: integers [num_samples], in audio samples. Bucket b holds [edge b-1, edge b); the last one is open-ended,
    so that what is longer than every edge stays.
    tokens: integers [num_samples], label tokens, for `batch_tokens`. shards: integers [num_samples], the shard that
    each sample lies in, for `locality`; shard_run: see there. texts: bool [num_samples], the samples without audio,
    where there are some: they have buckets of their own by tokens, behind those by duration, which are left out where
    no sample has audio. shapes: names of the buckets by tokens, where these are shapes.
    Raises PlanError for no samples, a negative duration (with its index), a table of other buckets, missing tokens or
    shards, or when `drop` leaves no batch at all.
    """
    durations = np.asarray(durations)
    check_lengths(durations, settings)
    _check_edges(settings.edges_s)
    edges, cells = _timed_edges(durations, tokens, texts, sample_rate_hz=sample_rate_hz, settings=settings)
    num_timed = sum(map(len, cells)) or len(edges)
    read = _tokens_of(texts, tokens)
    text_edges = token_edges(read, settings=settings) if len(read) else []
    buckets, counts = _buckets(durations, edges, cells, tokens=tokens, num_buckets=num_timed + len(text_edges))
    if texts is not None and text_edges:
        buckets[texts] = num_timed + np.searchsorted(text_edges[:-1], read, side="right")
        counts = np.bincount(buckets, minlength=len(counts))
    local = settings.locality_shards is not None
    members = _by_bucket(buckets, counts, line=_shard_line(shards, len(durations)) if local else None)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    tops: list[int | None] = [
        *_tops(edges, cells, lambda own: durations[members[own]], offsets),
        *[None] * len(text_edges),
    ]
    cost = token_cost(settings, sample_rate_hz)
    limits = _limits(tops, counts, tokens=tokens, buckets=buckets, cost=cost)
    edges_s = settings.edges_s if settings.k is None and edges else tuple(edge / sample_rate_hz for edge in edges)
    ranges = bucket_ranges(edges_s, cells=cells, edges=text_edges, shapes=shapes)
    sizes = batch_sizes(settings, limits, sample_rate_hz=sample_rate_hz, ranges=ranges)
    plan = BucketPlan(
        members=members,
        offsets=offsets,
        batch_sizes=np.array(sizes, dtype=np.int64),
        edges_s=edges_s,
        sample_rate_hz=sample_rate_hz,
        lockstep=settings.lockstep,
        tail=settings.tail,
        grad_accs=grad_accs(settings, ranges),
        shard_counts=_shard_counts(shards, buckets, len(counts)) if local and shards is not None else None,
        locality_shards=settings.locality_shards,
        shard_run=max(1, min(shard_run, (settings.locality_shards or 0) // 2)),
        edges=tuple(text_edges),
        cells=cells,
        shapes=tuple(shapes),
        token_cost=cost,
    )
    if plan.num_batches == 0:
        raise PlanError(
            f'plan.tail = "drop" leaves none of {len(durations)} samples: no bucket fills a batch of '
            f'{plan.batch_sizes.tolist()} (samples a bucket: {counts.tolist()}); set plan.tail = "split"',
            code="FB502",
        )
    return plan


def _timed_edges(
    durations: Array, tokens: Array | None, texts: Array | None, *, sample_rate_hz: int, settings: BucketConfig
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Returns the upper edges of the samples with audio, in audio samples, and those of their cells, in tokens."""
    if settings.has_cells:
        return _cells(durations, tokens, texts, sample_rate_hz=sample_rate_hz, settings=settings)
    heard = durations if texts is None else durations[~texts]
    return bucket_edges(heard, sample_rate_hz=sample_rate_hz, settings=settings) if len(heard) else [], ()


def _tops(
    edges: Sequence[int], cells: Sequence[Sequence[int]], lengths: Callable[[slice], Array], offsets: Array
) -> list[int]:
    """Returns the longest audio that each bucket may hold: its upper edge; of the last, open ones their longest sample.

    lengths: gives the durations of places in the order of the buckets, whose bounds `offsets` are.
    """
    repeats = [len(own) for own in cells] or [1] * len(edges)
    tops: list[int] = np.repeat(edges, repeats).tolist() if repeats else []
    for last in range(len(tops) - repeats[-1], len(tops)) if repeats else ():
        if offsets[last] < offsets[last + 1]:
            tops[last] = int(lengths(slice(offsets[last], offsets[last + 1])).max())
    return tops


def _cells(
    durations: Array, tokens: Array | None, texts: Array | None, *, sample_rate_hz: int, settings: BucketConfig
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Returns the upper edges in audio samples, and in tokens of each range, of the samples with audio.

    Raises PlanError where there are none, or no tokens.
    """
    missing = "audio" if texts is not None and texts.all() else "tokens" if tokens is None else None
    if missing is not None:
        raise _refused(
            f"plan.by is of duration and tokens, and none of {len(durations)} samples has {missing}; leave plan.by out"
            + (", or add a [text] section" if missing == "tokens" else " and give plan.k, or plan.edges in tokens")
        )
    if settings.k is None:
        edges = bucket_edges(durations, sample_rate_hz=sample_rate_hz, settings=settings)
        return edges, (tuple(settings.edges or ()),) * len(edges)
    own = slice(None) if texts is None else ~texts
    cost = token_cost(settings, sample_rate_hz)
    return optimal_cells(durations[own], np.asarray(tokens)[own], token_cost=cost, k=settings.k)


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
        raise _refused(f"{int(texts.sum())} samples have no audio and no tokens: they have no length to plan by")
    return tokens[texts]


def _buckets(
    durations: Array,
    edges: Sequence[int],
    cells: Sequence[Sequence[int]],
    *,
    tokens: Array | None,
    num_buckets: int,
) -> tuple[Array, Array]:
    """Returns the bucket of every sample, and the samples of every bucket.

    A cell is found by one number: those of a range of seconds lie above those of the range before, by its tokens.
    Small unsigned integers: numpy sorts them stably by radix, in linear time. In pieces: numpy's own results are int64.
    """
    inner = np.array(edges[:-1], dtype=np.int64)
    buckets = np.empty(len(durations), dtype=np.uint16 if num_buckets > 256 else np.uint8)
    counts = np.zeros(num_buckets, dtype=np.int64)
    above = 0 if tokens is None else max(int(tokens.max(initial=0)), *(own[-1] for own in cells), 0) + 1
    tops = [row * above + top for row, own in enumerate(cells) for top in (*own[:-1], above)]
    for start in range(0, len(durations), PIECE):
        piece = np.searchsorted(inner, durations[start : start + PIECE], side="right")
        if tokens is not None and cells:
            piece = np.searchsorted(tops[:-1], piece * above + tokens[start : start + PIECE], side="right")
        buckets[start : start + PIECE] = piece
        counts += np.bincount(piece, minlength=num_buckets)
    return buckets, counts


def _by_bucket(buckets: Array, counts: Array, *, line: Array | None) -> Array:
    """Returns the sample indices bucket by bucket, inside one in the order of `line`, rising where that is left out.

    A counting sort in pieces: a sort of all at once would hold the indices three times, as int64.
    """
    members = np.empty(len(buckets), dtype=np.int32 if len(buckets) < 2**31 else np.int64)
    ends = np.cumsum(counts) - counts
    for start in range(0, len(buckets), PIECE):
        own = slice(start, start + PIECE) if line is None else line[start : start + PIECE]
        piece = buckets[own]
        order = np.argsort(piece, kind="stable")
        found = order + start if line is None else line[start : start + PIECE][order]
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
        raise _refused('plan.locality needs a cache, whose samples lie in shards; set plan.locality = "global"')
    if len(shards) != num_samples:
        raise PlanError(f"shards holds {len(shards)} samples, durations {num_samples}")
    return np.argsort(shards, kind="stable")


def _shard_counts(shards: Array, buckets: Array, num_buckets: int) -> Array:
    num_shards = int(shards.max()) + 1
    counts = np.zeros(num_shards * num_buckets, dtype=np.int32)
    for start in range(0, len(shards), PIECE):
        cells = shards[start : start + PIECE].astype(np.int64) * num_buckets + buckets[start : start + PIECE]
        found, times = np.unique(cells, return_counts=True)
        counts[found] += times.astype(np.int32)
    return counts.reshape(num_shards, num_buckets)


def _limits(
    tops: Sequence[int | None], counts: Array, *, tokens: Array | None, buckets: Array, cost: int
) -> list[Limit]:
    """Returns what limits each bucket's batches. cost: of a token in audio samples, where buckets are cells, else 0."""
    if tokens is None:
        return [Limit(samples=int(n), length=top) for n, top in zip(counts, tops, strict=True)]
    if len(tokens) != len(buckets):
        raise PlanError(f"tokens holds {len(tokens)} samples, durations {len(buckets)}")
    most = np.zeros(len(tops), dtype=np.int64)
    np.maximum.at(most, buckets, tokens)
    if cost:
        tops = [(top or 0) + cost * int(held) for top, held in zip(tops, most, strict=True)]
    return [Limit(samples=int(n), length=top, tokens=int(t)) for n, top, t in zip(counts, tops, most, strict=True)]


def _refused(what: str) -> PlanError:
    return PlanError(what, code="FB504")
