"""`mel`: mel spectrograms at any rate, length and range, as models of speech synthesis and vocoders want them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.errors import DecodeError
from forebay.steps.audio.framing import Center, Framing, PadMode
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import AudioStep, Fields, Stored
from forebay.store.layout import Array, FieldSpec

PRESET_RATE_HZ = 22_050
"""The rate at which the presets are defined."""

_COMMON = {
    "n_fft": 1024, "hop_length": 256, "win_length": 1024, "n_mels": 80, "f_min": 0.0, "f_max": 8000.0, "power": 1,
    "pad_mode": "reflect", "mel_scale": "slaney", "norm": "slaney", "log": "ln", "floor": 1e-5,
}  # fmt: skip
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "hifigan": {**_COMMON, "center": "hop", "epsilon": 1e-9},
    "tacotron2": {**_COMMON, "center": True, "epsilon": 0.0},
}
"""What presets fill in. `hifigan`: `mel_spectrogram` of jik876/hifi-gan (meldataset.py) with its config_v1.json.
`tacotron2`: `TacotronSTFT` of NVIDIA/tacotron2 (layers.py, stft.py) with its hparams.py, which FastSpeech 2 and many
other models take as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mel(AudioStep):
    """Field `mel` [frames, n_mels] at `audio.sample_rate_hz`, any rate; a clip's ends are mirrored or zero.

    Batches have `mel` [B, T, n_mels], zeros behind each clip, and `mel_lengths` int64 [B]; with `pitch` and `energy`
    of `[audio]` these too, [B, T].
    """

    name: ClassVar[str] = "mel"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "forebay.steps.audio.spectrum")
    axes: ClassVar[dict[str, str | int]] = {"mel": "frames", "pitch": "frames", "energy": "frames"}
    given: ClassVar[frozenset[str]] = frozenset({"rate_hz"})
    sample_rate_hz: ClassVar[int | None] = None

    preset: Literal["", "hifigan", "tacotron2"] = ""
    """Fills in what is left out below, so that values are those of that project's own code: `hifigan` (V1 to V3, as
    in its config_v1.json) or `tacotron2` (FastSpeech 2 too). Wants `sample_rate_hz = 22050`. What the preset fills in
    is in the key, and its name is not."""
    n_fft: int = 1024
    """Samples of a frame's transform, an even number."""
    hop_length: int = 256
    """Samples from one frame to the next."""
    win_length: int | None = None
    """Samples of the periodic Hann window, in the middle of a frame. Left out: `n_fft`."""
    n_mels: int = 80
    """Filters, evenly spaced on the mel scale from `f_min` to `f_max`."""
    f_min: float = 0.0
    """Hz at which the first filter begins."""
    f_max: float | None = None
    """Hz at which the last filter ends. Left out: half the sample rate."""
    power: Literal[1, 2] = 1
    """`1`: filters weigh magnitudes, `2`: powers."""
    epsilon: float = 0.0
    """Added to the power of each bin, before the root where `power` is 1."""
    center: Center = True
    """`true`: frame i has its middle on sample i * hop_length, so a clip has 1 + n / hop_length frames. `"hop"`: on the
    middle of hop i, so a clip has n / hop_length frames, as HiFi-GAN wants it. `false`: frames lie inside the clip."""
    pad_mode: PadMode = "reflect"
    """What stands beyond the clip's ends where `center` asks for it: the clip mirrored (`reflect`), or zeros
    (`constant`, librosa's default)."""
    mel_scale: Literal["slaney", "htk"] = "slaney"
    """`slaney`: linear below 1000 Hz, librosa's default. `htk`: 2595 log10(1 + f / 700)."""
    norm: Literal["slaney", "none"] = "slaney"
    """`slaney`: filters of equal area. `none`: of height 1."""
    log: Literal["ln", "log10", "db", "none"] = "ln"
    """The logarithm. `db`: 10 log10 of a power, 20 log10 of a magnitude, without a limit of the range."""
    floor: float = 1e-5
    """What a smaller value becomes before the logarithm. Without one it is not used."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored values."""
    rate_hz: int = PRESET_RATE_HZ
    version: int = 1

    def __post_init__(self) -> None:
        if self.preset:
            raise ValueError(f'preset = "{self.preset}" stands for other settings; Mel.of(preset=...) fills them in')
        if self.win_length is None:
            object.__setattr__(self, "win_length", self.n_fft)
        if self.f_max is None and self.rate_hz is not None:
            object.__setattr__(self, "f_max", self.rate_hz / 2)
        if self.log == "none":
            object.__setattr__(self, "floor", 0.0)
        for problem in self._problems():
            raise ValueError(problem)

    @classmethod
    def of(cls, **settings: Any) -> Mel:
        """Returns the step with the settings that a preset among them leaves open filled in."""
        return cls(**cls.completed(settings))

    @classmethod
    def completed(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings with those of their preset, which they win over."""
        given = {name: value for name, value in settings.items() if name != "preset"}
        return {**PRESETS.get(settings.get("preset", ""), {}), **given}

    @classmethod
    def wanted_rate_hz(cls, settings: Mapping[str, Any]) -> int | None:
        """Returns the rate of a preset: its filters and lengths say nothing at another."""
        return PRESET_RATE_HZ if settings.get("preset") else None

    @property
    def framing(self) -> Framing:
        """Where the frames lie; `pitch` and `energy` have the same."""
        return Framing(
            n_fft=self.n_fft,
            hop_length=self.hop_length,
            win_length=self.win_length or self.n_fft,
            center=self.center,
            pad_mode=self.pad_mode,
        )

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the field `mel` [frames, n_mels]."""
        return (FieldSpec(name="mel", dtype=self.dtype, shape=(self.n_mels,)),)

    @property
    def constants(self) -> dict[str, Any]:
        """Bins of a frame, and what turns frames into samples and seconds."""
        return {"n_mels": self.n_mels, "hop_length": self.hop_length}

    def num_frames(self, num_samples: Array) -> Array:
        """Returns the frames of clips; 0 for one that is shorter than its padding."""
        return self.framing.num_frames(num_samples)

    def check(self, clip: Array) -> None:
        """Returns for a clip that `compute` accepts; `too_short` where it cannot be mirrored or has no frame."""
        AudioStep.check(self, clip)
        if clip.size < self.framing.least_samples:
            raise DecodeError(
                "too_short",
                f"the audio has {clip.size} samples, mel needs {self.framing.least_samples} with n_fft = {self.n_fft} "
                f"and center = {json.dumps(self.center)}: raise min_duration_s",
            )

    def make(self, waveforms: Sequence[Array]) -> list[Fields]:
        """Returns the mel frames of each clip, made by itself: transform and logarithm in float32 by torch.

        waveforms: float32 [num_samples] at `rate_hz`, full scale 1.
        """
        from forebay.steps.audio.spectrum import stored

        return [{"mel": stored(self._mels(waveform), self.dtype)} for waveform in waveforms]

    @classmethod
    def batch(cls, stored: Stored) -> BatchForm:
        """Returns `mel` [B, T, n_mels] and `mel_lengths` int64 [B]; `pitch` and `energy` [B, T] where they are stored.

        Behind a clip's frames stand zeros, as in the loaders of Tacotron 2, FastSpeech 2 and VITS; a loss leaves them
        out by `mel_lengths`.
        """
        names = [name for name in ("mel", "pitch", "energy") if name in stored.fields]
        frames = [FieldForm.frames(stored.fields[name]) for name in names]
        return BatchForm.exact(cls.name, *frames, frames[0].lengths())

    def _mels(self, clip: Array) -> Array:
        import torch

        from forebay.steps.audio.spectrum import mel_filters

        filters = mel_filters(
            rate_hz=self.rate_hz,
            n_fft=self.n_fft,
            n_mels=self.n_mels,
            f_min=self.f_min,
            f_max=self.f_max or self.rate_hz / 2,
            mel_scale=self.mel_scale,
            norm=self.norm,
        )
        mels = np.empty((int(self.num_frames(np.array(clip.size))), self.n_mels), np.float32)
        for frames, spectrum in self.framing.power(clip):
            if self.epsilon:
                spectrum += np.float32(self.epsilon)
            if self.power == 1:
                np.sqrt(spectrum, out=spectrum)
            rows = np.empty((len(spectrum), self.n_mels), np.float32)
            filters.multiply(spectrum, rows)
            if self.log != "none":
                np.maximum(rows, np.float32(self.floor), out=rows)
                log = torch.from_numpy(rows)
                _ = log.log_() if self.log == "ln" else log.log10_()
            if self.log == "db":
                rows *= np.float32(20 // self.power)
            mels[frames] = rows[: frames.stop - frames.start]
        return mels

    def _problems(self) -> list[str]:
        """Returns what is wrong with the settings. `rate_hz` is None where only they are looked at."""
        win_length, found = self.win_length or self.n_fft, []
        if self.n_fft < 4 or self.n_fft % 2:
            found.append(f"n_fft is {self.n_fft}, wanted an even number, 4 or more")
        if not 1 <= self.hop_length <= self.n_fft:
            found.append(f"hop_length is {self.hop_length}, wanted 1 to n_fft ({self.n_fft})")
        if not 1 <= win_length <= self.n_fft:
            found.append(f"win_length is {win_length}, wanted 1 to n_fft ({self.n_fft})")
        if not 1 <= self.n_mels <= self.n_fft:
            found.append(f"n_mels is {self.n_mels}, wanted 1 to n_fft ({self.n_fft})")
        if self.epsilon < 0 or self.floor < 0 or (self.log != "none" and not self.floor):
            found.append(
                f"floor is {self.floor} and epsilon {self.epsilon}, wanted no negative number, and a floor above 0 "
                "before a logarithm"
            )
        if self.f_min < 0 or (self.f_max is not None and self.f_max <= self.f_min):
            found.append(f"f_min is {self.f_min} and f_max {self.f_max}, wanted 0 <= f_min < f_max")
        if self.rate_hz is not None and self.f_max is not None and self.f_max > self.rate_hz / 2:
            found.append(
                f"f_max is {self.f_max}, and sound of {self.rate_hz} Hz ends at {self.rate_hz / 2}; lower f_max, or "
                "raise sample_rate_hz"
            )
        return found
