"""The arm `hf`: transformers' Trainer, a DataLoader with workers, the extractor or processor in the collator."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from forebay.config.tree import Config
from forebay.measure.compared_ways import ArmTask, Setup
from forebay.measure.machine import device_name, release_memory
from forebay.measure.own_way import places_in
from forebay.measure.plain_collators import Collating, ProcessorCollator, agreement, sound_collator
from forebay.measure.step_clock import ArmTurn, BlockClock, Shapes, finish, timed
from forebay.steps.step import Batch
from forebay.train.loop.schedule import Schedule
from forebay.train.loop.trainable import adamw, set_learning_rate, set_passes, set_trainable
from forebay.train.models.model_folder import model_facts
from forebay.train.models.trainee import new_model
from forebay.train.select import make_loader
from forebay.train.uncached.plain import PlainSamples

logger = logging.getLogger(__name__)

_MAX_WORKERS = 32

Batches = list[list[list[int]]]
"""A block: by step, by micro-batch, the places of its samples in the data set."""


def work(task: ArmTask, parent: Connection) -> None:
    """Does the turns that the parent asks for, by their number; None ends them."""
    config = task.arm_config
    samples, data_s = timed(lambda: PlainSamples(config, list(task.ids.values())))
    collator, agrees, made_s = _collator(config, samples, task)
    data_s += made_s
    blocks, ids, frames = plain_blocks(task), list(task.ids.values()), [task.frames[index] for index in task.ids]
    acc = max(len(step) for block in blocks for step in block)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_acc=acc))
    tried = _tried_workers(config, samples, collator, blocks[0])
    best = max(tried, key=lambda number: tried[number])
    logger.info("samples/s by DataLoader workers: %s; taken: %d", tried, best)
    plain = PlainTrainer(config, samples, collator, workers=best, num_steps=sum(map(len, blocks)))
    parent.send(Setup(data_s=data_s, model_s=plain.model_s, device=device_name(), workers=tried, agreement=agrees))

    def send(turn: ArmTurn) -> None:
        used = [place for batch in plain.batches for place in batch]
        turn.frames, turn.ids = sum(frames[place] for place in used), sorted(ids[place] for place in used)
        parent.send(turn)

    plain.run(lambda: blocks[parent.recv()], send)
    parent.recv()
    parent.send(finish(plain.seen, plain.ready))


def _collator(config: Config, samples: PlainSamples, task: ArmTask) -> tuple[Collating, dict[str, Any] | None, float]:
    """Returns the collator, how batches of the cache compare with what it makes where it says so, and its seconds."""
    if samples.groups.recipe.audio is not None:
        sound, made_s = timed(lambda: sound_collator(config, samples))
        return sound, None, made_s
    samples.write_texts()
    source = make_loader(config, dp_rank=0, dp_world_size=1).source
    collator, made_s = timed(lambda: ProcessorCollator(samples, source))
    numbers = {index: number for number, index in enumerate(task.ids)}
    batches = [[numbers[i] for i in batch] for block in task.blocks for step in block.steps for batch in step.batches]
    places = list(places_in(source, task.ids).values())
    agrees = agreement(source, samples, collator, places=places, batches=batches)
    if not agrees["is_kept"]:
        logger.warning("batches of the cache are not those of the processor: %s", agrees["differences"])
    return collator, agrees, made_s


def plain_blocks(task: ArmTask) -> list[Batches]:
    """Returns the random batches of each block; the Trainer has as many micro-batches in every step."""
    places = {index: place for place, index in enumerate(task.ids)}
    steps = [step for block in task.blocks for step in block.steps]
    acc = round(sum(len(step.batches) for step in steps) / len(steps))
    # No micro-batch without a sample: the Trainer would go on into the next block.
    acc = max(1, min([acc, *(len(block.samples) // len(block.steps) for block in task.blocks)]))
    return [
        [[[places[i] for i in batch] for batch in step.batches] for step in block.steps]
        for block in task.random_blocks(grad_acc=acc)
    ]


class _Blocks:
    """The batches of all blocks, one after the other, as the Trainer's train_dataloader.

    A block is asked for when the Trainer wants its first batch. No worker prefetches beyond a block.
    """

    batch_size = None
    drop_last = False

    def __init__(self, plain: PlainTrainer, next_block: Callable[[], Batches], num_batches: int) -> None:
        self._plain, self._next_block, self._num_batches = plain, next_block, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._plain.begin(self._next_block())
            batches = iter(self._plain.loader)
            for _ in range(len(self._plain.batches)):
                batch, seconds = timed(partial(next, batches))
                self._plain.wait_s += seconds
                yield batch


class _Marks(TrainerCallback):  # type: ignore[misc]
    """Tells the clock of every step that ended."""

    def __init__(self, plain: PlainTrainer) -> None:
        self._plain = plain

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Called by the Trainer after the optimizer's step."""
        self._plain.step_done()


