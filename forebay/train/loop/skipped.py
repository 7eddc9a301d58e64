"""Steps that the scaler of fp16 skips, since a gradient is not finite: counted, and too many in a row end the run."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import ForebayError


@dataclass(kw_only=True, slots=True)
class SkippedSteps:
    """What a run has skipped; the same on every rank. The first steps of a run are often so: the scale begins high."""

    limit: int
    """Skipped steps in a row that end the run: `train.max_skipped_steps`."""
    total: int = 0
    """Since the run began, before a resume too."""
    in_a_row: int = 0
    """Up to the last step."""

    def add(self, step: int, *, is_skipped: bool) -> None:
        """Counts a step. Raises ForebayError where it is the last of `limit` skipped ones in a row."""
        self.total += is_skipped
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if self.in_a_row >= self.limit:
            raise ForebayError(
                f"the scaler of fp16 has skipped steps {step - self.in_a_row + 1} to {step}, which are "
                f"train.max_skipped_steps = {self.limit} in a row: their gradients are not finite at any scale; lower "
                "train.learning_rate or train.embed_lr_mult (new embeddings grow fastest), or set "
                'train.mixed_precision = "bf16", then run: forebay train --resume',
                code="FB702",
            )
