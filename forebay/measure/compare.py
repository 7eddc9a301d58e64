"""The config's own way and others, in turns on the same samples: `forebay compare CONFIG --against ...`.

Each arm is a process with a copy of the model from the same weights. The steps of the config's plan are dealt to
blocks. Each arm in its turn trains on the samples of a block, while the others rest; who begins changes from block to
block, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.tree import Config
from forebay.errors import CacheNotFoundError, ConfigError, ForebayError, MissingExtraError
from forebay.extras import install_line
from forebay.measure.child_process import Child
from forebay.measure.compare_report import ArmComparison, ArmFigures, bucket_labels
from forebay.measure.compared_ways import (
    Arm,
    ArmTask,
    Block,
    Setup,
    arms_of,
    dealt,
    num_blocks,
    planned_steps,
    sample_key,
)
from forebay.measure.machine import machine
from forebay.measure.step_clock import ArmTurn
from forebay.measure.step_runner import checked_model
from forebay.steps.recipe import recipe_of
from forebay.store.lookup import find_cache, not_found_message
from forebay.store.source import without_audio
from forebay.train.loader import Loader
from forebay.train.loop.checkpoint import run_folder
from forebay.train.loop.schedule import run_steps
from forebay.train.select import make_loader

logger = logging.getLogger(__name__)

_DEFAULT_STEPS = 200


def compare(config: Config, *, against: str, steps: int | None = None, out: Path | None = None) -> ArmComparison:
    """Returns how the config's own way and the arms `against` trained on the samples of `steps` steps of its plan.

    against: for example `uncached,uncached+unbucketed,hf`. out: where tables and logs go; left out,
    `<train.output_dir>/<name>/compare`.
    Raises ConfigError for what cannot be compared, CacheNotFoundError where the config's cache is not sealed,
    ForebayError where an arm died.
    """
    steps = _DEFAULT_STEPS if steps is None else steps
    if steps < 1:
        raise ConfigError(f"--steps is {steps}, wanted 1 or more")
    arms = arms_of(against, config)
    _check(config, arms)
    folder = out or run_folder(config) / "compare"
    loader = make_loader(arms[0].config(config, folder=str(folder)), dp_rank=0, dp_world_size=1)
    _check_batches(config, arms, loader, steps=steps)
    about = {"machine": machine(), "name": config.name, "config": config.path, "model": config.train.model}
    with tempfile.TemporaryDirectory(prefix="forebay-compare-") as scratch:
        tasks = tasks_of(config, loader, arms, steps=steps, folder=scratch)
        found = _run(tasks, logs=folder / "logs")
    return ArmComparison(
        about={**about, "source_key": loader.source.key},
        folder=folder,
        blocks=tasks[0].blocks,
        seconds=_seconds(loader, tasks[0].blocks),
        buckets=bucket_labels(loader.plan),
        precision=config.train.mixed_precision,
        arms=tuple(found),
    )


def tasks_of(config: Config, loader: Loader, arms: Sequence[Arm], *, steps: int, folder: str) -> list[ArmTask]:
    """Returns the task of each arm: the same samples, dealt to the same blocks.

    loader: of the config's own way. folder: where arms may write what nobody keeps. Learning rates are those of the
    beginning of the config's run; one that is shorter than `steps` would end at a learning rate of 0 before them.
    """
    most, source = max(run_steps(config.train, loader, steps_done=0), steps), loader.source
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=most, epochs=None))
    endless = planned_steps(loader.plan, seed=config.loader.seed, grad_acc=config.train.grad_acc)
    blocks = tuple(dealt(list(itertools.islice(endless, steps)), num_blocks(steps)))
    used = sorted({index for block in blocks for index in block.samples})
    frames = source.lengths["num_frames" if "num_frames" in source.lengths else "num_tokens"]
    table: dict[str, Any] = {
        "ids": {i: sample_key(source, i) for i in used},
        "frames": {i: int(frames[i]) for i in used},
    }
    return [ArmTask(config=config, arm=arm, blocks=blocks, folder=folder, **table) for arm in arms]


def _check(config: Config, arms: Sequence[Arm]) -> None:
    if config.train.model is None:
        raise ConfigError(
            f"{config.path}: train.model is missing; name the folder of the model that all arms train", code="FB108"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("compare runs on one rank, and WORLD_SIZE is above 1; start it without torchrun")
    checked_model(config)
    try:
        import accelerate  # noqa: F401
    except ImportError as err:
        raise MissingExtraError(f"forebay compare needs accelerate; run: {install_line('train')}") from err
    if config.mixture.source:
        return  # each source is looked for when the loader is made
    lookup = find_cache(config, recipe_of(config))
    if lookup.found is None:
        raise CacheNotFoundError(not_found_message(config, lookup))
    raw = [arm.name for arm in arms if arm.is_uncached or arm.is_plain]
    if raw and lookup.state == "absent":
        raise ConfigError(
            f"--against names {', '.join(raw)}, but the raw data of {lookup.found.place} is not here; put it where "
            f"{config.path} says, or give --against unbucketed"
        )


def _check_batches(config: Config, arms: Sequence[Arm], loader: Loader, *, steps: int) -> None:
    """Raises ConfigError for too few steps: random batches of a block of one bucket have next to no padding."""
    texts = without_audio(loader.source)
    random = [arm.name for arm in arms if arm.is_unbucketed]
    if random and texts is not None and not texts.all():
        raise ConfigError(
            f"--against names {', '.join(random)}, but {config.path} has samples with audio and without, which stand "
            "in no batch together; give --against uncached"
        )
    random = [arm.name for arm in arms if arm.is_unbucketed or arm.is_plain]
    order = loader.plan.order(loader.settings.seed, 0)
    least = 2 * len(np.unique(order.buckets(range(len(order)))))
    if random and steps < least:
        raise ConfigError(
            f"--steps is {steps}, but {', '.join(random)} has random batches, and blocks of so few steps lack lengths "
            f"that these would have: their padding would be too small; give --steps {least} or more",
            code="FB615",
        )


def _seconds(loader: Loader, blocks: Sequence[Block]) -> list[float] | None:
    """Returns the seconds of audio of each block, None where samples have none."""
    lengths, rate = loader.source.lengths, loader.source.constants.get("sample_rate_hz")
    if "num_audio_samples" not in lengths or not rate:
        return None
    return [float(np.asarray(lengths["num_audio_samples"])[block.samples].sum() / rate) for block in blocks]


def _run(tasks: Sequence[ArmTask], *, logs: Path) -> list[ArmFigures]:
    """Returns the figures of each task's arm; no process is left, whatever happens."""
    count, blocks = len(tasks), tasks[0].blocks
    with contextlib.ExitStack() as stack:
        children = []
        for task in tasks:
            children.append(_started(task, logs=logs))
            stack.callback(children[-1].kill)
        for child in children:
            child.receive()  # it has imported what it needs
        setups: list[Setup] = []
        for task, child in zip(tasks, children, strict=True):  # one at a time: how long it takes is a figure
            child.send(task)
            setups.append(child.receive())
            logger.info("arm %s: data %.2f s, model %.2f s", task.arm.name, setups[-1].data_s, setups[-1].model_s)
        turns: list[list[ArmTurn]] = [[] for _ in tasks]
        for number in range(len(blocks)):
            for place in ((number + each) % count for each in range(count)):  # another arm begins in each block
                children[place].send(number)
                turns[place].append(children[place].receive())
            _tell_block(tasks, [own[-1] for own in turns], number=number)
        figures = []
        for task, child, setup, own_turns in zip(tasks, children, setups, turns, strict=True):
            child.send(None)
            figures.append(ArmFigures(arm=task.arm.name, setup=setup, turns=tuple(own_turns), finish=child.receive()))
        return figures


def _started(task: ArmTask, *, logs: Path) -> Child:
    work = "forebay.measure.plain_loop:work" if task.arm.is_plain else "forebay.measure.compared_ways:work"
    log = logs / f"{task.arm.name}.log"
    return Child(f"the arm {task.arm.name}", work, log=log, advice="leave it out of --against")


def _tell_block(tasks: Sequence[ArmTask], turns: Sequence[ArmTurn], *, number: int) -> None:
    """Logs how fast the arms were in a block. Raises ForebayError where they did not train on the same samples."""
    rates = []
    for task, turn in zip(tasks, turns, strict=True):
        if turn.ids != turns[0].ids:
            raise ForebayError(
                f"block {number + 1}: the arm {task.arm.name} trained on {len(turn.ids)} samples and the arm "
                f"{tasks[0].arm.name} on {len(turns[0].ids)} others; the figures would not compare"
            )
        rates.append(f"{task.arm.name} {len(turn.ids) / turn.seconds:.1f}")
    logger.info("block %d of %d: %s samples/s", number + 1, len(tasks[0].blocks), ", ".join(rates))