class PlainTrainer(Trainer):  # type: ignore[misc]
    """A Trainer over blocks, its DataLoader, and a clock at its data and its losses, of the block at hand."""

    def __init__(
        self, config: Config, samples: PlainSamples, collator: Collating, *, workers: int, num_steps: int
    ) -> None:
        """Loads the model. num_steps: of all blocks that it is to train on."""
        began, settings = time.perf_counter(), config.train
        self._settings, self._samples, self._collator, self._num_steps = settings, samples, collator, num_steps
        facts = model_facts(Path(str(settings.model)), config)
        self._is_asked = facts.own_loss is not None and facts.own_loss.is_asked
        model = new_model(config, facts)
        set_trainable(model, settings)
        set_passes(model, settings)
        self.batches: list[list[int]] = []
        """Those of the block at hand: the batch sampler, which is set before each epoch of the DataLoader."""
        self.loader: Any = DataLoader(
            samples,  # type: ignore[arg-type]  # has what a DataLoader asks of a data set
            batch_sampler=self.batches,
            collate_fn=collator,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
            pin_memory=torch.cuda.is_available(),
        )
        self.seen: dict[Shapes, list[int]] = {}
        """A micro-batch of each shape."""
        self._losses: list[torch.Tensor] = []
        self.wait_s = 0.0
        self.model_s = time.perf_counter() - began
        optimizer = adamw(model, settings)
        set_learning_rate(optimizer, settings.learning_rate)
        factor = Schedule.of(settings, num_steps=int(settings.max_steps or num_steps)).factor
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda before: factor(before + 1))
        super().__init__(model=model, args=_arguments(config, num_steps), optimizers=(optimizer, schedule))
        self.add_callback(_Marks(self))

    def run(self, next_block: Callable[[], Batches], done: Callable[[ArmTurn], None]) -> None:
        """Trains on the blocks that `next_block` gives. done: called after each block, whose batches are `batches`."""
        self._done, self._blocks = done, _Blocks(self, next_block, self._num_steps * self._settings.grad_acc)
        self.train()

    def get_train_dataloader(self) -> Any:
        """Returns the blocks; batches are on the host, and `_prepare_inputs` copies them."""
        return self._blocks

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """Returns the micro-batches of the next step, and counts them and the wait for them."""
        found = super().get_batch_samples(*arguments, **options)
        self.clock.got_batches(found[0], wait_s=self.wait_s, bucket=-1)
        self.wait_s = 0.0
        self.clock.turn.room += sum(map(self._collator.room, found[0]))
        return found

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns the arguments of the model; some give a loss only where they are asked for one."""
        return {**super()._prepare_inputs(inputs), **({"return_loss": True} if self._is_asked else {})}

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Returns the loss of a micro-batch, which is kept."""
        loss = super().training_step(*arguments, **options)
        self._losses.append(loss)
        return loss

    def begin(self, block: Batches) -> None:
        """Starts the clock of a block whose data has not been asked for."""
        self._steps_left = len(block)
        self.batches[:] = [batch for step in block for batch in step]
        self.clock = BlockClock()
        self.clock.__enter__()

    def step_done(self) -> None:
        """Counts a step by the losses of its micro-batches, which the Trainer has scaled to add up."""
        loss = torch.stack([loss.float() for loss in self._losses]).sum()
        self._losses = []
        self.clock.step_done(loss, bucket=-1, is_skipped=bool(self.accelerator.optimizer_step_was_skipped))
        self._steps_left -= 1
        if not self._steps_left:
            self.clock.__exit__()
            release_memory()
            self.seen |= zip(self.clock.turn.shapes, self.batches, strict=True)
            self._done(self.clock.turn)

    def ready(self, batch: list[int]) -> Callable[[], Any]:
        """Returns the passes of one micro-batch, which is collated."""
        return partial(self.training_step, self.model, self._collator([self._samples[place] for place in batch]))


def _arguments(config: Config, num_steps: int) -> Any:
    settings = config.train
    return TrainingArguments(
        output_dir=settings.output_dir,
        max_steps=num_steps,
        gradient_accumulation_steps=settings.grad_acc,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.mixed_precision == "bf16",
        fp16=settings.mixed_precision == "fp16",
        use_cpu=not torch.cuda.is_available(),
        seed=config.loader.seed % 2**32,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # would wait for the device in every step
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _tried_workers(config: Config, samples: PlainSamples, collator: Collating, block: Batches) -> dict[int, float]:
    """Returns samples/s of the first block by numbers of workers: none, two, as many as there are cores.

    Each number trains a model of its own, which is then dropped.
    """
    tried: dict[int, float] = {}
    for number in sorted({0, 2, min(len(os.sched_getaffinity(0)), _MAX_WORKERS)}):
        plain = PlainTrainer(config, samples, collator, workers=number, num_steps=len(block))
        plain.run(lambda: block, lambda _: None)
        tried[number] = sum(len(batch) for step in block for batch in step) / plain.clock.turn.seconds
        del plain
        gc.collect()  # a Trainer and its callbacks name each other
        release_memory()
    return tried
