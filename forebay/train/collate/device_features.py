"""Features of waveforms where the batch lies: Whisper's and Qwen3-ASR's log-mels, and Kaldi's filter banks.

One cache of waveforms then serves every feature, with augmentation before it. The definitions are those of
`forebay.steps.audio`; here all clips of a batch are transformed together by operations of torch, so that the last bits
may differ: log-mels by less than 1e-5 (on a GPU 6e-5 where a bin is 60 dB below the loudest), filter banks by less than
1e-3 of a bin's power.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from forebay.config.tree import Config, DeviceFeaturesConfig
from forebay.errors import ConfigError
from forebay.steps.audio.framing import CENTRE_SAMPLES, FRAME_SAMPLES, HOP_SAMPLES
from forebay.steps.audio.log_mel import MAX_SAMPLES, MIN_SAMPLES, LogMel, Qwen3Asr
from forebay.steps.audio.spectrum import kaldi_filters, slaney_filters
from forebay.steps.audio.w2v_bert import FLOOR, W2vBert, povey, valid_frames
from forebay.steps.audio.w2v_bert import MIN_SAMPLES as MIN_W2V_SAMPLES
from forebay.steps.form import BatchForm
from forebay.steps.step import AudioStep, Stored
from forebay.store.layout import Constants, FieldSpec
from forebay.store.source import SampleSource

_RATE_HZ = 16_000
_FFT_SAMPLES = 512
_PREEMPHASIS = 0.97


@dataclass(frozen=True, slots=True)
class FeatureLines:
    """Features of a batch, one clip behind the other: float32 [frames of all, bins]; pads: float32 [batch], or none."""

    lines: torch.Tensor
    pads: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceFeatures:
    """A feature that is made of waveforms below the cut. form: of its batches, as of a cache of that feature."""

    step: AudioStep
    form: BatchForm

    @classmethod
    def of(cls, settings: DeviceFeaturesConfig, stored: Stored) -> DeviceFeatures:
        """Returns the feature of a source. Raises ConfigError for one that holds no waveforms at 16 kHz."""
        found, rate = stored.get("features"), stored.get("sample_rate_hz")
        if found != "waveform" or rate != _RATE_HZ:
            raise ConfigError(
                f"loader.device_features makes {settings.features} of waveforms at {_RATE_HZ} Hz, and {stored.name} "
                f"holds {found!r} at {rate} Hz; build a cache of audio.features = "
                '"waveform": forebay preprocess CONFIG'
            )
        step = _STEPS[settings.features](settings)
        return cls(step, step.batch(stored_as(step, stored)))

    @classmethod
    def wanted(cls, settings: DeviceFeaturesConfig | None, source: SampleSource) -> DeviceFeatures | None:
        """Returns the feature of a source; None where none is asked for, and of texts alone. Raises as `of`."""
        return None if settings is None or not source.constants.has_items else cls.of(settings, Stored.of(source))

    def num_frames(self, lengths: Sequence[int]) -> list[int]:
        """Returns the frames that batches have of clips of so many samples. Raises ValueError for clips without any."""
        counts = _FRAMES[type(self.step)](np.array(lengths, np.int64)).tolist()
        if min(counts) < 1:
            raise ValueError(f"{self.step.name} of a clip of {min(lengths)} samples has no frame")
        return list(map(int, counts))

    def make(
        self, waves: torch.Tensor, lengths: torch.Tensor, frames: torch.Tensor, counts: Sequence[int]
    ) -> FeatureLines:
        """Returns the features of padded waveforms, float32 [batch, samples] with zeros behind each clip.

        lengths, frames: int64 [batch], samples and frames of each; counts: the latter, as the host knows them.
        """
        values, pads = _MAKE[type(self.step)](self.step, waves, lengths, frames, max(counts))
        inside = _flat_places(frames, values.shape[1], sum(counts))
        return FeatureLines(values.reshape(-1, values.shape[2]).index_select(0, inside), pads)


def config_seen(config: Config) -> Config:
    """Returns the config that says what a model is given: with `loader.device_features`, that of a cache of these."""
    made = config.loader.device_features
    if made is None or config.audio is None or config.audio.features != "waveform":
        return config
    settings = {} if made.n_mels is None else {"n_mels": made.n_mels}
    return replace(config, audio=replace(config.audio, features=made.features, settings=settings))


def constants_seen(config: Config, constants: Constants) -> Constants:
    """Returns the constants by which a model is checked, in the same way."""
    made = config.loader.device_features
    if made is None or constants.get("features") != "waveform":
        return constants
    step = _STEPS[made.features](made)
    audio = {**constants.of("audio"), "features": step.name, **step.constants}
    return Constants({**constants.groups, "audio": audio})


def stored_as(step: AudioStep, stored: Stored) -> Stored:
    """Returns what would be stored if the cache held the features of a step in float32."""
    fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in step.fields()}
    audio = {**stored.constants.of("audio"), "features": step.name, **step.constants}
    groups = {**stored.constants.groups, "audio": audio}
    return replace(stored, constants=Constants(groups), fields={**stored.fields, **fields})


def _flat_places(counts: torch.Tensor, room: int, total: int) -> torch.Tensor:
    from forebay.steps.form_values import places_of

    return places_of(torch.arange(len(counts), device=counts.device) * room, counts, total)


def _mirrored(waves: torch.Tensor, ends: torch.Tensor | int, num_frames: int) -> torch.Tensor:
    """Returns what `torch.stft(center=True)` sees of signals that end at `ends`, mirrored there and at 0."""
    size = (num_frames - 1) * HOP_SAMPLES + FRAME_SAMPLES
    places = torch.arange(-CENTRE_SAMPLES, size - CENTRE_SAMPLES, device=waves.device).abs()
    last = (ends - 1)[:, None] if isinstance(ends, torch.Tensor) else ends - 1
    index = (last - (places - last).abs()).expand(len(waves), -1)
    wide = torch.nn.functional.pad(waves, (0, max(0, size - waves.shape[1])))
    # Behind the end of what is there, the signal is zero: one that ends there needs no more of it.
    return wide.gather(1, index.clamp(0, wide.shape[1] - 1))


def _log10_mels(signal: torch.Tensor, n_mels: int) -> torch.Tensor:
    """Returns log10 mel power [batch, frames, n_mels], at least -10."""
    window = torch.hann_window(FRAME_SAMPLES, dtype=torch.float32, device=signal.device)
    spectrum = torch.fft.rfft(signal.unfold(1, FRAME_SAMPLES, HOP_SAMPLES) * window)
    power = torch.view_as_real(spectrum).square().sum(-1)
    return _product(power, _slaney(n_mels, signal.device)).clamp_(min=1e-10).log10_()


def _product(power: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Returns power @ filters. In float64, which neither autocast nor a user's choice of TF32 makes any shorter."""
    return (power.double() @ filters.double()).float()


