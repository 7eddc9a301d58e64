"""What a pack plan costs: fill, padding and counts, exactly (`packing_stats.json`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.config.plan import PackConfig
from forebay.errors import PlanError
from forebay.plan.pack.plan import PackPlan
from forebay.plan.statistics import Randomness, worlds
from forebay.store.layout import Array

_PIECE = 2**12
"""Packs looked at in one go."""


_BINS = 32


def pack_statistics(
    plan: PackPlan,
    tokens: Array,
    *,
    settings: PackConfig,
    patches: Array | None = None,
    images: Array | None = None,
    shards: Array | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Returns the document of packing_stats.json; what depends on the order is of epoch 0 under `seed`.

    tokens, patches, images: integers [num_samples], those that the plan was made from; shards: integers [num_samples], the
    shard of each sample, for `shard_spread`.
    `fill` is the share of tokens in all packs' `seq_len`, `pad_tokens` the rest, `patch_fill` the share of patches in all
    packs' `max_patches` (null without). `samples`, `tokens`, `patches` and `images` are of a pack: mean, least, most and
    a histogram, `counts[i]` packs from `edges[i]` up to below `edges[i + 1]`, the last one included. `unplaced` counts the
    samples in no pack by reason, `dropped` all of them. `worlds` as in `statistics`; `mean_displacement` and
    `shard_spread`: see `forebay.plan.statistics`. O(num_samples) time.
    Raises PlanError for lengths of other samples.
    """
    given = {"tokens": tokens, "patches": patches, "images": images}
    lengths = {name: np.asarray(found) for name, found in given.items() if found is not None}
    for name, found in {**lengths, **({} if shards is None else {"shards": shards})}.items():
        if len(found) != plan.num_samples:
            raise PlanError(f"{name} holds {len(found)} samples, the plan {plan.num_samples}")
    order = plan.order(seed, 0)
    held = {name: np.empty(len(order), dtype=np.int64) for name in lengths}
    randomness, place = Randomness(plan.num_samples, shards=shards), 0
    for start in range(0, len(order), _PIECE):
        packs = order.batches(np.arange(start, min(start + _PIECE, len(order))))
        samples = np.concatenate(packs)
        begins = np.cumsum([0, *(len(pack) for pack in packs[:-1])])
        for name, found in lengths.items():
            held[name][start : start + len(packs)] = np.add.reduceat(found[samples], begins, dtype=np.int64)
        randomness.add(samples, np.arange(place, place + len(samples)))
        place += len(samples)
    room = len(order) * settings.seq_len
    total = int(held["tokens"].sum())
    patch_room = len(order) * (settings.max_patches or 0)
    unplaced = {reason: len(found) for reason, found in plan.unplaced.items()}
    return {
        "seed": seed,
        "total_samples": plan.num_samples,
        "total_packs": len(order),
        "fill": round(total / room, 6),
        "pad_tokens": room - total,
        "patch_fill": round(int(held["patches"].sum()) / patch_room, 6) if patch_room and "patches" in held else None,
        "samples": _figures(np.diff(plan.offsets)),
        **{name: _figures(found) for name, found in held.items()},
        "unplaced": unplaced,
        "dropped": sum(unplaced.values()),
        "lockstep": plan.lockstep,
        "tail": plan.tail,
        **randomness.to_json(),
        "worlds": worlds(order, plan.tail),
    }


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
