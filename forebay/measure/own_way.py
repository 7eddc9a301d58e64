"""The arms over forebay's loader: the config's own way, without its cache, without its buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from forebay.errors import CacheMismatchError
from forebay.measure.compared_ways import Block, BlockPlan, BlockStep
from forebay.measure.machine import device_name
from forebay.measure.step_clock import (
    ArmFinish,
    ArmTask,
    ArmTurn,
    BlockClock,
    Setup,
    Shapes,
    count_flops,
    finish,
    spread_out,
)
from forebay.plan.cursor import Cursor
from forebay.store.source import SampleSource, SourceUnion, parts_of, without_audio
from forebay.train.collate.patches import fields_of
from forebay.train.loop.launch import make_accelerator
from forebay.train.loop.learner import Learner
from forebay.train.models.model_folder import check_constants, model_facts
from forebay.train.select import make_loader


def work(task: ArmTask, parent: Connection) -> None:
    """Does the turns that the parent asks for, by their number; None ends them."""
    session = OwnSession(task)
    parent.send(session.setup)
    while (number := parent.recv()) is not None:
        parent.send(session.turn(number))
    parent.send(session.finish())


class OwnSession:
    """An arm's loader and learner from its first turn to its last."""

    def __init__(self, task: ArmTask) -> None:
        self._blocks = blocks_of(task)
        config = task.arm_config
        began = time.perf_counter()
        self._loader = make_loader(config, dp_rank=0, dp_world_size=1)
        self._places = places_in(self._loader.source, task.ids)
        data_s = time.perf_counter() - began
        began = time.perf_counter()
        facts, source = model_facts(Path(str(config.train.model)), config), self._loader.source
        for part in parts_of(source):
            check_constants(facts, part.constants)
        accelerator = make_accelerator(config, has_text_alone=without_audio(source) is not None)
        self._learner = Learner(config, facts=facts, accelerator=accelerator, constants=source.constants)
        self._learner.start(None, loader=self._loader)
        self.setup = Setup(data_s=data_s, model_s=time.perf_counter() - began, device=device_name())
        self._step = 0
        self._seen: dict[Shapes, tuple[int, ...]] = {}
        """A micro-batch of each shape."""

    def turn(self, number: int) -> ArmTurn:
        """Returns what was taken over a block, which the model has learnt from."""
        block = self._blocks[number]
        self._stand_at(block)
        before = self._loader.report()
        clock = BlockClock()
        with contextlib.closing(self._learner.groups(self._loader)) as groups, clock:
            for step, group in zip(block.steps, groups, strict=False):
                batches = [fields_of(batch) for batch, _ in group.batches]
                clock.got_batches(batches, wait_s=group.wait_s, bucket=step.bucket)
                del batches  # buffers of the loader
                self._step += 1
                outcome = self._learner.update(group, step=self._step)
                clock.step_done(outcome.loss, bucket=step.bucket, is_skipped=outcome.is_skipped)
        after = self._loader.report()
        frames, padded = (after[name] - before[name] for name in ("frames", "padded_frames"))
        release_memory()
        ids = [sample_key(self._loader.source, self._places[index]) for index in block.samples]
        taken = clock.turn(frames=frames, room=frames + padded, ids=ids)
        self._seen |= zip(taken.shapes, (batch for step in block.steps for batch in step.batches), strict=True)
        return taken

    def finish(self) -> ArmFinish:
        """Returns what is counted at the end; the model is of no use afterwards."""
        return finish({shapes: self._count(self._seen[shapes]) for shapes in spread_out(self._seen)})

    def _count(self, batch: tuple[int, ...]) -> float:
        """Returns the FLOPs of a step of one micro-batch."""
        self._stand_at(Block((BlockStep(bucket=-1, batches=(batch,)),)))
        with contextlib.closing(self._learner.groups(self._loader)) as groups:
            group = next(groups)
            return count_flops(lambda: self._learner.update(group, step=self._step))

    def _stand_at(self, block: Block) -> None:
        """Makes the loader's next epoch the block; its buffers stay."""
        steps = tuple(
            dataclasses.replace(step, batches=tuple(tuple(self._places[i] for i in batch) for batch in step.batches))
            for step in block.steps
        )
        loader, plan = self._loader, BlockPlan(Block(steps))
        loader.plan, loader.cursor = plan, Cursor(plan, loader.plan_key, seed=loader.settings.seed)


def blocks_of(task: ArmTask) -> list[Block]:
    """Returns the blocks in the batches of the arm."""
    if not task.arm.is_unbucketed:
        return list(task.blocks)
    return [block.shuffled(task.seed_of(number)) for number, block in enumerate(task.blocks)]


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


def release_memory() -> None:
    """Gives the device memory that no tensor holds back to the other arms."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
