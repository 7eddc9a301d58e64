"""The arm of the step: forward, backward and optimizer of the config's model, for shapes of the plan."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

from forebay.config.plan import PackConfig
from forebay.config.tree import Config
from forebay.measure.batch_search import PACK_UNIT, BucketCase, pack_case
from forebay.measure.cache_arms import plans
from forebay.measure.doctor_bench import Bench
from forebay.measure.predict import PlannedBatch, Skip, StepTime, StepTimes
from forebay.measure.step_runner import StepRunner, checked_model, for_trials
from forebay.store.source import length_of

_SHAPES = 3
_MOST_STEPS = 20


def step(bench: Bench, seconds: float) -> StepTimes:
    """Returns what steps of up to three shapes take; the first step of each is not counted."""
    ends, config = time.perf_counter() + seconds, for_trials(bench.config)
    if config.train.model is None:
        raise Skip("the config has no train.model; say what a step of your model takes by --step-s")
    runner = StepRunner(config, checked_model(config), bench.cached)
    shapes = _chosen(plans(bench, 0.0).batches)
    times: list[StepTime] = []
    for left, shape in zip(range(len(shapes), 0, -1), shapes, strict=True):
        now = time.perf_counter()
        if times and now > ends:
            break
        times.append(_timed(runner, _batch(bench, config, shape), shape, ends=now + max(ends - now, 0.0) / left))
    name = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "cpu"
    return StepTimes(device=name, times=tuple(times))


def _chosen(batches: tuple[PlannedBatch, ...]) -> list[PlannedBatch]:
    """Returns a batch of up to three buckets: of that with the most batches, then of the smallest and the largest."""
    by_bucket: dict[int, list[PlannedBatch]] = {}
    for batch in batches:
        by_bucket.setdefault(batch.bucket, []).append(batch)
    middle = {bucket: sorted(own, key=lambda each: each.room)[len(own) // 2] for bucket, own in by_bucket.items()}
    counts = Counter(batch.bucket for batch in batches)
    by_room = sorted(middle, key=lambda bucket: middle[bucket].room)
    order = [counts.most_common(1)[0][0], by_room[0], by_room[-1]]
    return [middle[bucket] for bucket in dict.fromkeys(order)][:_SHAPES]


def _batch(bench: Bench, config: Config, shape: PlannedBatch) -> Any:
    """Returns a batch of a shape: one sample again and again, whose length is that of the batch's longest."""
    source = bench.cached
    if isinstance(config.plan, PackConfig):
        return pack_case(source, config.plan).batch(config, source, max(config.plan.seq_len // PACK_UNIT, 1))
    lengths = length_of(source, "num_frames")
    if not lengths.any():
        lengths = np.asarray(source.lengths["num_tokens"])
    index = int(np.argmin(np.abs(lengths - shape.room / shape.samples)))
    return BucketCase(name="", index=index, seconds=0.0, tokens=0).batch(config, source, shape.samples)


def _timed(runner: StepRunner, batch: Any, shape: PlannedBatch, *, ends: float) -> StepTime:
    first_s = runner.step(batch)
    wall: list[float] = []
    cpu: list[float] = []
    while not wall or (time.perf_counter() + first_s < ends and len(wall) < _MOST_STEPS):
        before = os.times()
        wall.append(runner.step(batch))
        after = os.times()
        cpu.append(after.user + after.system - before.user - before.system)
        if time.perf_counter() > ends:
            break
    return StepTime(
        bucket=shape.bucket,
        samples=shape.samples,
        room=shape.room,
        seconds=statistics.median(wall),
        cpu_s=statistics.fmean(cpu),
        steps=len(wall),
    )
