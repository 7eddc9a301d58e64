"""The work after an optimizer step, in its order: counting, log line, evaluations, usage log, checkpoint.

Where a run shows itself: the log, the trackers, and a bar with the time that is left on a terminal.

Which buckets a run has drawn, of its loader's plan.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from forebay.config.tree import Config
from forebay.plan.cursor import LoaderState
from forebay.plan.plan_usage import FILE_NAME, Drawn, drawn_classes
from forebay.pretrained import no_bar
from forebay.spans import EVALUATION, span
from forebay.train.evaluation.evaluate import EvalResult
from forebay.train.evaluation.evaluations import Evaluations
from forebay.train.loader import Loader
from forebay.train.loop.checkpoint import TrainState, run_folder
from forebay.train.loop.launch import Trackers
from forebay.train.loop.learner import Learner, Outcome
from forebay.train.loop.meter import Meter, StepLog, StepsLog
from forebay.train.loop.schedule import BatchLoader, Group, SumOverRanks, host_sum
from forebay.train.loop.usage_log import NodeTraffic, Traffic, UsageLog

_logger = logging.getLogger(__name__)


class Board:
    """The display of a run on rank 0, step by step; other ranks show nothing. A context: it ends bar and trackers."""

    def __init__(
        self, config: Config, accelerator: Any, *, step: int, last: int, log: Callable[[StepLog], None] | None = None
    ) -> None:
        """Starts the trackers. step, last: steps done before, and at the end of the run.

        log: called with each log line instead of this module's logger.
        """
        self._log, self._is_main = log, bool(accelerator.is_main_process)
        self._trackers = Trackers(config, accelerator, step=step)
        # A bar only for a person who looks on: a log file would get a line of it a second.
        is_shown = self._is_main and sys.stderr.isatty() and step < last
        self._bar = tqdm(
            total=last, initial=step, unit="step", desc=config.name, file=sys.stderr, disable=not is_shown, leave=False
        )
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._trackers.close)
        self._stack.callback(self._bar.close)
        if is_shown:
            self._stack.enter_context(logging_redirect_tqdm())  # lines go above the bar, not through it
            self._stack.enter_context(no_bar())

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def step_done(self) -> None:
        """Moves the bar on."""
        self._bar.update()

    def show(self, line: StepLog) -> None:
        """Shows a log line."""
        self._trackers.log(line)
        self._bar.set_postfix_str(f"loss {line.loss:.4f}", refresh=False)
        if self._is_main:
            _logger.info("%s", line) if self._log is None else self._log(line)

    def show_evaluation(self, result: EvalResult) -> None:
        """Hands an evaluation to the trackers; its line is the evaluation's own."""
        self._trackers.log_evaluation(result)


