"""`none`: nothing is read or stored of sound; a sample is its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from forebay.steps.form import BatchForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAudio(AudioStep):
    """Nothing is read or stored of the sound: a sample is its text. No media field."""

    name: ClassVar[str] = "none"
    has_audio: ClassVar[bool] = False

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns no field."""
        return ()

    def num_frames(self, num_samples: Array) -> Array:
        """Returns no frames."""
        return np.zeros_like(num_samples)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns no values."""
        return [{} for _ in waveforms]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:  # noqa: ARG003
        """Returns the form without a field."""
        return BatchForm.exact(cls.name)
