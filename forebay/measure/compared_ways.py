"""The arms of a comparison: the config's own way, and the ways that it is held against; and what each of them gets.

Blocks of a comparison: samples that every arm trains on in its turn, and the batches that an arm makes of them.

The arms over forebay's loader: the config's own way, without its cache, without its buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.code import facts_of
from forebay.config.tree import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.measure.machine import ArmTurn, BlockClock, Shapes, device_name, finish, release_memory, timed
from forebay.measure.step_runner import StepRunner
from forebay.plan.in_order import InOrderPlan
from forebay.plan.interface import Plan
from forebay.steps.audio.audio_section import audio_step_of, in_conversations
from forebay.steps.image.image_section import image_step_of
from forebay.steps.table import is_own
from forebay.store.source import SampleSource, SourceUnion
from forebay.train.collate.patches import fields_of
from forebay.train.models.model_folder import model_facts
from forebay.train.select import as_stored, make_loader
from forebay.visible import did_you_mean

OWN = "config"
"""What tables call the config's own way: its cache and its plan."""
PARTS = ("uncached", "unbucketed", "hf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train on the samples of a block."""

    name: str
    is_uncached: bool = False
    """Samples are made on the fly, by the steps of the config."""
    is_unbucketed: bool = False
    """Batches are of random samples: as many batches as the config's plan has, of equal size."""
    is_plain: bool = False
    """transformers' Trainer, a DataLoader with workers, the extractor or processor in the collator, random batches."""

    def config(self, config: Config, *, folder: str) -> Config:
        """Returns the config that this arm trains by. It keeps nothing of what it learns.

        folder: instead of `train.output_dir`, where a run of the config may have checkpoints.
        """
        quiet: dict[str, Any] = {"output_dir": folder, "eval": (), "save_best": None, "trackers": ()}
        train = dataclasses.replace(config.train, **quiet)
        loader = dataclasses.replace(config.loader, cache="off" if self.is_uncached else "require")
        return as_stored(dataclasses.replace(config, loader=loader, train=train))


def arms_of(names: str, config: Config) -> list[Arm]:
    """Returns the config's own arm and those of a list such as `uncached,unbucketed+uncached,hf`, each once.

    Raises ConfigError for a name that is none, with nearest and list, and for arms that the samples cannot have.
    """
    arms = [Arm(name=OWN)]
    for name in filter(None, (part.strip() for part in names.split(","))):
        arm = _arm(name)
        for problem in _problems(arm, config):
            raise ConfigError(f"--against names {arm.name}, but {problem}")
        if arm not in arms:
            arms.append(arm)
    if len(arms) == 1:
        raise ConfigError(f"--against names no arm; give one or more of {', '.join(PARTS)}, separated by commas")
    return arms


def _arm(name: str) -> Arm:
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in PARTS:
            raise ConfigError(
                f"--against names {part!r}, wanted {', '.join(PARTS)}, or two of them as uncached+unbucketed"
                f"{did_you_mean(part, PARTS)}"
            )
    if "hf" in parts and len(set(parts)) > 1:
        raise ConfigError(f"--against names {name!r}, but hf reads raw data in random batches anyway; name hf alone")
    kept = [part for part in PARTS if part in parts]
    return Arm(
        name="+".join(kept), is_uncached="uncached" in kept, is_unbucketed="unbucketed" in kept, is_plain="hf" in kept
    )


def _problems(arm: Arm, config: Config) -> Iterator[str]:
    """Yields why a config's samples cannot have an arm, and what to do."""
    if config.plan is not None and config.plan.kind == "pack" and arm.name != "uncached":
        yield (f"{config.path} makes packs, whose samples have no length of a batch; for packs give --against uncached")
    if (arm.is_plain or arm.is_unbucketed) and config.mixture.source:
        yield (
            f"{config.path} reads several sources by [[mixture.source]], which have no random batches in common; give "
            "--against uncached, or compare a config of one source"
        )
    if arm.is_plain:
        yield from (f"{problem}; give --against uncached,unbucketed" for problem in _not_of_transformers(config))
    if arm.is_uncached and any(entry.cache is not None for entry in config.mixture.source):
        yield (
            f"{config.path} names the folder of a cache in [[mixture.source]]; name the source's config there, which "
            "says where its raw data is"
        )


def _not_of_transformers(config: Config) -> Iterator[str]:
    if config.audio is not None and is_own(config.audio.features):
        made = f"audio.features of {config.path} is {config.audio.features}"
        yield f"{made}, which no extractor of transformers makes"
    audio, image = audio_step_of(config), image_step_of(config)
    if audio is not None and in_conversations(config):
        yield f"rows of {config.path} are conversations with clips, and that way has single recordings or images"
    elif image is not None and facts_of(config).has_videos:
        yield f"rows of {config.path} may have videos (vision.fps), and that way has images alone"
    elif image is not None and audio is not None:
        yield f"rows of {config.path} are recordings with images, and that way is one of either"
    if image is not None and not image.is_of_transformers:
        way = "that way is one of recordings and of images as their processor gives them"
        yield f"{config.path} stores patches, and {way}"
    if image is None and (audio is None or not audio.reads_sound):
        yield f"{config.path} has no sound for an extractor"


_STEPS_A_BLOCK = 10
"""Optimizer steps of a block: random batches are drawn from a block, so a block has to hold samples of all lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStep:
    """One optimizer step. bucket: its shape class in the config's plan, -1 for random batches.

    batches: the sample indices of its micro-batches.
    """

    bucket: int
    batches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The samples that every arm trains on in one turn, as the batches of the config's plan."""

    steps: tuple[BlockStep, ...]

    @property
    def samples(self) -> list[int]:
        """The sample indices, a sample that comes twice included twice."""
        return [index for step in self.steps for batch in step.batches for index in batch]

    def shuffled(self, seed: Sequence[int], *, grad_acc: int | None = None) -> Block:
        """Returns the same samples in random batches: as many steps and micro-batches, the latter of equal size (+-1).

        A random batch has as many samples as the plan's batches of the block have on average. grad_acc: micro-batches
        of every step instead of the plan's own; of all steps no more than there are samples.
        """
        samples = np.random.default_rng(list(seed)).permutation(self.samples)
        counts = [grad_acc or len(step.batches) for step in self.steps]
        parts = iter(np.array_split(samples, sum(counts)))
        batches = [tuple(tuple(part.tolist()) for part in itertools.islice(parts, count)) for count in counts]
        return Block(tuple(BlockStep(bucket=-1, batches=own) for own in batches))


def planned_steps(plan: Plan, *, seed: int, grad_acc: int) -> Iterator[BlockStep]:
    """Yields the optimizer steps of a plan, epoch after epoch, as one rank takes them.

    grad_acc: micro-batches a step where the plan says nothing.
    """
    epoch = 0
    while True:
        order, position = plan.order(seed, epoch), 0
        while position < len(order):
            bucket = order.bucket(position)
            size = grad_acc if plan.grad_accs is None else plan.grad_accs[bucket]
            places = range(position, min(position + size, len(order)))
            yield BlockStep(bucket=bucket, batches=tuple(tuple(batch.tolist()) for batch in order.batches(places)))
            position += size
        epoch += 1


def dealt(steps: Sequence[BlockStep], num_blocks: int) -> list[Block]:
    """Returns the steps dealt to blocks bucket by bucket, so that all blocks have about the plan's share of each.

    Inside a block the steps keep the plan's order. Numbers of steps of two blocks differ by one at most. Consecutive
    steps would not do: a plan has batches of one bucket in a row, and a block of one bucket has no padding to save.
    """
    by_bucket = sorted(range(len(steps)), key=lambda place: (steps[place].bucket, place))
    return [Block(tuple(steps[place] for place in sorted(by_bucket[first::num_blocks]))) for first in range(num_blocks)]


def num_blocks(steps: int) -> int:
    """Returns into how many blocks so many steps are dealt: three at least, if there are steps, since one warms up."""
    return max(steps // _STEPS_A_BLOCK, min(3, steps))


def block_plan(block: Block) -> InOrderPlan:
    """Returns a plan whose one epoch is a block; its shape classes are the steps, so `grad_accs` has a step's size."""
    batches, counts = (
        [batch for step in block.steps for batch in step.batches],
        [len(step.batches) for step in block.steps],
    )
    return InOrderPlan(
        members=np.array(block.samples, np.int64),
        offsets=np.cumsum([0, *map(len, batches)]),
        classes=np.repeat(np.arange(len(counts)), counts),
        tail="short",
        grad_accs=tuple(counts),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmTask:
    """The task of a child. The tables hold the samples of the blocks, by their index in the config's own source."""

    config: Config
    arm: Arm
    blocks: tuple[Block, ...]
    ids: dict[int, str]
    frames: dict[int, int]
    """Stored frames, or tokens where there is no audio."""
    folder: str
    """Where the arm may write."""

    @property
    def arm_config(self) -> Config:
        """The config that the arm trains by."""
        return self.arm.config(self.config, folder=f"{self.folder}/{self.arm.name}")

    def random_blocks(self, *, grad_acc: int | None = None) -> list[Block]:
        """Returns the blocks in random batches, the same in every arm. grad_acc: see `Block.shuffled`."""
        seed = self.config.loader.seed & (2**63 - 1)
        return [block.shuffled([seed, number], grad_acc=grad_acc) for number, block in enumerate(self.blocks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The answer of an arm that is ready for its first turn."""

    data_s: float
    """Seconds until its samples were listed and a batch could be asked for."""
    model_s: float
    """Seconds until the model and its optimizer were there; of `hf` the model alone, on the host."""
    device: str | None = None
    """Name of the device; None: the CPU."""
    workers: dict[int, float] = field(default_factory=dict)
    """Samples/s of the numbers of DataLoader workers that were tried; empty for arms without such workers."""
    agreement: dict[str, Any] | None = None
    """Of `hf` over images: how batches of the cache compare with the processor's own. None for other arms."""


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
