"""The reference training loop: a model on accelerate, on one rank or several, with exact resume.

The loss of an optimizer step is the sum over all its target tokens, in all its micro-batches on all ranks, divided by
their number: what one large batch would give (transformers' `num_items_in_batch`). Micro-batches hold different numbers
of targets, so a mean of their means would weigh a token by how few others stood beside it.

accelerate places the model, casts and scales. accelerate does not wrap the loader. Gradients are synchronised where
`micro_batch_groups` says that a step ends, the end of an epoch included.

A dry run has no model: the plan and the loader at full speed, and what they hand out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.plan.cursor import LoaderState
from forebay.plan.interface import Plan
from forebay.plan.plan_usage import Drawn, Population, Usage, UsageCounter, drawn_lines, expected_shares, population
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.source import SampleSource, SourceUnion, parts_of, source_kind, without_audio
from forebay.terminal import CommandReport
from forebay.train.collate.device_features import constants_seen
from forebay.train.collate.patches import fields_of
from forebay.train.device import Batch
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
from forebay.train.loop.usage_log import NodeTraffic, Traffic
from forebay.train.models.families import FAMILIES, ModelFacts
from forebay.train.models.model_folder import check_config, check_constants, check_weights, model_facts
from forebay.train.select import SourceKind, as_stored, make_loader
from forebay.visible import from_here, human_bytes, printable

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
    parts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Of these the samples by cache of `[[mixture.source]]`, or by value of `mixture.column`; empty where there is
    neither."""
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
            *_share_lines("part", self.parts),
            *(
                f"node {node}: {traffic}, {traffic.misses} misses, {traffic.evictions} evictions"
                for node, traffic in enumerate(self.remote or ())
            ),
            *([f"{self.skipped_steps} steps skipped by the scaler of fp16"] if self.skipped_steps else []),
            *([f"{self.compilations} graph{'s' * (self.compilations != 1)} compiled"] if self.compilations else []),
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
                check_constants(facts, constants_seen(config, part.constants))
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
        buckets=drawn_by(loader) if learner.is_main_rank else {},
        parts=_parts(config, loader) if learner.is_main_rank else {},
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
    if config.text is not None and config.text.settings.get("pairs"):
        raise ConfigError(
            f"{config.path}: text.pairs is true, and forebay train has no loss of preferences; give the loader to one "
            "that has, as TRL's DPOTrainer (docs/vision.md)"
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


_SAY_EVERY_S = 10.0
_MAX_ROWS = 24
"""Languages, or sources, that are printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmed:
    """The shards that a dry run brought to this node from stores."""

    bytes: int
    bytes_per_s: float
    """Over the whole time."""
    missing_bytes: int
    """Of shards that an epoch needs and that are not here; what does not fit the bound of the node is left out."""
    missing_s: float | None
    """How long these take at that rate; None where nothing came."""

    def __str__(self) -> str:
        line = f"{human_bytes(self.bytes)} downloaded at {human_bytes(self.bytes_per_s)}/s"
        if not self.missing_bytes:
            return f"{line}; all that this node keeps is here"
        line += f"; {human_bytes(self.missing_bytes)} are not here yet"
        return line if self.missing_s is None else f"{line}, {self.missing_s:.0f} s more at that rate"


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunReport(CommandReport):
    """The document of `forebay train --dry-run --json`; its fields are an interface."""

    steps: int
    """Micro-batches that were read."""
    epochs: float
    """Epochs that these are."""
    samples: int
    repeats: int
    """Samples that came again in one epoch."""
    batches_per_s: float
    """Over the whole time, the start included."""
    samples_per_s: float
    first_batch_s: float
    """Seconds until the first batch: threads start, files are opened."""
    size_bytes: int
    """Of all batches."""
    padding: float
    """Share of padded frames in all frames."""
    languages: dict[str, dict[str, float]]
    """By language `samples`, their `share` of all samples and the `expected` share; empty where none is known."""
    sources: dict[str, dict[str, float]]
    parts: dict[str, dict[str, float]]
    """By cache of `[[mixture.source]]`; empty where there is but one."""
    shards_touched: int
    num_shards: int
    """0 where nothing is sharded: uncached."""
    num_batches: int
    """Micro-batches of an epoch."""
    source: Literal["cache", "uncached"]
    remote: Warmed | None = None
    """None where all caches are local."""

    def lines(self) -> Iterator[str]:
        """Yields what `forebay train --dry-run` prints."""
        yield (
            f"{self.steps} batches ({self.epochs:g} epochs), {self.samples} samples, {human_bytes(self.size_bytes)} "
            f"from {self.source}: {self.batches_per_s:.1f} batches/s, {self.samples_per_s:.1f} samples/s, "
            f"first batch after {self.first_batch_s:.2f} s"
        )
        yield f"padding {100 * self.padding:.1f} %, {self.repeats} samples repeated in their epoch"
        if self.remote is not None:
            yield str(self.remote)
        if self.num_shards:
            yield f"shards touched: {self.shards_touched} of {self.num_shards}"
        for kind, rows in (("part", self.parts), ("language", self.languages), ("source", self.sources)):
            yield from _share_lines(kind, rows)


def _share_lines(kind: str, rows: dict[str, dict[str, float]]) -> Iterator[str]:
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["samples"])[:_MAX_ROWS]:
        yield f"{kind} {printable(name)}: {100 * row['share']:.2f} %, expected {100 * row['expected']:.2f} %"
    if len(rows) > _MAX_ROWS:
        yield f"and {len(rows) - _MAX_ROWS} more {kind}s (--json lists them all)"


def dry_run(config: Config, *, steps: int = 200) -> DryRunReport:
    """Returns what the loader of a config gives in `steps` micro-batches of one rank, epoch after epoch from the first.

    Needs no `train.model`, and writes nothing but, where it is missing, the plan. Shards of a remote cache that these
    micro-batches need are on this node then; a log line says now and then how far that is. Raises as `make_loader`.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}, wanted 1 or more")
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    start, times_s, size_bytes = loader.state, [time.perf_counter()], 0
    warming = _Warming.of(loader.source)
    with contextlib.closing(_batches(loader)) as batches:
        for step, batch in enumerate(itertools.islice(batches, steps), start=1):
            times_s.append(time.perf_counter())
            if warming is not None:
                warming.say(step, steps)
            size_bytes += sum(
                getattr(value, "nbytes", 0) for value in fields_of(batch).values()
            )  # packs hold plain numbers
    people = population(loader.source)
    usage = UsageCounter(people, loader.plan, dp_world_size=1).count(start, loader.state)
    elapsed_s = max(times_s[-1] - times_s[0], 1e-9)
    return DryRunReport(
        steps=usage.batches,
        epochs=round(usage.batches / loader.plan.num_batches, 4),
        samples=usage.samples,
        repeats=usage.repeats,
        batches_per_s=usage.batches / elapsed_s,
        samples_per_s=usage.samples / elapsed_s,
        first_batch_s=times_s[1] - times_s[0],
        size_bytes=size_bytes,
        padding=float(loader.report()["padding"]),
        languages=_compared(usage, people, loader.plan, "language", loader.state),
        sources=_compared(usage, people, loader.plan, "source", loader.state),
        parts=_compared(usage, people, loader.plan, "part", loader.state),
        shards_touched=int(np.count_nonzero(usage.shards)),
        num_shards=len(usage.shards),
        num_batches=loader.plan.num_batches,
        source=source_kind(loader.source),
        remote=None if warming is None else warming.warmed(),
    )


