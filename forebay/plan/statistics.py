"""The cost of a plan, exactly, for one epoch (`packing_stats.json`): padding or fill, shapes, counts and randomness.

Padding is the share of padded frames where each batch is padded to its own longest sample, fill the share of tokens in
the room of the packs. Randomness is how far the order of an epoch is from the order in which samples are stored.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from forebay.config.plan import BucketRange
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan, Order
from forebay.plan.cursor import mixed_steps, num_fillers, num_steps
from forebay.plan.interface import EpochOrder, Plan, Tail
from forebay.plan.pack.pack_plan import PackPlan
from forebay.plan.permutation import Permutations, derive_key
from forebay.plan.window import WindowOrder, WindowPlan
from forebay.store.key import COUNT, NUMBER, TEXT, Check, list_of, map_of, or_null, record
from forebay.store.layout import Array, Ints

WORLD_SIZES = (1, 2, 4, 8)
_PACKS_AT_ONCE = 2**12
_BINS = 32


def batch_statistics(
    plan: BucketPlan | WindowPlan,
    durations: Array,
    *,
    frames: Array | None = None,
    tokens: Array | None = None,
    shards: Array | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Returns the document of packing_stats.json: figures of epoch 0 under `seed`, every batch looked at.

    durations: integers [num_samples], in audio samples, those that the plan was made from.
    frames: integers [num_samples], of what is padded (feature frames); left out: the durations. tokens: the same of
    labels, for `token_padding` where buckets are cells.
    shards: integers [num_samples], the shard of each sample, for `shard_spread`.
    Padding is the share of padded frames in all frames, each batch padded to its own longest sample, and `cv` the
    spread of a batch's padded frames (standard deviation over mean, incomplete batches included);
    `padding_random_order` is the share of a shuffle without buckets at the same mean batch size. `worlds` says, for W
    ranks, the steps an epoch, those in which the ranks hold batches of more than one bucket, and what becomes of the
    epoch's end. `dropped` and `repeated` are samples (the end of a bucket), `*_batches` micro-batches (the end of the
    epoch). `mean_displacement` and `shard_spread`: see `Randomness`.
    Hours count each sample once; durations are in seconds. O(num_samples) time.
    """
    durations = np.asarray(durations)
    frames = durations if frames is None else np.asarray(frames)
    _require_samples(len(plan.members), durations=durations, frames=frames, tokens=tokens, shards=shards)
    order = plan.order(seed, 0)
    randomness = Randomness(len(durations), shards=shards)
    if isinstance(order, WindowOrder):
        counted = [_window_padding(order, frames, randomness)]
    else:
        places = _batch_places(order)
        counted = [_bucket_padding(order, bucket, frames, places[bucket], randomness) for bucket in range(len(places))]
    token_padding: list[Padding] = []
    if tokens is not None and isinstance(order, Order) and order.plan.cells:
        token_padding = [_bucket_padding(order, bucket, tokens) for bucket in range(len(counted))]
    total = int(durations.sum(dtype=np.int64))
    dropped, repeated = int(np.sum(plan.dropped)), int(np.sum(plan.repeated))
    mean_size = max(1, round((len(durations) - dropped + repeated) / len(order)))
    padding = sum(counted, Padding())
    return {
        "seed": seed,
        "total_samples": len(durations),
        "total_hours": _hours(total, plan.sample_rate_hz),
        "total_batches": len(order),
        "mean_batch_size": mean_size,
        "padding": padding.share,
        **({"token_padding": sum(token_padding, Padding()).share} if token_padding else {}),
        "cv": padding.cv,
        "padding_random_order": padding_random_order(frames, mean_size, seed=seed).share,
        "dropped": dropped,
        "repeated": repeated,
        **_of_order(plan, order, randomness),
        "buckets": _buckets(plan, durations, counted, token_padding) if isinstance(plan, BucketPlan) else [],
    }


def _buckets(
    plan: BucketPlan, durations: Array, counted: list[Padding], token_padding: list[Padding]
) -> list[dict[str, Any]]:
    total = int(durations.sum(dtype=np.int64))
    found = [_bucket(plan, number, each, durations, total, counted[number]) for number, each in enumerate(plan.ranges)]
    for bucket, each, padding in zip(found, plan.ranges, token_padding, strict=False):
        bucket.update(tokens=None if each.seconds is None else list(each.tokens or ()), token_padding=padding.share)
    return found


