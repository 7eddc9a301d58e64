"""Where a run shows itself: the log, the trackers, and a bar with the time that is left on a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from forebay.config.tree import Config
from forebay.train.evaluation.result import EvalResult
from forebay.train.loop.meter import StepLog
from forebay.train.loop.trackers import Trackers

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _no_other_bar() -> Iterator[None]:
    """Hides transformers' bars: a second bar would have to move the cursor of the terminal."""
    from transformers.utils import logging as transformers_logging

    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


class Board:
    """What rank 0 shows of a run, step by step; the other ranks show nothing. A context: it ends bar and trackers."""

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
            self._stack.enter_context(_no_other_bar())

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
