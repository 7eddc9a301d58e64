"""The best evaluation of a run so far, which `train.save_best` wants kept and best.json names."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from forebay.config.train import TrainConfig
from forebay.train.evaluation.evaluate import HIGHER_IS_BETTER, EvalResult

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestRecord:
    """The best evaluation so far; what best.json holds."""

    checkpoint: str
    """Name of the checkpoint's folder in the run folder; empty until the checkpoint is written."""
    step: int
    name: str
    """The set, the first one of `[[train.eval]]`."""
    metric: str
    """`wer`, `cer`, `loss`, `accuracy` or `f1`."""
    value: float


class Best:
    """Tells which evaluation is the best so far: the best `train.save_best` on the first set of `[[train.eval]]`.

    Every rank calls `consider` with equal results, so that all ranks agree on whether a checkpoint is written.
    """

    def __init__(self, settings: TrainConfig) -> None:
        """Starts without a best one; `go_on` takes that of a checkpoint."""
        self._metric = settings.save_best
        self._name = settings.eval[0].name if settings.eval else None
        self.record: BestRecord | None = None

    def go_on(self, record: BestRecord | None, *, found: Collection[str]) -> None:
        """Makes `record` the best so far, unless it cannot be compared, or its checkpoint is not among `found`."""
        wanted = (self._name, self._metric)
        if record is not None and self._metric is not None and (record.name, record.metric) != wanted:
            _logger.warning(
                "the best checkpoint so far (%s) was chosen by %s on %s, and now %s on %s chooses: it is forgotten",
                *(record.checkpoint, record.metric, record.name, self._metric, self._name),
            )
            record = None
        if record is not None and record.checkpoint not in found:
            _logger.warning(
                "the best checkpoint so far (%s, %s %.4f on %s) is not in the run folder any more: it is forgotten",
                *(record.checkpoint, record.metric, record.value, record.name),
            )
            record = None
        self.record = record

    def consider(self, results: Sequence[EvalResult]) -> bool:
        """Returns whether a checkpoint is wanted now, since the set's result is better than every one before.

        results: of one step, equal on all ranks. A result that is a trap, None or not finite is never the best. After
        True the caller writes a checkpoint before the next step: it becomes the best one.
        """
        if self._metric is None:
            return False
        for result in (each for each in results if each.name == self._name and each.trap is None):
            value = getattr(result, self._metric)
            if value is None:
                _logger.warning(
                    'train.save_best = "%s", and %s has none; set train.save_best = "loss"', self._metric, result.name
                )
            elif math.isfinite(value) and (self.record is None or self._is_better(value, self.record.value)):
                self.record = BestRecord(
                    checkpoint="", step=result.step, name=result.name, metric=self._metric, value=float(value)
                )
                return True
        return False

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self._metric in HIGHER_IS_BETTER else value < other

    def in_checkpoint(self, name: str) -> BestRecord | None:
        """Returns the record that the checkpoint of this name is to hold, which is its own if `consider` wanted it."""
        if self.record is not None and not self.record.checkpoint:
            self.record = replace(self.record, checkpoint=name)
        return self.record
