"""`none`: nothing is read or stored of sound; a sample is its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from forebay.config.data import AudioConfig
from forebay.config.tree import Config
from forebay.steps.form import BatchForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAudio(AudioStep):
    """Nothing is read or stored of the sound: a sample is its text. No media field."""

    name: ClassVar[str] = "none"
    has_audio: ClassVar[bool] = False
    plan: ClassVar[str] = "k = 8 and batch_tokens = 8192"

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
    def no_prompt(cls, prompt: str | None, prompts: Mapping[str, Any]) -> str:
        """See `ItemStep`."""
        given = "no [text] section" if prompt is None else f'text.prompt is "{prompt}"'
        return (
            f'{given} and audio.features is "{cls.name}"; text alone is tokenised: give text.tokenizer and prompt = '
            + " or ".join(f'"{name}"' for name in prompts)
        )

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns which settings are of sound."""
        source, found = config.source, []
        for setting in ("sample_rate_hz", "keep_waveform", "energy", "pitch"):
            if (value := getattr(config.audio, setting)) != getattr(AudioConfig(), setting):
                found.append(f'audio: {setting} is {value!r} and features = "{cls.name}" has no audio; leave it out')
        if source.duration_tolerance is not None:
            found.append(f'source.duration_tolerance is for audio, and audio.features is "{cls.name}"; leave it out')
        if source.min_duration_s or source.max_duration_s is not None:
            found.append(
                f'source.min_duration_s and max_duration_s are for audio, and audio.features is "{cls.name}"; leave '
                "them out (text.max_label_tokens limits texts)"
            )
        return found

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:  # noqa: ARG003
        """Returns the form without a field."""
        return BatchForm.exact(cls.name)