class AfterStep:
    """The work of a run between two steps. Every rank calls it after every step; the ranks meet in it."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        *,
        loader: BatchLoader,
        evaluations: Evaluations,
        state: TrainState | None,
        board: Board,
    ) -> None:
        """state: of the checkpoint that the run goes on from. board: where log lines and evaluations are shown."""
        self._settings = config.train
        self._learner, self._loader = learner, loader
        self._board = board
        self._evaluations = evaluations
        is_behind = state is not None and not learner.checkpoints.is_evaluated
        evaluations.begin(run_folder(config), step=state.step - is_behind if state else 0)
        self.has_checkpoint = state is not None
        """Whether the run could go on from one; if not, one is written before the first evaluation."""
        self.meter: Meter = learner.meter(state)
        self.checkpoint: Path | None = None
        """The last one that this run has written; None before, and on ranks other than 0."""
        self._steps = StepsLog(config, run_folder(config), step=state.step if state else 0)
        sum_over_ranks = host_sum(learner.num_ranks) if isinstance(loader, Loader) else None
        self._line_traffic, self._all_traffic, traffic = (_traffic(loader, sum_over_ranks) for _ in range(3))
        self._usage = _usage_log(
            config, loader, step=state.step if state else 0, sum_over_ranks=sum_over_ranks, traffic=traffic
        )
        if state is not None and is_behind:
            self._judge(state.step)
            self._finish_checkpoint()

    def __call__(self, step: int, outcome: Outcome, group: Group) -> None:
        """Does what is due after step 1, 2, ...; raises ForebayError where the run cannot go on.

        The order is part of what a resume can rely on: what a line of a log says is there before the checkpoint.
        """
        with span("bookkeeping"):
            self.meter.add(loss=outcome.loss, grad_norm=outcome.grad_norm, group=group, is_skipped=outcome.is_skipped)
        if self._is_due(step, self._settings.log_every):
            with span("log"):
                self._write_line(step)
        is_saved = self._is_due(step, self._settings.checkpoint_every)
        # Before the evaluations, which may end the process; a run's first checkpoint is before all of them.
        is_early = self._are_due(step) and (is_saved or not self.has_checkpoint)
        if is_early:
            self._save(step, evaluated=False)
        is_best = self._judge(step)
        if is_early:
            self._finish_checkpoint()
        elif is_saved or is_best:
            self._save(step)
        elif self._usage is not None and step % self._settings.usage_every == 0:
            self._usage.record(step)
        self._board.step_done()

    def _save(self, step: int, *, evaluated: bool = True) -> None:
        if self._usage is not None:
            self._usage.record(step)  # before the checkpoint: whoever goes on from it finds a line that leads there
        with span("checkpoint"):
            self.checkpoint = self._learner.save(step=step, meter=self.meter, loader=self._loader, evaluated=evaluated)
        self.has_checkpoint = True

    def _finish_checkpoint(self) -> None:
        if self._learner.is_main_rank:
            self._learner.checkpoints.evaluated()

    def _judge(self, step: int) -> bool:
        """Evaluates what is due after a step; returns whether the model is the best so far."""
        results = self._evaluate(step)
        for result in results:
            self._board.show_evaluation(result)
        return self._learner.checkpoints.best.consider(results)

    def _are_due(self, step: int) -> bool:
        return self._evaluations.are_due(step, is_last=step == self._learner.schedule.num_steps)

    def traffic(self) -> list[Traffic] | None:
        """Returns what each node asked of stores, since its processes began; None where all caches are local.

        Every rank calls it, once.
        """
        return None if self._all_traffic is None else self._all_traffic.take()

    def _evaluate(self, step: int) -> list[EvalResult]:
        """Returns the evaluations after a step, equal on all ranks."""
        if not self._are_due(step):
            return []
        with span(EVALUATION):
            self.meter.settle()  # weights that are not finite end the run here, before anything is written by them
            is_last = step == self._learner.schedule.num_steps
            return self._evaluations.after(step, model=self._learner.model, is_last=is_last)

    def _is_due(self, step: int, every: int) -> bool:
        """Returns whether something happens after `step`: every so many steps (0: never), and after the last step."""
        return step == self._learner.schedule.num_steps or (every > 0 and step % every == 0)

    def _write_line(self, step: int) -> None:
        rate = self._settings.learning_rate * self._learner.schedule.factor(step)
        remote = None if self._line_traffic is None else sum(self._line_traffic.take(), Traffic())
        line = self.meter.line(learning_rate=rate, padding=float(self._loader.report()["padding"]), remote=remote)
        if self._learner.is_main_rank:
            self._steps.add(line)
        self._board.show(line)


def _traffic(loader: BatchLoader, sum_over_ranks: SumOverRanks | None) -> NodeTraffic | None:
    if not isinstance(loader, Loader) or sum_over_ranks is None:
        return None
    is_up = torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_up else (0, 1)
    return NodeTraffic.of(loader.source, rank=rank, world=world, sum_over_ranks=sum_over_ranks)


def _usage_log(
    config: Config, loader: BatchLoader, *, step: int, sum_over_ranks: SumOverRanks | None, traffic: NodeTraffic | None
) -> UsageLog | None:
    """Returns the log of what is used after `step`; None where no log is wanted, or the loader has no plan."""
    settings = config.train
    if not settings.usage_every or not isinstance(loader, Loader) or sum_over_ranks is None:
        return None
    return UsageLog(
        run_folder(config) / "logs" / FILE_NAME,
        loader,
        step=step,
        sum_over_ranks=sum_over_ranks,
        with_ids=settings.usage_ids,
        traffic=traffic,
    )


def drawn_by(loader: BatchLoader) -> dict[str, Drawn]:
    """Returns what all ranks have drawn from the head of the first epoch up to where the loader stands.

    So a resumed run counts what came before, too, as if on as many ranks as now. Empty for a loader without a plan.
    """
    if not isinstance(loader, Loader):
        return {}
    end, plan = loader.state, loader.plan
    rate_hz = loader.source.constants.get("sample_rate_hz", getattr(plan, "sample_rate_hz", None))
    samples = loader.source.lengths.get("num_audio_samples")
    is_timed = rate_hz is not None and samples is not None and samples.any()
    return drawn_classes(
        plan,
        start=LoaderState(plan_key=end.plan_key, seed=end.seed, epoch=0, position=0),
        end=end,
        dp_world_size=loader.dp_world_size,
        durations_s=samples / rate_hz if is_timed else None,
    )
