"""The reference training loop: Whisper and Qwen3-ASR models on accelerate, one or several ranks, with exact resume.

The loss of an optimizer step is the sum over all its target tokens, in all its micro-batches on all ranks, divided by
their number: what one large batch would give (transformers' `num_items_in_batch`). Micro-batches hold different numbers
of targets, so a mean of their means would weigh a token by how few others stood beside it.

accelerate places the model, casts and scales; it does not wrap the loader, and gradients are synchronised where
`micro_batch_groups` says that a step ends, the end of an epoch included.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from forebay.errors import ConfigError, MissingExtraError, ResumeError
from forebay.train.checkpoint import (
    TrainState,
    find_checkpoint,
    load_optimizer,
    load_state,
    run_folder,
    save_checkpoint,
)
from forebay.train.meter import Meter, StepLog
from forebay.train.micro_batches import BatchLoader, Group, host_sum, micro_batch_groups
from forebay.train.models import (
    ModelFacts,
    check_batch,
    check_config,
    check_constants,
    count_targets,
    load_model,
    model_facts,
    summed_loss,
)

if TYPE_CHECKING:
    from forebay.config import Config, TrainConfig

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What `forebay train --json` prints; its fields are an interface."""

    steps: int
    """Optimizer steps that the model has had, those before a resume included."""
    loss_first: float | None
    """Loss of this run's first step, in nats a target token; this and `loss_last` are None where no step was left to do."""
    loss_last: float | None
    samples_per_s: float
    """Over all ranks, from the first batch to the last checkpoint."""
    data_wait_share: float
    """Share of that time in which rank 0 waited for its loader."""
    padding: float
    """Share of padded frames in all frames, on rank 0."""
    source: Literal["cache", "uncached"]
    checkpoint: str | None
    """Folder of the last checkpoint; None on ranks other than 0, which writes it."""


def run(config: Config, *, resume: bool | Path = False, log: Callable[[StepLog], None] | None = None) -> TrainReport:
    """Returns the report of `train` with this rank's loader, which is made here.

    The model is checked against the config before any data is looked for, and against the source's constants before
    any of it is read.
    """
    from forebay.store.cache import Cache
    from forebay.train import make_loader

    facts = _check_settings(config)
    state = _process_state()
    try:
        loader = make_loader(config, dp_rank=state.process_index, dp_world_size=state.num_processes)
        check_constants(facts, loader.source.constants)
        source_kind: Literal["cache", "uncached"] = "cache" if isinstance(loader.source, Cache) else "uncached"
        return train(config, loader=loader, source_kind=source_kind, resume=resume, log=log)
    finally:
        if torch.distributed.is_initialized():
            state.destroy_process_group()