class _Warming:
    """Follows what a dry run downloads."""

    def __init__(self, shards: RemoteShards) -> None:
        self._shards, self._traffic = shards, NodeTraffic(shards, rank=0, world=1, sum_over_ranks=list)
        self._done, self._start_s = Traffic(), time.perf_counter()
        self._said_s = self._start_s

    @classmethod
    def of(cls, source: SampleSource) -> _Warming | None:
        shards = RemoteShards(source)
        return cls(shards) if len(shards) else None

    def say(self, step: int, steps: int) -> None:
        """Logs how far the run is, now and then."""
        now_s = time.perf_counter()
        if now_s - self._said_s > _SAY_EVERY_S:
            self._said_s, left_s = now_s, (now_s - self._start_s) / step * (steps - step)
            bytes_, per_s = self._rate()
            _logger.info(
                "%d of %d micro-batches: %s downloaded at %s/s, %.0f s to go",
                *(step, steps, human_bytes(bytes_), human_bytes(per_s), left_s),
            )

    def warmed(self) -> Warmed:
        """Returns what is here now, and what is not."""
        bytes_, per_s = self._rate()
        missing = min(self._shards.missing_bytes(), max(self._shards.bound_bytes - bytes_, 0))
        return Warmed(
            bytes=bytes_, bytes_per_s=per_s, missing_bytes=missing, missing_s=missing / per_s if per_s else None
        )

    def _rate(self) -> tuple[int, float]:
        self._done = sum(self._traffic.take(), self._done)
        return self._done.bytes, self._done.bytes / max(time.perf_counter() - self._start_s, 1e-9)


def _batches(loader: Loader) -> Generator[Batch, None, None]:
    """Yields batches for ever. Every epoch has one: a loader without any cannot be made."""
    while True:
        yield from loader


def _parts(config: Config, loader: BatchLoader) -> dict[str, dict[str, float]]:
    if not isinstance(loader, Loader):
        return {}
    source, column = loader.source, config.mixture.column
    found = None if column is None else source.categories(column)
    if isinstance(source, SourceUnion):
        found = source.names, source.source_of
    if found is None:
        return {}
    (names, codes), end, start = found, loader.state, dataclasses.replace(loader.state, epoch=0, position=0)
    people = Population(num_samples=len(codes), names={"part": list(names)}, codes={"part": codes}, shards=None)
    usage = UsageCounter(people, loader.plan, dp_world_size=loader.dp_world_size).count(start, end)
    return _compared(usage, people, loader.plan, "part", end)


def _compared(
    usage: Usage, people: Population, plan: Plan, column: str, end: LoaderState
) -> dict[str, dict[str, float]]:
    if column not in usage.counts:
        return {}
    counts = usage.counts[column].tolist()
    shares = expected_shares(people, plan, column, end=end).tolist()
    return {
        name: {"samples": count, "share": round(count / max(usage.samples, 1), 6), "expected": round(share, 6)}
        for name, count, share in zip(people.names[column], counts, shares, strict=True)
    }
