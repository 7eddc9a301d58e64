"""The model and its optimizer in a training run: where a checkpoint left them, and what one step does to them.

The checkpoints of a run: the newest ones and the best one stay; last.json and best.json name one each.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import ResumeError
from forebay.spans import BACKWARD, COPY, FORWARD, span
from forebay.store.files import sweep, write_bytes
from forebay.train.collate.patches import fields_of, pixel_dtype, to_model_inputs
from forebay.train.device import Batch
from forebay.train.loop import launch
from forebay.train.loop.checkpoint import (
    POINTER,
    Best,
    BestRecord,
    TrainState,
    cannot_write,
    change_state,
    checkpoint_name,
    discard,
    is_checkpoint,
    load_optimizer,
    load_state,
    run_folder,
    write_checkpoint,
)
from forebay.train.loop.meter import Meter, Phases
from forebay.train.loop.schedule import BatchLoader, Group, Schedule, host_sum, micro_batch_groups, run_steps
from forebay.train.loop.trainable import (
    SkippedSteps,
    base_hashes,
    checkpoint_model,
    new_model,
    set_learning_rate,
    set_passes,
    set_trainable,
)
from forebay.train.models import ctc
from forebay.train.models.families import ModelFacts
from forebay.train.models.lora import base_of
from forebay.train.models.model_folder import check_batch, processor_files, warn_of_missing
from forebay.train.models.objective import Objective

_logger = logging.getLogger(__name__)
BEST = "best.json"


class Checkpoints:
    """The checkpoints of one run in its folder. Every rank makes one; only rank 0 calls `begin` and `save`.

    A run's folder holds the checkpoints of one line of training: those of an earlier run, and those later than the one
    that the run goes on from, go when the first new one is in force. Other folders are left alone.
    """

    def __init__(self, folder: Path, settings: TrainConfig) -> None:
        """Reads and writes nothing yet. folder: the run folder."""
        self._folder, self._limit = folder, settings.save_total_limit
        self._names: list[str] = []
        """Of this line of training, oldest first."""
        self.best = Best(settings)
        self.is_evaluated = True
        """Whether the evaluations after the step of the checkpoint that is gone on from are done."""

    def begin(self) -> None:
        """Warns where the folder has checkpoints of an earlier run, which go with the first one of this run."""
        if found := [path.name for path in self._found()]:
            _logger.warning(
                "%s holds checkpoints of an earlier run (%s); they go when this run writes its first one: stop it and "
                "run forebay train --resume to go on from them, or set another name",
                *(self._folder, ", ".join(found)),
            )

    def go_on(self, checkpoint: Path, state: TrainState, *, writes: bool = True) -> None:
        """Makes the run folder's last.json and best.json what they were when `checkpoint` was written.

        What is later is out of force from now on, and goes when the next checkpoint is written. A best checkpoint that
        is not there any more is forgotten with a warning. writes: False on ranks other than 0.
        """
        is_here = checkpoint.resolve().parent == self._folder.resolve()
        self._names = [name for name in state.kept if is_here and is_checkpoint(self._folder / name)]
        self.best.go_on(state.best, found=self._names)
        self.is_evaluated = state.evaluated or not is_here
        if not writes:
            return
        if not is_here:
            self.begin()
            return
        self._names = [*(name for name in self._names if name != checkpoint.name), checkpoint.name]
        write_bytes(self._folder / POINTER, _as_bytes({"checkpoint": checkpoint.name}))
        self._write_best(self.best.record)

    def save(
        self,
        state: TrainState,
        *,
        model: Any,
        optimizer: Mapping[str, Any],
        processor: Mapping[str, Path],
        weights: Mapping[str, Any] | None = None,
    ) -> Path:
        """Returns the new checkpoint folder, which is the last one afterwards; what the limit leaves out is gone.

        The parameters are those of `write_checkpoint`. Everything is written aside and fsynced, then renamed, then
        named by last.json, then by best.json if it is the best one; only then are older ones removed. A crash at any
        instant leaves the previous checkpoint in force. Raises ForebayError where it cannot be written; the previous
        checkpoint stays.
        """
        sweep(self._folder)
        target = self._target(state.step)
        best = self.best.in_checkpoint(target.name)
        names = _newest([*self._names, target.name], self._limit, best=best)
        state = replace(state, kept=names, best=best)
        write_checkpoint(target, state, model=model, weights=weights, optimizer=optimizer, processor=processor)
        try:
            write_bytes(self._folder / POINTER, _as_bytes({"checkpoint": target.name}))
            self._write_best(best)
        except OSError as err:
            raise cannot_write(target, state.step, err) from err
        self._names = names
        self._drop_others()
        return target

    def evaluated(self) -> None:
        """Makes the checkpoint that was written last one whose evaluations are done: it may be the best one now."""
        target = self._folder / self._names[-1]
        best = self.best.in_checkpoint(target.name)
        self._names = _newest(self._names, self._limit, best=best)
        try:
            change_state(target, kept=self._names, best=best and asdict(best), evaluated=True)
            self._write_best(best)
        except OSError as err:
            raise cannot_write(target, int(target.name.split("-")[1]), err) from err
        self._drop_others()

    def _target(self, step: int) -> Path:
        """Returns the folder of a new checkpoint; its name is not that of one that is in force."""
        # A new run in the folder of an old one reaches the same steps. The old name stays taken until last.json names
        # another.
        in_force = {*self._names, _named(self._folder / POINTER)}
        attempt = 1
        while (target := self._folder / checkpoint_name(step, attempt)).exists():
            if target.name not in in_force and is_checkpoint(target):
                break
            attempt += 1
        return target

    def _write_best(self, record: BestRecord | None) -> None:
        path = self._folder / BEST
        if record is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != _as_bytes(asdict(record)):
            write_bytes(path, _as_bytes(asdict(record)))

    def _drop_others(self) -> None:
        # Once more from the disk: what these two name is never removed, whatever this process believes.
        staying = {*self._names, _named(self._folder / POINTER), _named(self._folder / BEST)}
        for path in self._found():
            if path.name not in staying:
                discard(path)

    def _found(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if is_checkpoint(path))


def _newest(names: Sequence[str], limit: int, *, best: BestRecord | None) -> list[str]:
    """Returns the last `limit` of names that are oldest first, and the best one, in their order."""
    newest = set(names[-limit:])
    return [name for name in names if name in newest or (best is not None and name == best.checkpoint)]


def _named(path: Path) -> str | None:
    """Returns the checkpoint that last.json or best.json names, None where the file names none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    name = document.get("checkpoint") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def _as_bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one step."""

    loss: torch.Tensor
    """This rank's part of the step's loss, a scalar on the device; the ranks' parts add up to the loss."""
    grad_norm: torch.Tensor
    """Norm of the gradient before clipping, over all ranks."""
    is_skipped: bool
    """Whether the scaler of fp16 left the weights as they were, since a gradient was not finite."""