def train(
    config: Config,
    *,
    loader: BatchLoader,
    source_kind: Literal["cache", "uncached"],
    resume: bool | Path = False,
    log: Callable[[StepLog], None] | None = None,
) -> TrainReport:
    """Returns the report of training up to `train.max_steps`; the run folder then holds the last checkpoint.

    loader: this rank's batches, on the host. Ranks come from accelerate (RANK and WORLD_SIZE, as torchrun sets them).
    resume: True goes on from the last checkpoint of the run folder, or starts where there is none yet; a path goes on
    from that checkpoint folder. A resumed run has the losses of an uninterrupted one.
    log: called on rank 0 every `train.log_every` steps and after the last; left out, a line of this module's logger.
    Moves the global random states: every step seeds them from (seed, step, rank).
    Raises ConfigError, CacheMismatchError (batches that the model cannot take), ResumeError, PlanError (no batches),
    ForebayError (a loss that is not finite, a checkpoint that cannot be written).
    """
    settings, facts = config.train, _check_settings(config)
    learner = _Learner(settings, facts=facts, accelerator=_accelerator(settings))
    checkpoint = _resume_from(resume, run_folder(config))
    first = learner.start(checkpoint, loader=loader)
    meter = learner.meter(first_step=first + 1)
    with contextlib.closing(learner.groups(loader)) as groups:
        for step, group in zip(range(first + 1, settings.max_steps + 1), groups, strict=False):
            loss, grad_norm = learner.update(group, step=step)
            meter.add(loss=loss, grad_norm=grad_norm, group=group)
            is_last = step == settings.max_steps
            if is_last or step % settings.log_every == 0:
                rate = settings.learning_rate * lr_factor(step, settings)
                line = meter.line(learning_rate=rate, padding=float(loader.report()["padding"]))
                if learner.accelerator.is_main_process:
                    (log or _log_line)(line)
            if is_last or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
                meter.settle()
                checkpoint = learner.save(run_folder(config), step=step, loader=loader)
    return TrainReport(
        steps=max(first, settings.max_steps),
        loss_first=meter.loss_first,
        loss_last=meter.loss_last,
        samples_per_s=meter.num_samples / meter.elapsed_s,
        data_wait_share=meter.wait_s / meter.elapsed_s,
        padding=float(loader.report()["padding"]),
        source=source_kind,
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


def lr_factor(step: int, settings: TrainConfig) -> float:
    """Returns the share of `learning_rate` that step 1, 2, ... takes: linear warm-up, then half a cosine towards 0.

    Step `warmup_steps` is the first at the full rate, and no step is spent at a rate of 0 (transformers'
    `get_cosine_schedule_with_warmup` spends the first). A function of the step, so it needs no state.
    """
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    done = (step - 1 - settings.warmup_steps) / max(settings.max_steps - settings.warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


class _Learner:
    """The model and its optimizer, as accelerate prepared them, and what one step does to them."""

    def __init__(self, settings: TrainConfig, *, facts: ModelFacts, accelerator: Any) -> None:
        self.settings = settings
        self.facts = facts
        self.accelerator = accelerator
        self._model: Any = None
        self._optimizer: Any = None

    def start(self, checkpoint: Path | None, *, loader: BatchLoader) -> int:
        """Returns the steps done so far; afterwards model, optimizer and loader stand where `checkpoint` left them."""
        state = load_state(checkpoint) if checkpoint else None
        model = (
            _checkpoint_model(self.facts, checkpoint)
            if checkpoint
            else load_model(self.facts.folder, seed=self.settings.seed)
        )
        self._model, self._optimizer = self.accelerator.prepare(model, adamw(model, self.settings))
        if state is None or checkpoint is None:
            return 0
        try:
            self._optimizer.load_state_dict(load_optimizer(checkpoint))
        except (ValueError, KeyError) as err:
            raise ResumeError(
                f"{checkpoint}/optimizer.pt does not fit the model: {err}; train without --resume"
            ) from err
        if self.accelerator.scaler is not None and state.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        loader.load_state_dict(state.loader)
        self._tell_resume(checkpoint, state)
        return state.step

    def _tell_resume(self, checkpoint: Path, state: TrainState) -> None:
        if not self.accelerator.is_main_process:
            return
        now = self._arithmetic()
        changed = [f"{k} {state.settings.get(k)!r} -> {now[k]!r}" for k in now if state.settings.get(k) != now[k]]
        _logger.info("going on after step %d of %s", state.step, checkpoint)
        if changed:
            _logger.warning("settings differ from those of the checkpoint, so losses will too: %s", ", ".join(changed))

    def _arithmetic(self) -> dict[str, Any]:
        names = (
            "seed",
            "max_steps",
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "grad_acc",
            "mixed_precision",
        )
        return {**{name: getattr(self.settings, name) for name in names}, "num_ranks": self.accelerator.num_processes}

    def groups(self, loader: BatchLoader) -> Any:
        """Returns the groups of micro-batches, one a step."""
        return micro_batch_groups(
            loader,
            size=self.settings.grad_acc,
            count_targets=partial(count_targets, labels_are_shifted=self.facts.labels_are_shifted),
            sum_over_ranks=host_sum(self.accelerator.num_processes),
            num_ranks=self.accelerator.num_processes,
        )

    def meter(self, *, first_step: int) -> Meter:
        """Returns a meter that sums this run's losses over the ranks."""
        return Meter(
            first_step=first_step,
            sum_on_device=partial(self.accelerator.reduce, reduction="sum"),
            has_scaler=self.accelerator.scaler is not None,
        )

    def update(self, group: Group, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's part of the step's loss and the gradient norm before clipping; afterwards the weights have moved.

        Only the last micro-batch of the group synchronises gradients. DDP takes the mean over ranks, hence the factor.
        """
        _seed_step(self.settings.seed, step=step, rank=self.accelerator.process_index)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.settings.learning_rate * lr_factor(step, self.settings)
        total = torch.zeros((), device=self.accelerator.device)
        for position, (batch, weight) in enumerate(group.batches, start=1):
            is_last = position == len(group.batches)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self._model):
                loss = self._loss(batch) * (weight / group.num_targets)
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        grad_norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, grad_norm

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        check_batch(self.facts, batch)
        inputs = {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        logits = self._model(**inputs, use_cache=False).logits
        return summed_loss(logits, labels, labels_are_shifted=self.facts.labels_are_shifted)

    def _clip(self) -> torch.Tensor:
        limit = self.settings.max_grad_norm
        norm: torch.Tensor = self.accelerator.clip_grad_norm_(
            self._model.parameters(), limit if limit > 0 else math.inf
        )
        return norm

    def save(self, folder: Path, *, step: int, loader: BatchLoader) -> Path | None:
        """Returns the checkpoint that rank 0 has written, None on other ranks; all ranks return when it is there."""
        saved = None
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            state = TrainState(
                step=step,
                loader=loader.state_dict(),
                settings=self._arithmetic(),
                scaler=None if scaler is None else scaler.state_dict(),
            )
            saved = save_checkpoint(
                folder,
                state,
                model=self.accelerator.unwrap_model(self._model, keep_fp32_wrapper=False),
                optimizer=self._optimizer.state_dict(),
                processor_folder=self.facts.folder,
            )
            _logger.info("checkpoint of step %d: %s", step, saved)
        self.accelerator.wait_for_everyone()
        return saved


def adamw(model: torch.nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """Returns AdamW over the model's trainable parameters; biases and norm weights (one axis) are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
    )


def _check_settings(config: Config) -> ModelFacts:
    if config.train.model is None:
        raise ConfigError(f"{config.path}: train.model is missing; name the folder of a Whisper or Qwen3-ASR model")
    facts = model_facts(Path(config.train.model))
    check_config(facts, config)
    return facts


def _checkpoint_model(wanted: ModelFacts, checkpoint: Path) -> Any:
    try:
        stored = model_facts(checkpoint)
        model = load_model(checkpoint, seed=0)
    except ConfigError as err:
        raise ResumeError(f"cannot go on from {checkpoint}: {err}; train without --resume") from err
    for name in ("model_type", "n_mels", "vocab_size"):
        if getattr(wanted, name) != getattr(stored, name):
            raise ResumeError(
                f"{name} is {getattr(stored, name)} in {checkpoint} and {getattr(wanted, name)} in {wanted.folder}; "
                "train without --resume, or set train.model back"
            )
    return model


def _resume_from(resume: bool | Path, folder: Path) -> Path | None:
    if isinstance(resume, Path):
        return resume
    checkpoint = find_checkpoint(folder) if resume else None
    if resume and checkpoint is None:
        _logger.info("no checkpoint in %s yet: starting at step 1", folder)
    return checkpoint


def _process_state() -> Any:
    """Returns accelerate's process state, its process group started; every rank that torchrun started is in it."""
    try:
        from accelerate import PartialState
    except ImportError as err:
        raise MissingExtraError("forebay train needs accelerate; run: pip install 'forebay[train]'") from err
    state = PartialState(cpu=_is_on_cpu())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ConfigError(
            f"WORLD_SIZE is {started}, but accelerate sees {state.num_processes} rank(s), and each would train alone: "
            "make no PartialState or Accelerator before forebay's"
        )
    return state


def _is_on_cpu() -> bool:
    # Unless it is told so, accelerate takes the ranks of torchrun on a machine without an accelerator for single processes.
    return not torch.accelerator.is_available()


def _accelerator(settings: TrainConfig) -> Any:
    state = _process_state()
    if settings.mixed_precision == "fp16" and state.device.type == "cpu":
        raise ConfigError(
            'train.mixed_precision = "fp16" needs an accelerator, and this run is on the CPU; set it to "bf16" or "no"'
        )
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    try:
        # The plugin, because a bare number is overridden by an environment variable, and `backward` divides by it.
        return Accelerator(
            cpu=_is_on_cpu(),
            mixed_precision=settings.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
    except ValueError as err:
        raise ConfigError(f'train.mixed_precision = "{settings.mixed_precision}" is not possible here: {err}') from err


def _seed_step(seed: int, *, step: int, rank: int) -> None:
    # Dropout and SpecAugment are then a function of (seed, step, rank): nothing of theirs has to be saved or replayed.
    words = np.random.SeedSequence([seed & (2**64 - 1), step, rank]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(words[0])
    torch.manual_seed(int(words[0]) | int(words[1]) << 32)


def _log_line(line: StepLog) -> None:
    _logger.info("%s", line)
