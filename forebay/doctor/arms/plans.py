"""The arm of plans: the batches of an epoch, and what other settings of `[plan]` would give, over the real lengths."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from forebay.config.plan import CLASSIC_EDGES_S, BucketConfig, PackConfig, PlanConfig, WindowConfig
from forebay.doctor.arms.loaders import makers
from forebay.doctor.bench import Bench
from forebay.doctor.figures import OtherPlan, PlanFacts, PlannedBatch
from forebay.errors import PlanError
from forebay.plan.interface import Plan
from forebay.plan.make import Samples, make_plan, plan_statistics, samples_of
from forebay.plan.pack.plan import PackPlan
from forebay.steps.batch import fresh
from forebay.store.layout import Array
from forebay.store.source import SampleSource, SourceUnion

_FIRST = 512
"""Batches that predictions walk through."""
_MOST_DRAWN = 100_000
"""Samples of a plan whose lengths are drawn from a few."""
_KS = (8, 16, 32, 64)


def plans(bench: Bench, seconds: float) -> PlanFacts:
    """Returns the plan of the config, and the padding of others."""
    ends, settings = time.perf_counter() + seconds, bench.config.plan
    assert settings is not None  # checked before any arm
    source = bench.cached
    is_exact = source is bench.sealed
    samples, plan = samples_of(source), bench.planned.plan
    if not is_exact:
        count = max(len(bench.manifest.rows), len(source))
        samples = drawn(source, min(count, _MOST_DRAWN), bench.random)
        plan = make_plan(samples, _local(settings))
    order = plan.order(bench.config.loader.seed, 0)
    batches = [np.asarray(batch) for batch in order.batches(range(min(len(order), _FIRST)))]
    buckets = order.buckets(np.arange(len(batches)))
    frames = frames_of(samples)
    return PlanFacts(
        num_batches=len(order),
        num_samples=len(samples),
        batches=tuple(
            PlannedBatch(samples=len(batch), frames=int(frames[batch].sum()), room=_room(plan, frames, batch), bucket=b)
            for batch, b in zip(batches, buckets.tolist(), strict=True)
        ),
        padding=_padding(plan, samples),
        is_exact=is_exact,
        room_is_fixed=_room_is_fixed(bench, source),
        others=tuple(_others(settings, samples, ends=ends)),
    )


def drawn(source: SampleSource, count: int, random: np.random.Generator) -> Samples:
    """Returns what a plan of so many samples is made of, whose lengths are those of a few, drawn again and again."""
    known = samples_of(source)
    places = random.integers(0, len(source), count) if count > len(source) else np.arange(len(source))

    def column(name: str) -> Array:
        return np.asarray(source.lengths[name])[places]

    lengths = source.lengths
    return Samples(
        durations=None if known.durations is None else np.asarray(known.durations)[places],
        sample_rate_hz=known.sample_rate_hz,
        frames=(lambda: column("num_frames")) if "num_frames" in lengths else None,
        tokens=lambda: column("num_tokens"),
        patches=(lambda: column("num_patches")) if "num_patches" in lengths else None,
        images=(lambda: column("num_images")) if "num_images" in lengths else None,
        texts=None if known.texts is None else np.asarray(known.texts)[places],
    )


def frames_of(samples: Samples) -> Array:
    """Returns what batches are padded by: stored frames, of packs and texts tokens."""
    if samples.durations is None:
        return samples.lengths
    frames = np.asarray(samples.frames()) if samples.frames is not None else samples.lengths
    if not frames.any() and samples.tokens is not None:
        return np.asarray(samples.tokens())
    return frames


def _room_is_fixed(bench: Bench, source: SampleSource) -> bool:
    """Returns whether audio takes as much room in a batch whatever its length, as Whisper's 30 s do."""
    lengths = np.asarray(source.lengths.get("num_frames", np.zeros(1)))
    if lengths.min() == lengths.max():
        return False
    rooms = []
    for index in (int(lengths.argmin()), int(lengths.argmax())):
        part = source.part(index) if isinstance(source, SourceUnion) else 0
        batch = makers(bench, source)[part].collate([source.read(index)], allocate=fresh)
        rooms.append(sum(value.numel() for value in batch.values() if is_floating(value)))
    return bool(rooms[0] == rooms[1])


def is_floating(value: Any) -> bool:
    """Returns whether a value of a batch is a tensor of features."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _room(plan: Plan, frames: Array, batch: Array) -> int:
    return int(frames[batch].sum() if isinstance(plan, PackPlan) else frames[batch].max() * len(batch))


def _padding(plan: Plan, samples: Samples) -> float:
    found = plan_statistics(plan, samples)  # type: ignore[arg-type]  # of `make_plan`
    return 1 - float(found["fill"]) if "fill" in found else float(found["padding"])


def _local(settings: PlanConfig) -> PlanConfig:
    """Returns settings that need no shards."""
    if isinstance(settings, BucketConfig):
        return dataclasses.replace(settings, locality="global")
    return settings


def _others(settings: PlanConfig, samples: Samples, *, ends: float) -> Iterator[OtherPlan]:
    for changed in candidates(settings):
        try:
            plan = make_plan(samples, _local(dataclasses.replace(settings, **_instead(changed))))
            padding = _padding(plan, samples)
        except (PlanError, ValueError):
            continue  # too few samples for so many buckets
        yield OtherPlan(settings=changed, padding=padding, num_batches=len(plan.order(0, 0)))
        if time.perf_counter() > ends:
            return


def _instead(changed: dict[str, Any]) -> dict[str, Any]:
    """Returns the changes with those that these demand: `k` stands instead of edges."""
    return {**changed, "edges_s": CLASSIC_EDGES_S} if "k" in changed else changed


def candidates(settings: PlanConfig) -> Iterator[dict[str, Any]]:
    """Yields settings that may pad less, as changes of those that are given."""
    if isinstance(settings, BucketConfig) and settings.calibration is None:
        if isinstance(settings.batch_size, tuple):
            return
        for k in _KS:
            if k > (settings.k or len(settings.edges_s)):
                yield {"k": k}
    elif isinstance(settings, WindowConfig):
        for window in (settings.window * 2, settings.window * 4):
            yield {"window": window}
    elif isinstance(settings, PackConfig) and settings.buffer_size:
        yield {"buffer_size": 0}
        yield {"buffer_size": 4 * settings.buffer_size}
