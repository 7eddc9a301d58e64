"""`none`: nothing is read or stored of sound; a sample is its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from forebay.steps.step import AudioBatch, AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec
from forebay.store.source import Sample

if TYPE_CHECKING:
    import torch

    from forebay.steps.batch import Allocate


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAudio(AudioStep):
    """Nothing is read or stored of the sound: a sample is its text. No media field."""

    name: ClassVar[str] = "none"
    has_audio: ClassVar[bool] = False

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns no field."""
        return ()

    def frames(self, num_samples: Array) -> Array:
        """Returns no frames."""
        return np.zeros_like(num_samples)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns no values."""
        return [{} for _ in waveforms]

    @classmethod
    def batch(cls, stored: Stored) -> AudioBatch:  # noqa: ARG003
        """Returns the form without a feature field."""
        return NoAudioBatch()


class NoAudioBatch(AudioBatch):
    """No feature field; frames are text tokens."""

    __slots__ = ()

    def values(self, samples: Sequence[Sample]) -> list[Array]:
        """Returns the tokens of each sample."""
        return [sample["input_ids"] for sample in samples]

    def room(self, longest: int) -> int:
        """Returns the tokens of the longest sample."""
        return longest

    def collate(
        self,
        samples: Sequence[Sample],  # noqa: ARG002
        *,
        dtype: torch.dtype,  # noqa: ARG002
        allocate: Allocate,  # noqa: ARG002
    ) -> dict[str, torch.Tensor]:
        """Returns no field."""
        return {}