class Learner:
    """The model and its optimizer, as accelerate prepared them, and what one step does to them."""

    def __init__(
        self, config: Config, *, facts: ModelFacts, accelerator: Any, constants: Mapping[str, Any] | None = None
    ) -> None:
        """Starts nothing yet. constants: those of the source, by which uint8 patches are expanded."""
        self._config = config
        self.settings = config.train
        self._loader = config.loader
        self._constants = constants or {}
        self.facts = facts
        self._objective = Objective(facts)
        self.accelerator = accelerator
        self.checkpoints = Checkpoints(run_folder(config), config.train)
        self._processor = processor_files(config, facts)
        self._base: dict[str, str] = {}
        self._model: Any = None
        self._optimizer: Any = None
        self._schedule: Schedule | None = None
        self._has_short = False

    @property
    def is_main_rank(self) -> bool:
        """Whether this rank writes logs and checkpoints."""
        return bool(self.accelerator.is_main_process)

    @property
    def num_ranks(self) -> int:
        """Ranks that share a step."""
        return int(self.accelerator.num_processes)

    @property
    def model(self) -> Any:
        """The model as it was loaded, without what accelerate put around it; `start` makes it."""
        return self.accelerator.unwrap_model(self._model)

    @property
    def schedule(self) -> Schedule:
        """Number of steps and learning rates of the run; `start` makes it."""
        if self._schedule is None:
            raise RuntimeError("the learner was not started")
        return self._schedule

    def start(self, checkpoint: Path | None, *, loader: BatchLoader, phases: Phases | None = None) -> TrainState | None:
        """Returns the state of `checkpoint`; model, optimizer and loader then stand where the checkpoint left them."""
        phases = phases or Phases()
        with phases("checkpoint") if checkpoint else contextlib.nullcontext():
            state = load_state(checkpoint) if checkpoint else None
        if state is not None:
            loader.load_state_dict(state.loader)
        num_steps = run_steps(self.settings, loader, steps_done=state.step if state else 0)
        self._schedule = Schedule.of(self.settings, num_steps=num_steps)
        with phases("model"):
            model = self._load(checkpoint, state)
            if self.facts.prepare_text_alone is not None:
                self.facts.prepare_text_alone(model, self.settings.text_encoder)
            set_trainable(model, self.settings)
            if self.is_main_rank:
                self._tell_start(model, is_new=checkpoint is None)
            set_passes(model, self.settings)
        with phases("to device"):
            self._model, self._optimizer = launch.prepare(self.accelerator, model, self.settings)
        if state is not None and checkpoint is not None:
            with phases("optimizer state"):
                self._go_on(checkpoint, state)
        return state

    def _load(self, checkpoint: Path | None, state: TrainState | None) -> Any:
        """Returns the model on the host, that of `checkpoint` or a new one."""
        if checkpoint is None or state is None:
            self._base = base_hashes(self._config, self.facts)
            return new_model(self._config, self.facts)
        self._base = state.base
        return checkpoint_model(self._config, self.facts, checkpoint, base=state.base)

    def _tell_start(self, model: Any, *, is_new: bool) -> None:
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        learning, total = sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)
        _logger.info("%s of %s parameters learn (%.2f %%)", f"{learning:,}", f"{total:,}", 100 * learning / total)
        warn_of_missing(self._processor, self.facts)
        if is_new:
            self.checkpoints.begin()

    def _go_on(self, checkpoint: Path, state: TrainState) -> None:
        """Makes optimizer and scaler those of a checkpoint, and tells what differs from its settings."""
        then, now = state.settings, self._arithmetic()
        changed = [f"{name} {then[name]!r} -> {now[name]!r}" for name in now if then.get(name, now[name]) != now[name]]
        try:
            launch.load_optimizer_state(self._optimizer, load_optimizer(checkpoint))
        except (ValueError, KeyError) as err:
            raise ResumeError(
                f"{checkpoint}/optimizer.pt does not fit the model: {err} "
                f"({', '.join(changed) or 'settings are the same'}); train without --resume, or set them back",
                code="FB514",
            ) from err
        if self.accelerator.scaler is not None and state.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.checkpoints.go_on(checkpoint, state, writes=self.is_main_rank)
        if not self.is_main_rank:
            return
        _logger.info("going on after step %d of %s", state.step, checkpoint)
        if changed:
            _logger.warning("settings differ from those of the checkpoint, so losses will too: %s", ", ".join(changed))

    def _arithmetic(self) -> dict[str, Any]:
        """Returns the settings that losses depend on, as JSON values, and the steps that they come to."""
        names = ("learning_rate", "schedule", "embed_lr_mult", "weight_decay", "max_grad_norm", "freeze", "lora")
        settings = asdict(self.settings)
        found = {name: settings[name] for name in (*names, "text_encoder", "grad_acc", "mixed_precision")}
        found |= {"max_steps": self.schedule.num_steps, "warmup_steps": self.schedule.warmup_steps}
        drawn = asdict(self._loader)
        found |= {name: drawn[name] for name in ("crop_s", "latent", "caption", "caption_dropout", "device_features")}
        changes = [{name: value for name, value in asdict(each).items() if value} for each in self._config.augment]
        # Of a cache its name: folders of another machine have other places.
        found["augment"] = [each | {"cache": Path(each["cache"]).name} if "cache" in each else each for each in changes]
        found |= {"seed": self._loader.seed, "num_ranks": self.num_ranks}
        as_json: dict[str, Any] = json.loads(json.dumps(found))
        return as_json

    def groups(self, loader: BatchLoader) -> Generator[Group, None, None]:
        """Returns the groups of micro-batches, one a step, of the size of the plan's calibration or `train.grad_acc`.

        The first micro-batch of a step decides for the step; those of a bucket come `plan.lockstep` in a row.
        """

        def size() -> int:
            planned: int | None = getattr(loader, "grad_acc", None)  # loaders of other making know no plan
            return planned or self.settings.grad_acc

        return micro_batch_groups(
            loader,
            size=size,
            count_targets=self._objective.units,
            sum_over_ranks=host_sum(self.accelerator.num_processes),
            num_ranks=self.accelerator.num_processes,
        )

    def meter(self, state: TrainState | None) -> Meter:
        """Returns a meter that sums the losses of the steps after `state` over the ranks."""
        return Meter(
            first_step=state.step + 1 if state else 1,
            losses=(state.loss_first, state.loss_last) if state else None,
            sum_on_device=partial(self.accelerator.reduce, reduction="sum"),
            skipped=SkippedSteps(
                limit=self.settings.max_skipped_steps,
                total=state.skipped_steps if state else 0,
                in_a_row=state.skipped_in_a_row if state else 0,
            ),
            device=self.accelerator.device,
        )

    def update(self, group: Group, *, step: int) -> Outcome:
        """Returns what came of one step on a group of micro-batches; the weights have moved.

        Only the last micro-batch of the group synchronises gradients.
        """
        with span("bookkeeping"):
            seed_step(self._loader.seed, step=step, rank=self.accelerator.process_index)
            set_learning_rate(self._optimizer, self.settings.learning_rate * self.schedule.factor(step))
        total = torch.zeros((), device=self.accelerator.device)
        for position, (batch, weight) in enumerate(group.batches, start=1):
            is_last = position == len(group.batches)
            with contextlib.nullcontext() if is_last else launch.no_sync(self.accelerator, self._model):
                loss = self._loss(batch) * (weight / group.num_targets)
                with span(BACKWARD):
                    self.accelerator.backward(self._scaled(loss))
            total += loss.detach()
        limit = self.settings.max_grad_norm if self.settings.max_grad_norm > 0 else math.inf
        with span("optimizer"):
            grad_norm = launch.whole(self.accelerator.clip_grad_norm_(self._model.parameters(), limit))
            self._optimizer.step()
            self._optimizer.zero_grad()
        return Outcome(loss=total, grad_norm=grad_norm, is_skipped=bool(self.accelerator.optimizer_step_was_skipped))

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss as it goes into the backward pass: DDP and FSDP take the mean over ranks, hence the factor.

        Under a scaler, a loss that is not finite makes every gradient not finite: gradients of such a loss can be
        finite, and the scaler would not skip the step.
        """
        scaled = loss * self.num_ranks
        if self.accelerator.scaler is None:
            return scaled
        return scaled * torch.where(loss.detach().isfinite(), 1.0, math.nan)

    def _loss(self, batch: Batch) -> torch.Tensor:
        with span("bookkeeping"):
            check_batch(self.facts, fields_of(batch))
            if self.facts.blank_id is not None:
                self._check_lengths(batch)
        device, dtype = self.accelerator.device, pixel_dtype(self._loader.pixels)
        with span(COPY):
            inputs = to_model_inputs(batch, self._constants, device=device, dtype=dtype)
        with span(FORWARD):
            return self._objective(self._model, inputs, units=self._objective.units(fields_of(batch))).loss

    def _check_lengths(self, batch: Batch) -> None:
        short = ctc.check_lengths(self.facts, base_of(self.model), fields_of(batch))
        if short and not self._has_short:
            self._has_short = True
            _logger.warning(
                "%d of %d clips of a batch have fewer frames of %s than their text wants: their loss is 0, and nothing "
                "is learnt from them (ctc_zero_infinity); drop them by [filter]",
                *(short, len(batch["labels"]), self.facts.model_class),
            )

    def save(self, *, step: int, meter: Meter, loader: BatchLoader, evaluated: bool = True) -> Path | None:
        """Returns the checkpoint that rank 0 has written, None on other ranks; all ranks return when it is there.

        evaluated: whether the evaluations after the step are done.
        """
        saved = None
        loss_first, loss_last = meter.losses
        whole, optimizer = launch.Gathered(self.accelerator, self._model), launch.gathered_optimizer(self._optimizer)
        if self.is_main_rank:
            scaler = self.accelerator.scaler
            state = TrainState(
                step=step,
                loss_first=loss_first,
                loss_last=loss_last,
                loader=loader.state_dict(),
                settings=self._arithmetic(),
                scaler=None if scaler is None else scaler.state_dict(),
                skipped_steps=meter.skipped.total,
                skipped_in_a_row=meter.skipped.in_a_row,
                base=self._base,
                evaluated=evaluated,
            )
            saved = self.checkpoints.save(
                state, model=whole.model, weights=whole.weights, optimizer=optimizer, processor=self._processor
            )
            _logger.info("checkpoint of step %d: %s", step, saved)
        self.accelerator.wait_for_everyone()
        return saved


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Makes the random states those of (seed, step, rank), so dropout and SpecAugment need no state in a checkpoint."""
    words = np.random.SeedSequence([seed & (2**64 - 1), step, rank]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(words[0])
    torch.manual_seed(int(words[0]) | int(words[1]) << 32)
