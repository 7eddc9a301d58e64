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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.plan.drawn import Drawn, drawn_lines
from forebay.store.source import parts_of, source_kind, without_audio
from forebay.terminal import CommandReport
from forebay.train.evaluation.evaluations import Evaluations, failed_line
from forebay.train.loader import Loader
from forebay.train.loop.after_step import AfterStep, Board, drawn_by
from forebay.train.loop.checkpoint import find_checkpoint, run_folder
from forebay.train.loop.launch import check_trackers, make_accelerator, process_state, require_extras
from forebay.train.loop.learner import Learner
from forebay.train.loop.meter import Meter, Phases, StepLog, waiting_line
from forebay.train.loop.recorder import Recorder
from forebay.train.loop.schedule import BatchLoader
from forebay.train.loop.trainable import num_compilations
from forebay.train.loop.usage_log import Traffic
from forebay.train.models.families import FAMILIES, ModelFacts
from forebay.train.models.model_folder import check_config, check_constants, check_weights, model_facts
from forebay.train.select import SourceKind, as_stored, make_loader
from forebay.visible import from_here

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport(CommandReport):
    """The document of `forebay train --json`; its fields are an interface."""

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
    skipped_steps: int = 0
    """Steps of the run that the scaler of fp16 skipped, those before a resume included."""
    compilations: int = 0
    """Graphs that torch.compile has compiled, those of new shapes included; 0 without `train.compile`."""
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the phases of this process's start, in their order."""
    buckets: dict[str, Drawn] = dataclasses.field(default_factory=dict)
    """What was drawn of each bucket in the whole run, over all ranks; empty for a loader without a plan."""

    evaluations: int = 0
    """Evaluations of this process that gave a result."""
    evaluations_failed: int = 0
    last_failure: str | None = None
    """The last line, where evaluations failed."""
    waiting: str | None = None
    """Why the run waited for data, and the command; None where it hardly did."""
    remote: list[Traffic] | None = None
    """What each node asked of stores, a node an element; None where all caches are local."""

    def lines(self) -> list[str]:
        """Returns what `forebay train` prints."""
        return [
            f"{self.steps} steps, loss {self.loss_first:.3f} -> {self.loss_last:.3f}, {self.samples_per_s:.1f} "
            f"samples/s, {100 * self.data_wait_share:.1f} % waiting for data, {100 * self.padding:.1f} % padding, read "
            f"from {self.source}; checkpoint {from_here(self.checkpoint or 'none')}",
            *drawn_lines(self.buckets),
            *(
                f"node {node}: {traffic}, {traffic.misses} misses, {traffic.evictions} evictions"
                for node, traffic in enumerate(self.remote or ())
            ),
            *([f"{self.skipped_steps} steps skipped by the scaler of fp16"] if self.skipped_steps else []),
            *([f"{self.compilations} graphs compiled"] if self.compilations else []),
            *filter(None, (self.waiting, self.last_failure)),
        ]


