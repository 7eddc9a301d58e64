"""Changes of a padded batch on the device where it lies: masks of spectrograms, gain, noise and reverberation.

The host draws what is random and sends it along; the operations are torch's, the same on a CPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.errors import ConfigError
from forebay.store.layout import Array
from forebay.store.source import SampleSource
from forebay.train.augment.draws import Draws, between

Drawn = Mapping[str, torch.Tensor]
"""What the host has drawn of a batch, by name, [batch, ...]."""


class Change(ABC):
    """A change of the values of a batch, float32 [batch, room, ...], which keeps its shape."""

    @abstractmethod
    def draw(self, draws: Draws, lengths: Sequence[int]) -> dict[str, Array]:
        """Returns what is drawn on the host. lengths: of the arrays along the axis that grows."""

    @abstractmethod
    def apply(self, values: torch.Tensor, lengths: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Returns the changed values; `values` may be overwritten. lengths: int64 [batch]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masks(Change):
    """Masks along time and bins, filled with 0 (SpecAugment, arXiv 1904.08779), in the numbers of transformers.

    A clip of n frames has max(min_masks, floor(prob * n / length + u)) masks of `length` frames, u uniform in [0, 1),
    at most as many as fit beside each other; each begins anywhere inside the clip, so they may overlap. Bins alike.
    """

    probability: float
    time: tuple[float, int, int]
    """Share, frames of a mask, masks at least."""
    bins: tuple[float, int, int]
    num_bins: int

    def draw(self, draws: Draws, lengths: Sequence[int]) -> dict[str, Array]:
        """Returns where masks begin and end: `time`, `bins` int64 [batch, masks, 2]; one that is none ends at 0."""
        first = draws.uniform(3)
        is_changed = first[:, 0] < self.probability
        sizes = np.array(lengths)
        bins = np.where(is_changed, self.num_bins, 0)
        return {
            "time": _masks(self.time, np.where(is_changed, sizes, 0), first[:, 1], draws, first=_OF_TIME),
            "bins": _masks(self.bins, bins, first[:, 2], draws, first=_OF_BINS),
        }

    def apply(self, values: torch.Tensor, lengths: torch.Tensor, drawn: Drawn) -> torch.Tensor:  # noqa: ARG002
        """See `Change`."""
        for name, axis in (("time", 1), ("bins", 2)):
            bounds = drawn[name]
            if bounds.shape[1]:
                places = torch.arange(values.shape[axis], device=values.device)
                inside = ((places >= bounds[:, :, :1]) & (places < bounds[:, :, 1:])).any(1)
                values = values.masked_fill_(inside[:, :, None] if axis == 1 else inside[:, None], 0)
        return values


_OF_TIME, _OF_BINS = 1 << 8, 1 << 24
"""The first numbers of a stream that say where masks begin: how many a batch needs does not move the others."""


def _masks(policy: tuple[float, int, int], sizes: Array, rounding: Array, draws: Draws, *, first: int) -> Array:
    share, length, least = policy
    fits = np.where(sizes >= length, sizes // length, 0)
    counts = np.minimum(np.maximum((share * sizes / length + rounding).astype(np.int64), least), fits)
    most = int(counts.max(initial=0))
    room = np.maximum(sizes - length + 1, 1)[:, None]
    starts = np.minimum((draws.uniform(most, first=first) * room).astype(np.int64), room - 1)
    ends = np.where(np.arange(most) < counts[:, None], starts + length, 0)
    return np.stack((np.where(ends > 0, starts, 0), ends), axis=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain(Change):
    """Another loudness, uniform in decibels."""

    probability: float
    db: tuple[float, float]

    def draw(self, draws: Draws, lengths: Sequence[int]) -> dict[str, Array]:  # noqa: ARG002
        """Returns `factor`, float32 [batch]."""
        drawn = draws.uniform(2)
        factor = 10 ** (between(drawn[:, 1], *self.db) / 20)
        return {"factor": np.where(drawn[:, 0] < self.probability, factor, 1).astype(np.float32)}

    def apply(self, values: torch.Tensor, lengths: torch.Tensor, drawn: Drawn) -> torch.Tensor:  # noqa: ARG002
        """See `Change`."""
        return values.mul_(drawn["factor"].view(-1, *(1 for _ in values.shape[1:])))


class Clips:
    """The clips of a cache of waveforms, float32."""

    def __init__(self, source: SampleSource, *, setting: str, rate_hz: int) -> None:
        """setting: that names the cache. Raises ConfigError for another kind of cache or rate, and an empty one."""
        found = source.constants.get("features")
        rate = source.constants.get("sample_rate_hz")
        if found != "waveform" or rate != rate_hz:
            raise ConfigError(
                f"{setting}: {source.place} holds {found!r} at {rate} Hz, wanted waveforms at {rate_hz} Hz; build one "
                f'with audio.features = "waveform" and audio.sample_rate_hz = {rate_hz}: forebay preprocess CONFIG'
            )
        if not len(source):
            raise ConfigError(f"{setting}: {source.place} has no samples")
        self._source = source

    def clip(self, uniform: float) -> Array:
        """Returns one of them by a number in [0, 1)."""
        samples = self._source.read(int(uniform * len(self._source)))["waveform"]
        return samples * np.float32(2.0**-15) if samples.dtype == np.int16 else np.asarray(samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise(Change):
    """Noise of other clips beneath a recording, at a ratio of powers that is drawn and then exact.

    Powers are mean squares of the recording and of the stretch of noise. A noise that is shorter is repeated. Where one
    of both is silent, nothing is added.
    """

    probability: float
    clips: Clips
    snr_db: tuple[float, float]

    def draw(self, draws: Draws, lengths: Sequence[int]) -> dict[str, Array]:
        """Returns `noise` float32 [batch, longest] and `snr` float32 [batch], the wanted ratio; infinite: no noise."""
        drawn = draws.uniform(4)
        noise = np.zeros((len(lengths), max(lengths, default=0)), np.float32)
        snr = 10 ** (between(drawn[:, 3], *self.snr_db) / 10)
        snr[drawn[:, 0] >= self.probability] = np.inf
        for row, length, numbers, ratio in zip(noise, lengths, drawn, snr, strict=True):
            if math.isfinite(ratio):
                clip = self.clips.clip(numbers[1])
                room = len(clip) - length
                start = int(numbers[2] * (room + 1 if room >= 0 else len(clip)))
                row[:length] = np.take(clip, np.arange(start, start + length), mode="wrap") if len(clip) else 0
        return {"noise": noise, "snr": snr.astype(np.float32)}

    def apply(self, values: torch.Tensor, lengths: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """See `Change`."""
        noise = torch.nn.functional.pad(drawn["noise"], (0, values.shape[1] - drawn["noise"].shape[1]))
        powers = [_power(each, lengths) for each in (values, noise)]
        scale = torch.sqrt(powers[0] / (powers[1] * drawn["snr"]))
        scale = torch.where((powers[1] > 0) & torch.isfinite(scale), scale, 0).float()
        return values.addcmul_(noise, scale[:, None])


def _power(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns the mean square of each row, float64; behind their lengths rows are 0."""
    return values.square().sum(1, dtype=torch.float64) / lengths.clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reverb(Change):
    """A recording as a room would give it: convolved with an impulse response, as long as it was.

    The response begins at its loudest sample, the direct sound, so that nothing moves in time, and has energy 1.
    """

    probability: float
    clips: Clips

    def draw(self, draws: Draws, lengths: Sequence[int]) -> dict[str, Array]:
        """Returns `response` float32 [batch, taps]; of a recording that is not changed a single 1."""
        drawn = draws.uniform(2)
        found = [
            _response(self.clips.clip(numbers[1])) if numbers[0] < self.probability and length else _DIRECT
            for numbers, length in zip(drawn, lengths, strict=True)
        ]
        out = np.zeros((len(found), max(map(len, found))), np.float32)
        for row, response in zip(out, found, strict=True):
            row[: len(response)] = response
        return {"response": out}

    def apply(self, values: torch.Tensor, lengths: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """See `Change`. Rows whose response is a single 1 are as they were, bit for bit."""
        room, response = values.shape[1], drawn["response"]
        size = room + response.shape[1] - 1
        spectrum = torch.fft.rfft(values, size) * torch.fft.rfft(response, size)
        made = torch.fft.irfft(spectrum, size)[:, :room]
        made *= torch.arange(room, device=values.device) < lengths[:, None]
        is_same = (response[:, 0] == 1) & (response[:, 1:] == 0).all(1)
        return torch.where(is_same[:, None], values, made)


_DIRECT = np.ones(1, np.float32)


def _response(clip: Array) -> Array:
    energy = float(np.square(clip, dtype=np.float64).sum())
    if not energy:
        return _DIRECT
    start = int(np.abs(clip).argmax())
    kept = clip[start:].astype(np.float64)
    return np.asarray(kept / math.sqrt(np.square(kept).sum()), np.float32)


def model_policy(settings: Mapping[str, Any], name: str) -> tuple[float, int, int]:
    """Returns share, length and least number of masks along `time` or `feature`, of a model's config.json.

    What it lacks is as in transformers' Whisper.
    """
    share, length, least = {"time": (0.05, 10, 2), "feature": (0.0, 10, 0)}[name]
    return (
        float(settings.get(f"mask_{name}_prob", share)),
        int(settings.get(f"mask_{name}_length", length)),
        int(settings.get(f"mask_{name}_min_masks", least)),
    )