def _bucket(
    plan: BucketPlan, bucket: int, holds: BucketRange, durations: Array, total: int, found: Padding
) -> dict[str, Any]:
    own = durations[plan.members[plan.offsets[bucket] : plan.offsets[bucket + 1]]]
    held = int(own.sum(dtype=np.int64))
    low, high = holds.seconds or holds.tokens or (0, 0)
    described = {
        "bucket_id": bucket,
        "range": f"{float(low)}-{float(high)}s" if holds.seconds else holds.shape or f"{low}-{high} tokens",
        "samples": len(own),
        "hours": _hours(held, plan.sample_rate_hz),
        "pct_samples": round(100 * len(own) / len(durations), 4),
        "pct_hours": round(100 * held / total, 4) if total else 0.0,
        "mean_duration": round(held / len(own) / plan.sample_rate_hz, 4) if len(own) else 0.0,
        "max_duration": round(int(own.max(initial=0)) / plan.sample_rate_hz, 4),
        "batch_size": int(plan.batch_sizes[bucket]),
        "batches": int(plan.batch_counts[bucket]),
        "padding": found.share,
        "dropped": int(plan.dropped[bucket]),
        "repeated": int(plan.repeated[bucket]),
    }
    return described if plan.grad_accs is None else {**described, "grad_acc": plan.grad_accs[bucket]}


def pack_statistics(
    plan: PackPlan,
    tokens: Array,
    *,
    patches: Array | None = None,
    frames: Array | None = None,
    images: Array | None = None,
    shards: Array | None = None,
) -> dict[str, Any]:
    """Returns the document of packing_stats.json; what depends on the order is of epoch 0 under seed 0.

    tokens, patches, frames, images: integers [num_samples], those that the plan was made from; shards: integers
    [num_samples], the shard of each sample, for `shard_spread`.
    `fill` is the share of tokens in all packs' `seq_len`, `pad_tokens` the rest, `patch_fill` the share of patches in
    all packs' `max_patches` (null without), `frame_fill` that of frames in `max_frames` (absent without). `samples`,
    `tokens`, `patches`, `frames` and `images` are of a pack: mean, least, most and a histogram, `counts[i]` packs from
    `edges[i]` up to below `edges[i + 1]`, the last one included.
    `unplaced` counts the samples in no pack by reason, `dropped` all of them. `cut` is of `CutSamples`, absent without.
    `worlds` as in `batch_statistics`; `mean_displacement` and `shard_spread`: see `Randomness`. O(num_samples) time.
    Raises PlanError for lengths of other samples.
    """
    given = {"tokens": tokens, "patches": patches, "frames": frames, "images": images}
    _require_samples(plan.num_samples, **given, shards=shards)
    lengths = {name: np.asarray(found) for name, found in given.items() if found is not None}
    order = plan.order(0, 0)
    held = {name: np.empty(len(order), dtype=np.int64) for name in lengths}
    randomness = Randomness(plan.num_samples, shards=shards)
    for start in range(0, len(order), _PACKS_AT_ONCE):
        packs = order.batches(np.arange(start, min(start + _PACKS_AT_ONCE, len(order))))
        samples = np.concatenate(packs)
        begins = np.cumsum([0, *(len(pack) for pack in packs[:-1])])
        for name, found in lengths.items():
            held[name][start : start + len(packs)] = np.add.reduceat(found[samples], begins, dtype=np.int64)
        randomness.add(samples)
    room = len(order) * plan.settings.seq_len
    total = int(held["tokens"].sum())
    fills = {
        unit: round(int(held[unit].sum()) / (len(order) * most), 6)
        for unit, most in plan.settings.budgets.items()
        if unit in held
    }
    unplaced = {reason: len(found) for reason, found in plan.unplaced.items()}
    return {
        "seed": 0,
        "total_samples": plan.num_samples,
        "total_packs": len(order),
        "fill": round(total / room, 6),
        "pad_tokens": room - total,
        "patch_fill": fills.get("patches"),
        **({"frame_fill": fills["frames"]} if "frames" in fills else {}),
        "samples": _figures(np.diff(plan.offsets)),
        **{name: _figures(found) for name, found in held.items()},
        "unplaced": unplaced,
        "dropped": sum(unplaced.values()),
        **({"cut": dict(plan.cut)} if plan.cut else {}),
        **_of_order(plan, order, randomness),
    }


def _require_samples(count: int, **lengths: Array | None) -> None:
    for name, found in lengths.items():
        if found is not None and len(found) != count:
            raise PlanError(f"{name} holds {len(found)} samples, the plan {count}")


def _of_order(plan: Plan, order: EpochOrder, randomness: Randomness) -> dict[str, Any]:
    ends = {"lockstep": plan.lockstep, "tail": plan.tail}
    return {**ends, **randomness.to_json(), "worlds": worlds(order, plan.tail)}


