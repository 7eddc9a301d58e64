"""`lengths`: nothing of a recording is stored but how long it is, beside what models make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from forebay.steps.form import BatchForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths(AudioStep):
    """No field: `num_audio_samples` alone, by which plans cut batches."""

    name: ClassVar[str] = "lengths"
    sample_rate_hz: ClassVar[int | None] = None
    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        return ()

    def num_frames(self, num_samples: Array) -> Array:
        return np.zeros_like(num_samples)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        return [{} for _ in waveforms]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:  # noqa: ARG003
        return BatchForm.exact(cls.name)
