"""The reference training loop: a model on accelerate, on one rank or several, with exact resume.

The loss of an optimizer step is the sum over all its target tokens, in all its micro-batches on all ranks, divided by
their number: what one large batch would give (transformers' `num_items_in_batch`). Micro-batches hold different numbers
of targets, so a mean of their means would weigh a token by how few others stood beside it.

accelerate places the model, casts and scales. accelerate does not wrap the loader. Gradients are synchronised where
`micro_batch_groups` says that a step ends, the end of an epoch included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config.train import TrainConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, MissingExtraError
from forebay.plan.usage import FILE_NAME
from forebay.store.source import parts_of, source_kind, without_audio
from forebay.train.evaluation.evaluations import Evaluations
from forebay.train.loader import Loader
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.learner import Learner, lr_factor
from forebay.train.loop.meter import StepLog
from forebay.train.loop.micro_batches import BatchLoader, host_sum
from forebay.train.loop.usage_log import UsageLog
from forebay.train.models.folder import check_config, check_constants, check_weights, model_facts
from forebay.train.models.table import FAMILIES, ModelFacts
from forebay.train.select import SourceKind, make_loader
from forebay.visible import from_here

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What `forebay train --json` prints; its fields are an interface."""

    steps: int
    """Optimizer steps that the model has had, those before a resume included."""
    loss_first: float
    """Loss of step 1, in nats a target token, also of a resumed run."""
    loss_last: float
    samples_per_s: float
    """Of this process's steps, over all ranks, from the first batch to the last checkpoint."""
    data_wait_share: float
    """Share of that time in which rank 0 waited for its loader."""
    padding: float
    """Share of padded frames in all frames, on rank 0."""
    source: SourceKind
    checkpoint: str | None
    """Folder of the last checkpoint; None on ranks other than 0, which writes it."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """Returns what `forebay train` prints."""
        return [
            f"{self.steps} steps, loss {self.loss_first:.3f} -> {self.loss_last:.3f}, {self.samples_per_s:.1f} "
            f"samples/s, {100 * self.data_wait_share:.1f} % waiting for data, {100 * self.padding:.1f} % padding, read "
            f"from {self.source}; checkpoint {from_here(self.checkpoint or 'none')}"
        ]


def run(
    config: Config, *, resume: bool | Path = False, log: Callable[[StepLog], None] | None = None
) -> TrainReport | None:
    """Returns the report of `train` with this rank's loader, which is made here; None on ranks other than 0.

    The model is checked against the config before any data is looked for, and against the source's constants before
    any of it is read.
    """
    facts = _check_settings(config)
    if not resume:
        check_weights(facts.folder, init=config.train.init)
    state = _process_state()
    try:
        loader = make_loader(_as_stored(config), dp_rank=state.process_index, dp_world_size=state.num_processes)
        for part in parts_of(loader.source):
            check_constants(facts, part.constants)
        report = train(
            config,
            loader=loader,
            source_kind=source_kind(loader.source),
            constants=loader.source.constants,
            resume=resume,
            log=log,
        )
        return report if state.is_main_process else None
    finally:
        if torch.distributed.is_initialized():
            state.destroy_process_group()


def train(
    config: Config,
    *,
    loader: BatchLoader,
    source_kind: SourceKind,
    constants: Mapping[str, Any] | None = None,
    resume: bool | Path = False,
    log: Callable[[StepLog], None] | None = None,
) -> TrainReport:
    """Returns the report of training up to `train.max_steps`; the run folder then holds the last checkpoint.

    loader: this rank's batches, on the host. Ranks come from accelerate (RANK and WORLD_SIZE, as torchrun sets them).
    constants: of the loader's source; batches of uint8 patches need them.
    resume: True goes on from the last checkpoint of the run folder, or starts where there is none yet; a path goes on
    from that checkpoint folder. A resumed run has the losses of an uninterrupted one.
    log: called on rank 0 every `train.log_every` steps and after the last; left out, a line of this module's logger.
    Moves the global random states: every step seeds them from (seed, step, rank).
    Raises ConfigError, CacheMismatchError (batches that the model cannot take), ResumeError, PlanError (no batches),
    ForebayError (a loss that is not finite, a checkpoint that cannot be written).
    """
    settings, folder = config.train, run_folder(config)
    facts, num_steps = _check_settings(config), settings.max_steps or 100
    # Micro-batches without audio give the audio encoder no gradient.
    has_text_alone = isinstance(loader, Loader) and without_audio(loader.source) is not None
    learner = Learner(
        config, facts=facts, accelerator=_accelerator(settings, has_text_alone=has_text_alone), constants=constants
    )
    evaluations = Evaluations(config, facts=facts, accelerator=learner.accelerator)
    checkpoint = _resume_from(folder, resume=resume)
    state = learner.start(checkpoint, loader=loader)
    meter, first = learner.meter(state), state.step if state else 0
    evaluations.begin(folder, step=first)
    usage = _usage_log(config, loader, step=first, num_ranks=learner.accelerator.num_processes)
    with contextlib.closing(learner.groups(loader)) as groups:
        for step, group in zip(range(first + 1, num_steps + 1), groups, strict=False):
            loss, grad_norm = learner.update(group, step=step)
            meter.add(loss=loss, grad_norm=grad_norm, group=group)
            if _is_due(step, settings.log_every, last=num_steps):
                rate = settings.learning_rate * lr_factor(step, settings)
                line = meter.line(learning_rate=rate, padding=float(loader.report()["padding"]))
                if learner.accelerator.is_main_process:
                    _logger.info("%s", line) if log is None else log(line)
            evaluations.after(step, model=learner.model, is_last=step == num_steps)
            is_saved = _is_due(step, settings.checkpoint_every, last=num_steps)
            if usage is not None and (is_saved or step % settings.usage_every == 0):
                usage.record(step)  # before the checkpoint: whoever goes on from it finds a line that leads there
            if is_saved:
                checkpoint = learner.save(folder, step=step, meter=meter, loader=loader)
    loss_first, loss_last = meter.losses
    return TrainReport(
        steps=max(first, num_steps),
        loss_first=loss_first,
        loss_last=loss_last,
        samples_per_s=meter.num_samples / meter.elapsed_s,
        data_wait_share=meter.wait_s / meter.elapsed_s,
        padding=float(loader.report()["padding"]),
        source=source_kind,
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


def _as_stored(config: Config) -> Config:
    """Returns a config whose packs keep their uint8 patches: the learner expands the patches on the device."""
    return dataclasses.replace(config, loader=dataclasses.replace(config.loader, pixels="uint8"))


def _is_due(step: int, every: int, *, last: int) -> bool:
    """Returns whether something happens after `step`: every so many steps (0: never), and after the last step."""
    return step == last or (every > 0 and step % every == 0)


def _usage_log(config: Config, loader: BatchLoader, *, step: int, num_ranks: int) -> UsageLog | None:
    """Returns the log of what is used after `step`; None where no log is wanted, or the loader has no plan."""
    settings = config.train
    if not settings.usage_every or not isinstance(loader, Loader):
        return None
    return UsageLog(
        run_folder(config) / "logs" / FILE_NAME,
        loader,
        step=step,
        sum_over_ranks=host_sum(num_ranks),
        with_ids=settings.usage_ids,
    )


def _check_settings(config: Config) -> ModelFacts:
    if config.train.model is None:
        raise ConfigError(
            f"{config.path}: train.model is missing; name the folder of a model whose model_type is one of "
            f"{', '.join(FAMILIES)}"
        )
    facts = model_facts(Path(config.train.model))
    check_config(facts, config)
    return facts


def _resume_from(folder: Path, *, resume: bool | Path) -> Path | None:
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
    # Unless told so, accelerate takes the ranks of torchrun on a machine without an accelerator for single processes.
    return not torch.accelerator.is_available()


def _accelerator(settings: TrainConfig, *, has_text_alone: bool) -> Any:
    state = _process_state()
    if settings.mixed_precision == "fp16" and state.device.type == "cpu":
        raise ConfigError(
            'train.mixed_precision = "fp16" needs an accelerator, and this run is on the CPU; set it to "bf16" or "no"'
        )
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    try:
        # The plugin, because a bare number is overridden by an environment variable, and `backward` divides by it.
        return Accelerator(
            cpu=_is_on_cpu(),
            mixed_precision=settings.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            # DDP otherwise waits for the gradients of an encoder that a text has no use for.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if has_text_alone else None,
        )
    except ValueError as err:
        raise ConfigError(f'train.mixed_precision = "{settings.mixed_precision}" is not possible here: {err}') from err