def run(
    config: Config,
    *,
    resume: bool | Path = False,
    log: Callable[[StepLog], None] | None = None,
    phases: Phases | None = None,
    recorder: Recorder | None = None,
) -> TrainReport | None:
    """Returns the report of `train` with this rank's loader, which is made here; None on ranks other than 0.

    The model is checked against the config before any data is looked for, and against the source's constants before
    any of it is read. phases: what came before, imports for one.
    recorder: ends the run after its steps, see `forebay.measure.profile`.
    """
    phases = phases or Phases()
    with phases("settings"):
        facts = _check_settings(config)
        require_extras(config, command="forebay train", writes=facts.writes)
        if not resume:
            check_weights(facts.folder, init=config.train.init)
        state = process_state()
    try:
        with phases("data"):
            loader = make_loader(as_stored(config), dp_rank=state.process_index, dp_world_size=state.num_processes)
            for part in parts_of(loader.source):
                check_constants(facts, part.constants)
        report = train(
            config,
            loader=loader,
            source_kind=source_kind(loader.source),
            constants=loader.source.constants,
            resume=resume,
            log=log,
            phases=phases,
            recorder=recorder,
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
    phases: Phases | None = None,
    recorder: Recorder | None = None,
) -> TrainReport:
    """Returns the report of a whole run, whose folder then holds the last checkpoint; `Schedule` says how long it is.

    loader: this rank's batches, on the host. Ranks come from accelerate (RANK and WORLD_SIZE, as torchrun sets them).
    constants: of the loader's source; batches of uint8 patches need them.
    resume: True goes on from the last checkpoint of the run folder, or starts where there is none yet; a path goes on
    from that checkpoint folder. A resumed run has the losses of an uninterrupted one.
    log: called on rank 0 every `train.log_every` steps and after the last; left out, a line of this module's logger.
    Moves the global random states: every step seeds them from (seed, step, rank).
    Raises ConfigError, CacheMismatchError (batches that the model cannot take), ResumeError, PlanError (no batches),
    ForebayError (a loss that is not finite, a checkpoint that cannot be written).
    """
    facts = _check_settings(config)
    # Micro-batches without audio give the audio encoder no gradient.
    has_text_alone = isinstance(loader, Loader) and without_audio(loader.source) is not None
    phases = phases or Phases()
    compilations = num_compilations()
    accelerator = make_accelerator(config, has_text_alone=has_text_alone, may_rest=facts.own_loss is not None)
    learner = Learner(config, facts=facts, accelerator=accelerator, constants=constants)
    with phases("evaluation sets") if config.train.eval else contextlib.nullcontext():
        evaluations = Evaluations(config, facts=facts, accelerator=accelerator, trained=constants)
    checkpoint = _resume_from(run_folder(config), resume=resume)
    state = learner.start(checkpoint, loader=loader, phases=phases)
    first, last = state.step if state else 0, learner.schedule.num_steps
    if recorder is not None:
        last = first + recorder.watch(learner.model)
    with (
        recorder or contextlib.nullcontext(),
        Board(config, accelerator, step=first, last=last, log=log) as board,
        contextlib.closing(learner.groups(loader)) as groups,
    ):
        after_step = AfterStep(config, learner, loader=loader, evaluations=evaluations, state=state, board=board)
        after_step.has_checkpoint |= recorder is not None  # a profile leaves none
        for step, group in zip(range(first + 1, last + 1), phases.started(groups), strict=False):
            after_step(step, learner.update(group, step=step), group)
            if recorder is not None:
                recorder.step_done()
    meter, failed = after_step.meter, evaluations.failed
    return _report(
        meter,
        steps=max(first, last),
        padding=float(loader.report()["padding"]),
        source=source_kind,
        checkpoint=checkpoint if first >= last else after_step.checkpoint,
        compilations=num_compilations() - compilations,
        evaluations=evaluations.num_done,
        evaluations_failed=len(failed),
        last_failure=failed_line(failed, num_done=evaluations.num_done) if failed else None,
        phases=phases.seconds,
        remote=after_step.traffic(),
        waiting=waiting_line(config, loader, share=_wait_share(meter, phases), is_uncached=source_kind == "uncached"),
        buckets=drawn_by(loader, config) if learner.is_main_rank else {},
    )


def _wait_share(meter: Meter, phases: Phases) -> float:
    """Returns the share of the time in which the run waited behind its first batch, for which every run waits."""
    first_s = phases.seconds.get("first batch", 0.0)
    return max(meter.wait_s - first_s, 0.0) / max(meter.elapsed_s - first_s, 1e-9)


def _report(meter: Meter, *, checkpoint: Path | None, **facts: Any) -> TrainReport:
    loss_first, loss_last = meter.losses
    return TrainReport(
        loss_first=loss_first,
        loss_last=loss_last,
        samples_per_s=meter.num_samples / meter.elapsed_s,
        data_wait_share=meter.wait_s / meter.elapsed_s,
        checkpoint=None if checkpoint is None else str(checkpoint),
        skipped_steps=meter.skipped.total,
        **facts,
    )


def _check_settings(config: Config) -> ModelFacts:
    if config.train.model is None:
        raise ConfigError(
            f"{config.path}: train.model is missing; name the folder of a model whose model_type is one of "
            f"{', '.join(FAMILIES)}, or of any other of transformers that returns a loss",
            code="FB108",
        )
    check_trackers(config.train)
    facts = model_facts(Path(config.train.model), config)
    check_config(facts, config)
    return facts


def _resume_from(folder: Path, *, resume: bool | Path) -> Path | None:
    if isinstance(resume, Path):
        return resume
    checkpoint = find_checkpoint(folder) if resume else None
    if resume and checkpoint is None:
        _logger.info("no checkpoint in %s yet: starting at step 1", folder)
    return checkpoint
