"""The arms over forebay's loader: the config's own way, without its cache, without its buckets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forebay.errors import CacheMismatchError
from forebay.measure.compared_ways import ArmTask, Block, BlockStep, Setup, block_plan
from forebay.measure.machine import device_name, release_memory
from forebay.measure.step_clock import ArmTurn, BlockClock, Shapes, finish, timed
from forebay.measure.step_runner import StepRunner
from forebay.plan.in_order import InOrderPlan
from forebay.store.source import SampleSource, SourceUnion
from forebay.train.collate.patches import fields_of
from forebay.train.models.model_folder import model_facts
from forebay.train.select import make_loader


def work(task: ArmTask, parent: Connection) -> None:
    """Does the turns that the parent asks for, by their number; None ends them."""
    arm = _OwnArm(task)
    parent.send(arm.setup)
    while (number := parent.recv()) is not None:
        parent.send(arm.turn(number))
    parent.send(finish(arm.seen, arm.ready))  # the model is of no use afterwards


class _OwnArm:
    """An arm's loader and learner from its first turn to its last. seen: a micro-batch of each shape."""

    def __init__(self, task: ArmTask) -> None:
        self._blocks = task.random_blocks() if task.arm.is_unbucketed else task.blocks
        config = task.arm_config
        began = time.perf_counter()
        self._loader = make_loader(config, dp_rank=0, dp_world_size=1)
        self._places = places_in(self._loader.source, task.ids)
        data_s = time.perf_counter() - began
        facts, facts_s = timed(partial(model_facts, Path(str(config.train.model)), config))
        self._runner, model_s = timed(partial(StepRunner, config, facts, self._loader.source))
        self.setup = Setup(data_s=data_s, model_s=facts_s + model_s, device=device_name())
        self.seen: dict[Shapes, tuple[int, ...]] = {}

    def turn(self, number: int) -> ArmTurn:
        """Returns what was taken over a block, which the model has learnt from."""
        block, before = self._blocks[number], self._loader.report()
        clock = BlockClock()
        with self._runner.groups(self._loader, self._plan(block)) as groups, clock:
            for step, group in zip(block.steps, groups, strict=False):
                batches = [fields_of(batch) for batch, _ in group.batches]
                clock.got_batches(batches, wait_s=group.wait_s, bucket=step.bucket)
                del batches  # buffers of the loader
                outcome = self._runner.update(group)
                clock.step_done(outcome.loss, bucket=step.bucket, is_skipped=outcome.is_skipped)
        after = self._loader.report()
        frames, padded = (after[name] - before[name] for name in ("frames", "padded_frames"))
        release_memory()
        turn = clock.turn
        turn.frames, turn.room = frames, frames + padded
        turn.ids = sorted(sample_key(self._loader.source, self._places[index]) for index in block.samples)
        self.seen |= zip(turn.shapes, (batch for step in block.steps for batch in step.batches), strict=True)
        return turn

    def ready(self, batch: tuple[int, ...]) -> Callable[[], Any]:
        """Returns a step of one micro-batch, which is loaded."""
        plan = self._plan(Block((BlockStep(bucket=-1, batches=(batch,)),)))
        with self._runner.groups(self._loader, plan) as groups:
            return partial(self._runner.update, next(groups))

    def _plan(self, block: Block) -> InOrderPlan:
        """Returns a block as an epoch of the arm's own source."""
        steps = tuple(
            dataclasses.replace(step, batches=tuple(tuple(self._places[i] for i in batch) for batch in step.batches))
            for step in block.steps
        )
        return block_plan(Block(steps))


def places_in(source: SampleSource, ids: dict[int, str]) -> dict[int, int]:
    """Returns where the samples of some indices of the config's own source stand in another one, found by their ids.

    A source without a cache has samples that a build would leave out.
    """
    if all(index < len(source) and sample_key(source, index) == key for index, key in ids.items()):
        return {index: index for index in ids}
    found = {sample_key(source, place): place for place in range(len(source))}
    for key in ids.values():
        if key not in found:
            raise CacheMismatchError(
                f"sample {key!r} of the cache is not in the raw data, which was changed after the build; run: "
                "forebay preprocess CONFIG",
                code="FB405",
            )
    return {index: found[key] for index, key in ids.items()}


def sample_key(source: SampleSource, index: int) -> str:
    """Returns the id of a sample, of one of several sources with the source's number before the id."""
    own = source.sample_id(index)
    return f"{source.part(index)}/{own}" if isinstance(source, SourceUnion) else own
