"""What happens after an optimizer step, in its order: counting, the log line, the usage log, the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from forebay.config.tree import Config
from forebay.plan.usage import FILE_NAME
from forebay.train.loader import Loader
from forebay.train.loop.checkpoint import TrainState, run_folder
from forebay.train.loop.learner import Learner, Outcome
from forebay.train.loop.meter import Meter, StepLog
from forebay.train.loop.micro_batches import BatchLoader, Group, host_sum
from forebay.train.loop.usage_log import UsageLog

_logger = logging.getLogger(__name__)


class AfterStep:
    """What a run does between two steps. Every rank calls it after every step; the ranks meet in it."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        *,
        loader: BatchLoader,
        state: TrainState | None,
        log: Callable[[StepLog], None] | None = None,
    ) -> None:
        """state: of the checkpoint that the run goes on from. log: called with each line of rank 0; None: a logger."""
        self._settings, self._folder = config.train, run_folder(config)
        self._learner, self._loader = learner, loader
        self._log = log
        self.meter: Meter = learner.meter(state)
        self.checkpoint: Path | None = None
        """The last one that this run has written; None before, and on ranks other than 0."""
        self._usage = _usage_log(config, loader, step=state.step if state else 0, num_ranks=learner.num_ranks)

    def __call__(self, step: int, outcome: Outcome, group: Group) -> None:
        """Does what is due after step 1, 2, ...; raises ForebayError where the run cannot go on.

        The order is part of what a resume can rely on: what a line of a log says is there before the checkpoint.
        """
        self.meter.add(loss=outcome.loss, grad_norm=outcome.grad_norm, group=group, is_skipped=outcome.is_skipped)
        if self._is_due(step, self._settings.log_every):
            self._write_line(step)
        is_saved = self._is_due(step, self._settings.checkpoint_every)
        if self._usage is not None and (is_saved or step % self._settings.usage_every == 0):
            self._usage.record(step)  # before the checkpoint: whoever goes on from it finds a line that leads there
        if is_saved:
            self.checkpoint = self._learner.save(self._folder, step=step, meter=self.meter, loader=self._loader)

    def _is_due(self, step: int, every: int) -> bool:
        """Returns whether something happens after `step`: every so many steps (0: never), and after the last step."""
        return step == self._learner.schedule.num_steps or (every > 0 and step % every == 0)

    def _write_line(self, step: int) -> None:
        rate = self._settings.learning_rate * self._learner.schedule.factor(step)
        line = self.meter.line(learning_rate=rate, padding=float(self._loader.report()["padding"]))
        if self._learner.is_main_rank:
            _logger.info("%s", line) if self._log is None else self._log(line)


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
