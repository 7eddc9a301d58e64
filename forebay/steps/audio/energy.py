"""`energy`: how loud each frame of `mel` is, a field beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from forebay.steps.audio.stft import AtFrames
from forebay.steps.step import Fields
from forebay.store.layout import Array, FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy(AtFrames):
    """Field `energy` float32 [frames]: the L2 norm of the magnitudes of a frame's spectrum.

    FastSpeech 2 (Ren et al. 2020, section 2.3): "the L2-norm of the amplitude of each STFT frame". The frames are those
    of `mel`.
    """

    name: ClassVar[str] = "energy"

    version: int = 1

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the field `energy` [frames]."""
        return (FieldSpec(name="energy", dtype="float32"),)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the energy of every frame. waveforms: float32 [num_samples] that `mel` accepted."""
        return [{"energy": self._energies(waveform)} for waveform in waveforms]

    def _energies(self, clip: Array) -> Array:
        energies = np.empty(int(self.num_frames(np.array(clip.size))), np.float32)
        for frames, power in self.framing.power(clip):
            energies[frames] = np.sqrt(power.sum(axis=1, dtype=np.float64))[: frames.stop - frames.start]
        return energies
