"""`energy`: how loud each frame of `mel` is, a field beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from forebay.steps.audio.stft import Center, Framing, PadMode
from forebay.steps.step import AudioStep, Fields
from forebay.store.layout import Array, FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy(AudioStep):
    """Field `energy` float32 [frames]: the L2 norm of the magnitudes of a frame's spectrum.

    FastSpeech 2 (Ren et al. 2020, section 2.3): "the L2-norm of the amplitude of each STFT frame". The frames are those
    of `mel`.
    """

    name: ClassVar[str] = "energy"
    sample_rate_hz: ClassVar[int | None] = None

    n_fft: int
    hop_length: int
    win_length: int
    center: Center
    pad_mode: PadMode
    version: int = 1

    @property
    def framing(self) -> Framing:
        """Where the frames lie."""
        return Framing(
            n_fft=self.n_fft,
            hop_length=self.hop_length,
            win_length=self.win_length,
            center=self.center,
            pad_mode=self.pad_mode,
        )

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the field `energy` [frames]."""
        return (FieldSpec(name="energy", dtype="float32"),)

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the frames of `mel`."""
        return self.framing.num_frames(num_samples)

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the energy of every frame. waveforms: float32 [num_samples] that `mel` accepted."""
        return [{"energy": self._energies(waveform)} for waveform in waveforms]

    def _energies(self, clip: Array) -> Array:
        energies = np.empty(int(self.num_frames(np.array(clip.size))), np.float32)
        for frames, power in self.framing.power(clip):
            energies[frames] = np.sqrt(power.sum(axis=1, dtype=np.float64))[: frames.stop - frames.start]
        return energies
