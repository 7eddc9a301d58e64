"""Training steps as the loop does them, on batches that a calibration makes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.store.source import SampleSource
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
from forebay.train.loop.launch import make_accelerator
from forebay.train.loop.learner import Learner
from forebay.train.loop.micro_batches import Group, count_samples
from forebay.train.models.objective import Objective
from forebay.train.models.table import ModelFacts
from forebay.train.select import as_stored, select


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


class _NoLoader:
    """Stands where the loop has a loader: a calibration makes its batches itself."""

    weight = 1

    def __iter__(self) -> Iterator[Batch]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """There is nothing to go on from."""

    def report(self) -> Mapping[str, Any]:
        return {}


class Steps:
    """The loop's learner on batches of the caller's; its model and optimizer are real."""

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        constants: Mapping[str, Any],
        *,
        accumulates: bool,
        has_text_alone: bool = False,
    ) -> None:
        """Loads the model. accumulates: a step takes the same micro-batch twice, so that gradients are there."""
        self._accelerator = make_accelerator(config, has_text_alone=has_text_alone, may_rest=facts.own_loss is not None)
        self._learner = Learner(config, facts=facts, accelerator=self._accelerator, constants=constants)
        self._learner.start(None, loader=_NoLoader())
        self._objective, self._times, self._count = Objective(facts), 2 if accumulates else 1, 0
        self.device: torch.device = self._accelerator.device
        self.losses: list[float] = []

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
        """What `warm` and `step` are to be called under: nothing."""
        return contextlib.nullcontext()

    def prepared(self, batch: Batch) -> Batch:
        """Returns what `warm` and `step` take for a batch: the batch."""
        return batch

    def warm(self, batch: Batch) -> None:
        """The optimizer has its state from now on: the first step has a lower peak than the others."""
        if not self._count:
            self.step(batch)

    def step(self, batch: Batch) -> float:
        """Returns the seconds of one optimizer step on `batch`, the work of the device included."""
        started_s = time.perf_counter()
        fields = fields_of(batch)
        targets = self._objective.units(fields)
        ranks = self._learner.num_ranks
        group = Group(
            batches=[(batch, 1)] * self._times,
            num_targets=max(targets * self._times * ranks, 1),
            num_samples=count_samples(batch) * self._times * ranks,
            wait_s=0.0,
        )
        self._count += 1
        outcome = self._learner.update(group, step=self._count)
        self.losses.append(float(outcome.loss))  # waits for the device
        return time.perf_counter() - started_s
