"""The model and its optimizer in a training run: where a checkpoint left them, and what one step does to them."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ResumeError
from forebay.steps.batch import IGNORED
from forebay.train.collate.patches import fields_of, pixel_dtype, to_model_inputs
from forebay.train.device import Batch
from forebay.train.loop.checkpoint import TrainState, load_optimizer, load_state, save_checkpoint
from forebay.train.loop.meter import Meter
from forebay.train.loop.micro_batches import BatchLoader, Group, host_sum, micro_batch_groups
from forebay.train.models.folder import check_batch, load_model, model_facts
from forebay.train.models.table import ModelFacts

_logger = logging.getLogger(__name__)


class Learner:
    """The model and its optimizer, as accelerate prepared them, and what one step does to them."""

    def __init__(
        self, config: Config, *, facts: ModelFacts, accelerator: Any, constants: Mapping[str, Any] | None = None
    ) -> None:
        """Starts nothing yet. constants: those of the source, by which uint8 patches are expanded."""
        self.settings = config.train
        self._loader = config.loader
        self._constants = constants or {}
        self.facts = facts
        self.accelerator = accelerator
        self._model: Any = None
        self._optimizer: Any = None

    @property
    def model(self) -> Any:
        """The model as accelerate prepared it; None before `start`."""
        return self._model

    def start(self, checkpoint: Path | None, *, loader: BatchLoader) -> TrainState | None:
        """Returns the state of `checkpoint`; model, optimizer and loader then stand where the checkpoint left them."""
        state = load_state(checkpoint) if checkpoint else None
        model = (
            _checkpoint_model(self.facts, checkpoint)
            if checkpoint
            else load_model(self.facts.folder, seed=self._loader.seed, init=self.settings.init)
        )
        self._model, self._optimizer = self.accelerator.prepare(model, adamw(model, self.settings))
        if state is None or checkpoint is None:
            return None
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
        return state

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
            "max_steps",
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "grad_acc",
            "mixed_precision",
        )
        settings = {"seed": self._loader.seed, **{name: getattr(self.settings, name) for name in names}}
        return {**settings, "num_ranks": self.accelerator.num_processes}

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
            count_targets=partial(count_targets, labels_are_shifted=self.facts.labels_are_shifted),
            sum_over_ranks=host_sum(self.accelerator.num_processes),
            num_ranks=self.accelerator.num_processes,
        )

    def meter(self, state: TrainState | None) -> Meter:
        """Returns a meter that sums the losses of the steps after `state` over the ranks."""
        return Meter(
            first_step=state.step + 1 if state else 1,
            losses=(state.loss_first, state.loss_last) if state else None,
            sum_on_device=partial(self.accelerator.reduce, reduction="sum"),
            has_scaler=self.accelerator.scaler is not None,
        )

    def update(self, group: Group, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's part of the step's loss and the gradient norm before clipping; the weights have moved.

        Only the last micro-batch of the group synchronises gradients. DDP takes the mean over ranks, hence the factor.
        """
        seed_step(self._loader.seed, step=step, rank=self.accelerator.process_index)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.settings.learning_rate * lr_factor(step, self.settings)
        total = torch.zeros((), device=self.accelerator.device)
        for position, (batch, weight) in enumerate(group.batches, start=1):
            is_last = position == len(group.batches)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self._model):
                loss = self._loss(batch) * (weight / group.num_targets)
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        limit = self.settings.max_grad_norm if self.settings.max_grad_norm > 0 else math.inf
        grad_norm: torch.Tensor = self.accelerator.clip_grad_norm_(self._model.parameters(), limit)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, grad_norm

    def _loss(self, batch: Batch) -> torch.Tensor:
        check_batch(self.facts, fields_of(batch))
        device, dtype = self.accelerator.device, pixel_dtype(self._loader.pixels)
        inputs = to_model_inputs(batch, self._constants, device=device, dtype=dtype)
        labels = inputs.pop("labels")
        logits = self._model(**inputs).logits
        return summed_loss(logits, labels, labels_are_shifted=self.facts.labels_are_shifted)

    def save(self, folder: Path, *, step: int, meter: Meter, loader: BatchLoader) -> Path | None:
        """Returns the checkpoint that rank 0 has written, None on other ranks; all ranks return when it is there."""
        saved = None
        loss_first, loss_last = meter.losses
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            state = TrainState(
                step=step,
                loss_first=loss_first,
                loss_last=loss_last,
                loader=loader.state_dict(),
                settings=self._arithmetic(),
                scaler=None if scaler is None else scaler.state_dict(),
            )
            saved = save_checkpoint(
                folder,
                state,
                model=self.accelerator.unwrap_model(self._model),  # keeps the casts of mixed precision in place
                optimizer=self._optimizer.state_dict(),
                processor_folder=self.facts.folder,
            )
            _logger.info("checkpoint of step %d: %s", step, saved)
        self.accelerator.wait_for_everyone()
        return saved


def _checkpoint_model(wanted: ModelFacts, checkpoint: Path) -> Any:
    try:
        stored = model_facts(checkpoint)
        model = load_model(checkpoint, seed=0)
    except ConfigError as err:
        raise ResumeError(f"cannot go on from {checkpoint}: {err}; train without --resume") from err
    was, now = (
        {"model_type": facts.model_type, "vocab_size": facts.vocab_size, **facts.constants}
        for facts in (stored, wanted)
    )
    for name, value in now.items():
        if was.get(name) != value:
            raise ResumeError(
                f"{name} is {was.get(name)} in {checkpoint} and {value} in {wanted.folder}; "
                "train without --resume, or set train.model back"
            )
    return model


def count_targets(labels: torch.Tensor, *, labels_are_shifted: bool) -> int:
    """Returns how many positions of `labels` [batch, tokens] count in the loss."""
    targets = labels if labels_are_shifted else labels[:, 1:]
    return int((targets != IGNORED).sum())


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, *, labels_are_shifted: bool) -> torch.Tensor:
    """Returns the cross-entropy summed over all targets, float32 scalar, in nats; 0 where there are none.

    logits: [batch, tokens, vocab]; labels: int64 [batch, tokens]. The sum over `count_targets` is what
    `model(**batch).loss` gives; the sum itself can be weighted by the targets of all micro-batches and ranks.
    """
    if not labels_are_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def lr_factor(step: int, settings: TrainConfig) -> float:
    """Returns the share of `learning_rate` that step 1, 2, ... takes: linear warm-up, then half a cosine towards 0.

    Step `warmup_steps` is the first at the full rate, and no step is spent at a rate of 0 (transformers'
    `get_cosine_schedule_with_warmup` spends the first). A function of the step, so it needs no state.
    """
    if step <= settings.warmup_steps:
        return step / settings.warmup_steps
    done = (step - 1 - settings.warmup_steps) / max((settings.max_steps or 100) - settings.warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


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


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Makes the random states those of (seed, step, rank), so dropout and SpecAugment need no state in a checkpoint."""
    words = np.random.SeedSequence([seed & (2**64 - 1), step, rank]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(words[0])
    torch.manual_seed(int(words[0]) | int(words[1]) << 32)