# Once a device: a copy from the host waits for the device.
@cache
def _slaney(n_mels: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(slaney_filters(n_mels).matrix.copy()).to(device)


@cache
def _kaldi(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns filters and window."""
    found = (torch.from_numpy(array.copy()).to(device) for array in (kaldi_filters().matrix, povey()))
    return next(found), next(found)


def _normalised(mels: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (x + 4) / 4 of log10 mels cut at 8 below the maximum of each clip, and the value of silence."""
    inside = torch.arange(mels.shape[1], device=mels.device) < frames[:, None]
    loudest = mels.amax(2).masked_fill(~inside, -10.0).amax(1)
    cut = (loudest - 8.0).clamp(min=-10.0)
    return (torch.maximum(mels, cut[:, None, None]) + 4.0) * 0.25, (cut + 4.0) * 0.25


def _whisper(
    step: Any, waves: torch.Tensor, lengths: torch.Tensor, frames: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    del lengths  # all signals are of 30 s
    signal = _mirrored(waves[:, :MAX_SAMPLES], MAX_SAMPLES, most)
    return _normalised(_log10_mels(signal, step.n_mels), frames)


def _qwen3_asr(
    step: Any, waves: torch.Tensor, lengths: torch.Tensor, frames: torch.Tensor, most: int
) -> tuple[torch.Tensor, None]:
    del step
    signal = _mirrored(waves, lengths.clamp(min=MIN_SAMPLES), most)
    return _normalised(_log10_mels(signal, 128), frames)[0], None


def _w2v_bert(
    step: Any, waves: torch.Tensor, lengths: torch.Tensor, frames: torch.Tensor, most: int
) -> tuple[torch.Tensor, None]:
    del step, lengths, frames
    size = (most - 1) * HOP_SAMPLES + FRAME_SAMPLES
    signal = torch.nn.functional.pad(waves, (0, max(0, size - waves.shape[1])))[:, :size] * 32768.0
    rows = signal.double().unfold(1, FRAME_SAMPLES, HOP_SAMPLES)
    rows = rows - rows.mean(2, keepdim=True)
    before = torch.cat((rows[:, :, :1], rows[:, :, :-1]), 2)  # the first sample of a frame stands before itself
    filters, window = _kaldi(waves.device)
    power = torch.view_as_real(torch.fft.rfft((rows - _PREEMPHASIS * before) * window, _FFT_SAMPLES)).square().sum(-1)
    return _product(power, filters).clamp_(min=FLOOR).log_(), None


def _w2v_frames(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(lengths >= MIN_W2V_SAMPLES, np.vectorize(valid_frames, otypes=[np.int64])(lengths), 0)


_STEPS: Mapping[str, Callable[[DeviceFeaturesConfig], AudioStep]] = {
    "log_mel": lambda settings: LogMel(n_mels=settings.n_mels or 80, dtype="float32"),
    "qwen3_asr": lambda settings: Qwen3Asr(dtype="float32"),  # noqa: ARG005
    "w2v_bert": lambda settings: W2vBert(dtype="float32"),  # noqa: ARG005
}
_FRAMES: Mapping[type, Callable[[Any], Any]] = {
    LogMel: LogMel().num_frames,
    Qwen3Asr: Qwen3Asr().num_frames,
    W2vBert: _w2v_frames,
}
_MAKE: Mapping[type, Callable[..., tuple[torch.Tensor, torch.Tensor | None]]] = {
    LogMel: _whisper,
    Qwen3Asr: _qwen3_asr,
    W2vBert: _w2v_bert,
}