def _figures(held: Array) -> dict[str, Any]:
    """Returns mean, extremes and histogram of what packs hold, int64 [num_packs]."""
    low, high = int(held.min()), int(held.max())
    width = -(-(high - low + 1) // _BINS)
    counts = np.bincount((held - low) // width)
    return {
        "mean": round(float(held.mean()), 4),
        "min": low,
        "max": high,
        "histogram": {
            "edges": [min(low + width * number, high) for number in range(len(counts) + 1)],
            "counts": counts.tolist(),
        },
    }


def worlds(order: EpochOrder, tail: Tail) -> dict[str, dict[str, int]]:
    """Returns for each of `WORLD_SIZES` the steps of an epoch, those that mix shapes, and how the epoch ends."""
    count = len(order)
    buckets = order.buckets(np.arange(count))
    found = {}
    for size in WORLD_SIZES:
        steps = num_steps(count, size, tail=tail)
        missing, left_over = max(steps * size - count, 0), max(count - steps * size, 0)
        found[str(size)] = {
            "steps": steps,
            "mixed_steps": mixed_steps(buckets, size, tail=tail),
            "dropped_batches": left_over,
            "repeated_batches": missing if tail == "pad" else 0,
            "weightless_batches": num_fillers(order, size, tail=tail),
        }
    return found


def _batch_places(order: Order) -> list[Array]:
    """Returns for each bucket where its batches begin in the epoch's stream of samples: int64 [num_batches]."""
    buckets, numbers = order.locate(np.arange(len(order)))
    sizes = order.batch_lengths(buckets, numbers)
    starts = np.cumsum(sizes) - sizes
    offsets = np.cumsum(order.plan.batch_counts) - order.plan.batch_counts
    line = np.empty_like(starts)
    line[offsets[buckets] + numbers] = starts
    return np.split(line, offsets[1:])


def _bucket_padding(
    order: Order, bucket: int, frames: Array, places: Array | None = None, randomness: Randomness | None = None
) -> Padding:
    size = int(order.plan.batch_sizes[bucket])
    count = int(order.plan.bucket_sizes[bucket] - order.plan.dropped[bucket] + order.plan.repeated[bucket])
    found = Padding()
    step = max(CHUNK // size, 1) * size
    for start in range(0, count, step):
        line = np.arange(start, min(start + step, count))
        samples = order.samples(bucket, line)
        found += padding_in_line(frames[samples], size)
        if randomness is not None and places is not None:
            batches, inside = np.divmod(line, size)
            randomness.add(samples, places[batches] + inside)
    return found


def _window_padding(order: WindowOrder, frames: Array, randomness: Randomness) -> Padding:
    found = Padding()
    step = order.plan.lockstep * order.plan.batches_per_window
    for start in range(0, len(order), step):
        batches = order.batches(np.arange(start, min(start + step, len(order))))
        found += padding_of(batches, frames)
        randomness.add(np.concatenate(batches))
    return found


def _hours(samples: int, sample_rate_hz: int) -> float:
    return round(samples / sample_rate_hz / 3600, 6)


CHUNK = 2**18
"""Samples looked at in one go: their temporaries stay in the CPU's cache."""
_ENOUGH = 2**22
"""Samples of a shuffle that say what all of it would: its padding is known to a hundredth of a percent."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Sums over some batches: frames held, frames padded to, their squares, and how many batches there are."""

    held: int = 0
    padded_to: int = 0
    squares: float = 0.0
    batches: int = 0

    def __add__(self, other: Padding) -> Padding:
        return Padding(*map(operator.add, astuple(self), astuple(other)))

    @property
    def share(self) -> float:
        """Padded share of all frames."""
        return round(1 - self.held / self.padded_to, 6) if self.padded_to else 0.0

    @property
    def cv(self) -> float:
        """Spread of the padded size of a batch: standard deviation over mean."""
        if not self.padded_to:
            return 0.0
        ratio = self.squares * self.batches / self.padded_to**2
        return round(math.sqrt(max(ratio - 1.0, 0.0)), 4)


def padding_of(batches: Sequence[Ints], frames: Array) -> Padding:
    """Returns the sums of micro-batches, each the sample indices of one, not empty. frames: integers [num_samples]."""
    if not batches:
        return Padding()
    sizes = np.array([len(batch) for batch in batches], dtype=np.int64)
    lengths = frames[np.concatenate(batches)]
    longest = np.maximum.reduceat(lengths, np.cumsum(sizes) - sizes)
    return _summed(lengths, longest.astype(np.int64) * sizes)


def padding_in_line(lengths: Array, size: int) -> Padding:
    """Returns the sums of consecutive batches of `size`, of which the last one may be shorter."""
    full = lengths[: len(lengths) // size * size].reshape(-1, size)
    rest = lengths[full.size :]
    costs = full.max(axis=1, initial=0).astype(np.int64) * size
    if len(rest):
        costs = np.append(costs, int(rest.max()) * len(rest))
    return _summed(lengths, costs)


def padding_random_order(frames: Array, size: int, *, seed: int) -> Padding:
    """Returns the sums of a shuffle without buckets, in batches of `size`; of at most its first 4 million samples."""
    line = Permutations([len(frames)], derive_key("forebay random order", seed))
    found = Padding()
    step = max(CHUNK // size, 1) * size
    count = min(len(frames), _ENOUGH)
    for start in range(0, count, step):
        found += padding_in_line(frames[line(np.arange(start, min(start + step, count)))], size)
    return found


def _summed(lengths: Array, costs: Ints) -> Padding:
    squares = float(np.square(costs.astype(np.float64)).sum())
    return Padding(int(lengths.sum(dtype=np.int64)), int(costs.sum()), squares, len(costs))


class Randomness:
    """Sums over the samples of an epoch, taken in any pieces."""

    def __init__(self, num_samples: int, *, shards: Array | None = None) -> None:
        """shards: integers [num_samples], the shard that holds each sample; None: not known."""
        self._num_samples, self._shards = num_samples, shards
        self._moved, self._taken = 0, 0
        num_shards = int(shards.max()) + 1 if shards is not None else 0
        self._counts, self._sums, self._squares = (np.zeros(num_shards) for _ in range(3))

    def add(self, samples: Ints, places: Ints | None = None) -> None:
        """Counts some samples (indices). places: of each in the epoch's stream; None: behind those that were added."""
        if places is None:
            places = np.arange(self._taken, self._taken + len(samples))
        self._moved += int(np.abs(places - samples).sum())
        self._taken += len(samples)
        if self._shards is None:
            return
        own, where = self._shards[samples], places / self._num_samples
        for total, weights in ((self._counts, None), (self._sums, where), (self._squares, where * where)):
            total += np.bincount(own, weights, minlength=len(total))

    def to_json(self) -> dict[str, float | None]:
        """Returns `mean_displacement` and `shard_spread`, both as shares of the epoch.

        mean_displacement: between where a sample is stored and where it stands; 1/3 when any place is as likely.
        shard_spread: root mean square distance of a sample from the mean place of its shard's samples; 0.289
        (1/sqrt(12)) when a shard's samples are all over the epoch, about N / shards when they stay within N shards;
        None: not known.
        """
        moved = self._moved / max(self._taken * self._num_samples, 1)
        if self._shards is None:
            return {"mean_displacement": round(moved, 4), "shard_spread": None}
        held = self._counts > 0
        inside = self._squares[held] - self._sums[held] ** 2 / self._counts[held]
        spread = math.sqrt(max(float(inside.sum()), 0.0) / max(self._taken, 1))
        return {"mean_displacement": round(moved, 4), "shard_spread": round(spread, 4)}


def _is_histogram(value: Any, where: str) -> None:
    record({"edges": list_of(COUNT), "counts": list_of(COUNT)})(value, where)
    if len(value["edges"]) != len(value["counts"]) + 1:
        raise ValueError(f"{where} has edges for another number of counts")


_PACK_FIGURES = record({"mean": NUMBER, "min": COUNT, "max": COUNT, "histogram": _is_histogram})
_WORLD = record(
    dict.fromkeys(("steps", "mixed_steps", "dropped_batches", "repeated_batches", "weightless_batches"), COUNT)
)
_BUCKET = record(
    {"range": TEXT, "samples": COUNT, "hours": NUMBER, "batch_size": COUNT, "batches": COUNT, "padding": NUMBER},
    {"tokens": or_null(list_of(COUNT)), "token_padding": NUMBER},
)
_COUNTED = {"dropped": COUNT, "repeated": COUNT}

FORM: Check = record(
    {"worlds": map_of(_WORLD)},
    {**_COUNTED, "padding_random_order": NUMBER, "token_padding": NUMBER, "buckets": list_of(_BUCKET)},
)
"""What a reader needs in the document of `batch_statistics`."""

PACK_FORM: Check = record(
    {"worlds": map_of(_WORLD), "pad_tokens": COUNT, "unplaced": map_of(COUNT), "tokens": _PACK_FIGURES},
    {
        **_COUNTED,
        "patch_fill": or_null(NUMBER),
        "frame_fill": NUMBER,
        "cut": map_of(COUNT),
        **dict.fromkeys(("samples", "patches", "frames", "images"), _PACK_FIGURES),
    },
)
"""What a reader needs in the document of `pack_statistics`."""
