"""Training steps as the loop does them, on batches of a loader or of the caller's; and the samples that give these.

The doctor's arm of the step: forward, backward and optimizer of the config's model, for shapes of the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.config.plan import PackConfig
from forebay.config.tree import Config
from forebay.measure.batch_search import PACK_UNIT, BucketCase, pack_case
from forebay.measure.cache_arms import plans
from forebay.measure.doctor_bench import Bench
from forebay.measure.machine import peaks, timed
from forebay.measure.predict import PlannedBatch, Skip, StepTime, StepTimes
from forebay.plan.cursor import Cursor
from forebay.plan.interface import Plan
from forebay.store.source import SampleSource, length_of, parts_of, without_audio
from forebay.train.collate.device_features import constants_seen
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.loader import Loader
from forebay.train.loop.launch import make_accelerator
from forebay.train.loop.learner import Learner, Outcome
from forebay.train.loop.schedule import Group, count_samples
from forebay.train.models.families import ModelFacts
from forebay.train.models.model_folder import check_config, check_constants, check_weights, model_facts
from forebay.train.models.objective import Objective
from forebay.train.select import as_stored, select


def checked_model(config: Config) -> ModelFacts:
    """Returns the facts of the config's model, which it names. Raises ConfigError where that cannot be trained."""
    facts = model_facts(Path(str(config.train.model)), config)
    check_config(facts, config)
    check_weights(facts.folder, init=config.train.init)
    return facts


def opened(config: Config) -> SampleSource:
    """Returns the samples of a config's sealed cache, or of those of its mixture.

    Raises CacheNotFoundError, which names the command to run, where it is not there.
    """
    return select(dataclasses.replace(config, loader=dataclasses.replace(config.loader, cache="require")))


def for_trials(config: Config) -> Config:
    """Returns a config whose run neither writes nor evaluates, and whose packs keep their uint8 patches."""
    train = dataclasses.replace(
        config.train,
        max_steps=None,
        epochs=None,
        warmup_steps=0,
        warmup_ratio=None,
        eval=(),
        save_best=None,
        trackers=(),
        output_dir=str(Path(tempfile.gettempdir()) / f"forebay-calibrate-{os.getpid()}"),  # never made
    )
    return as_stored(dataclasses.replace(config, train=train))


class StepRunner:
    """The loop's learner, its model and its optimizer, on a loader's batches or on batches of the caller's."""

    def __init__(
        self, config: Config, facts: ModelFacts, source: SampleSource | None, *, accumulates: bool = False
    ) -> None:
        """Loads the model. config: without `train.epochs`, which only a loader can count.

        source: of the batches; its constants say how patches are expanded. None: there is none.
        accumulates: `step` takes the same micro-batch twice, so that gradients are there.
        Raises CacheMismatchError where the model cannot train on the source.
        """
        for part in [] if source is None else parts_of(source):
            check_constants(facts, constants_seen(config, part.constants))
        has_text_alone = source is not None and without_audio(source) is not None
        accelerator = make_accelerator(config, has_text_alone=has_text_alone, may_rest=facts.own_loss is not None)
        constants = {} if source is None else source.constants
        self._learner = Learner(config, facts=facts, accelerator=accelerator, constants=constants)
        no_loader: Any = None  # by which the steps of epochs would be counted
        self._learner.start(None, loader=no_loader)
        self._objective, self._times, self._count = Objective(facts), 2 if accumulates else 1, 0
        self.device: torch.device = accelerator.device

    @property
    def model(self) -> Any:
        """The model inside of what accelerate made of it."""
        return self._learner._model

    @property
    def optimizer(self) -> Any:
        """The optimizer inside of what accelerate made of it."""
        return self._learner._optimizer.optimizer

    @property
    def mode(self) -> AbstractContextManager[None]:
        """The context that `step` is called under: none."""
        return contextlib.nullcontext()

    def prepared(self, batch: Batch) -> Batch:
        """Returns what `step` takes for a batch: the batch."""
        return batch

    @contextlib.contextmanager
    def groups(self, loader: Loader, plan: Plan) -> Iterator[Iterator[Group]]:
        """Yields the micro-batches of each step of the loader's next epoch, which is that of a plan.

        The loader's buffers stay: it may be the one that stood at another plan before.
        """
        loader.plan, loader.cursor = plan, Cursor(plan, loader.plan_key, seed=loader.settings.seed)
        with contextlib.closing(self._learner.groups(loader)) as found:
            yield found

    def update(self, group: Group) -> Outcome:
        """Returns what came of one more step."""
        self._count += 1
        return self._learner.update(group, step=self._count)

    def measured(self, batch: Batch, steps: int) -> tuple[int, int, float]:
        """Returns both peaks of memory and the median seconds of some steps, the first one left out of these."""
        times_s = [self.step(batch) for _ in range(steps)]
        return *peaks(), round(statistics.median(times_s[1:] or times_s), 4)

    def step(self, batch: Batch) -> float:
        """Returns the seconds of one optimizer step on `batch`, the work of the device included."""
        return timed(lambda: float(self.update(self._group(batch)).loss))[1]  # reading the loss waits for the device

    def _group(self, batch: Batch) -> Group:
        targets, ranks = self._objective.units(fields_of(batch)), self._learner.num_ranks
        return Group(
            batches=[(batch, 1)] * self._times,
            num_targets=max(targets * self._times * ranks, 1),
            num_samples=count_samples(batch) * self._times * ranks,
            wait_s=0.0,
        )


_SHAPES = 3


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
    while not wall or (time.perf_counter() + first_s < ends and len(wall) < 20):
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
