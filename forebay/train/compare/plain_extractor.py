"""The collator of the arm `hf` over clips of `features = "extractor"`: that extractor, called on a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forebay.steps.audio.extractor.step import Extractor
from forebay.steps.batch import fresh
from forebay.steps.step import Batch, TextBatch


class ExtractorCollator:
    """Clips to a batch as the extractor's users make it: all that it gives of them, by its own names."""

    def __init__(self, step: Extractor, text: TextBatch) -> None:
        """Takes the config's step, and the form of its token ids. Raises ConfigError where the probe finds a fault."""
        self._step, self._text, self._main = step, text, step.batch_form().main

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Returns what the model takes."""
        made = self._step.own_batch([sample["waveform"] for sample in samples])
        features = {name: torch.from_numpy(array) for name, array in made.items()}
        return features | self._text(samples, padding_side="right", allocate=fresh)

    def room(self, batch: Mapping[str, Any]) -> int:
        """Returns the frames that a batch has room for."""
        shape = batch[self._main.name].shape
        axis = self._main.grows[0] if self._main.grows else 0
        return int(shape[0] * (shape[axis + 1] if len(shape) > 1 else 1))
