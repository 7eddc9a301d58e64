"""Changes of images as they are stored, and of a padded batch on the device where it lies.

Of images, bit for bit what a changed image is: mirrored, and of another colour. Patches of packs are mirrored in their
places: Pillow's resize of a mirrored image is the mirrored resize. A colour is a function of the byte of a channel, so
it is a table over the bytes that a resized image has.

Of a batch masks of spectrograms, gain, noise and reverberation. The host draws what is random and sends it along; the
operations are torch's, the same on a CPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.config.train import AugmentConfig
from forebay.errors import ConfigError
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.image.qwen2_vl import CODES, GRIDS
from forebay.steps.step import Stored
from forebay.store.image.codec import mirrored
from forebay.store.image.image_settings import ImageSettings
from forebay.store.layout import Array
from forebay.store.source import SampleSource
from forebay.train.augment.draws import Draws, between

_NEUTRAL = (1.0, 1.0)
_MIRRORS = (1, 2, 3, 5)
"""The filters by which Pillow resizes a mirrored image to the mirrored one: not the nearest pixel, and no box."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageChange(ABC):
    """A change of all images of some samples, drawn by sample. field: that holds them, as stored."""

    field: str
    probability: float

    def change(self, samples: Sequence[dict[str, Any]], draws: Draws, ids: Sequence[str]) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `SampleChange`."""
        drawn = draws.uniform(3)
        return [
            self._changed(sample, numbers[1:]) if numbers[0] < self.probability else sample
            for sample, numbers in zip(samples, drawn, strict=True)
        ]

    def _changed(self, sample: dict[str, Any], numbers: Array) -> dict[str, Any]:
        values = sample[self.field]
        is_one = not isinstance(values, tuple)
        made = tuple(self.images((values,) if is_one else values, sample, numbers))
        return {**sample, self.field: made[0] if is_one else made}

    @abstractmethod
    def images(self, images: Sequence[Array], sample: Mapping[str, Any], numbers: Array) -> list[Array]:
        """Returns the changed images of a sample. numbers: drawn, float64 [2] in [0, 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip(ImageChange):
    """Images that are mirrored, left to right. axis: that of their width; of patches their settings instead."""

    axis: int = 0
    patches: ImageSettings | None = None

    def images(self, images: Sequence[Array], sample: Mapping[str, Any], numbers: Array) -> list[Array]:  # noqa: ARG002
        """See `ImageChange`."""
        if self.patches is None:
            return [np.ascontiguousarray(np.flip(image, self.axis)) for image in images]
        grids = np.reshape(sample[GRIDS], (-1, 3)).tolist()
        return [mirrored(image, tuple(grid), self.patches) for image, grid in zip(images, grids, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Colour(ImageChange):
    """Images whose bytes v become ((v * brightness) - 127.5) * contrast + 127.5, rounded to even, within 0 to 255."""

    brightness: tuple[float, ...]
    contrast: tuple[float, ...]

    def images(self, images: Sequence[Array], sample: Mapping[str, Any], numbers: Array) -> list[Array]:  # noqa: ARG002
        """See `ImageChange`."""
        table = self.table(numbers)
        return [table[image] for image in images]

    def table(self, numbers: Array) -> Array:
        """Returns the byte that each byte becomes, uint8 [256]. numbers: as `images` takes them."""
        (low, high), (least, most) = self.brightness, self.contrast
        values = (np.arange(256) * between(numbers[0], low, high) - 127.5) * between(numbers[1], least, most) + 127.5
        return np.asarray(np.clip(np.rint(values), 0, 255), np.uint8)


def image_change(settings: AugmentConfig, stored: Stored, form: BatchForm | None) -> ImageChange | str:
    """Returns the change of a source, or what is there instead of images that it could be exact for.

    form: of the images of the source.
    """
    fields, patches = () if form is None else form.stored, None
    if "video_table" in stored.constants:
        return "changes images alone, and there are videos beside them; leave vision.fps out"
    axis = next((axis for field in fields[:1] if (axis := _width_axis(field)) is not None), None)
    if any(field.name == GRIDS for field in fields) and any(field.on_disk == CODES for field in fields):
        name, axis, is_bytes = CODES, 1, True
        patches = ImageSettings.from_json(stored.constant("image"))
        if settings.kind == "flip" and patches.resample not in _MIRRORS:
            return f"is exact where the processor's resample is 1, 2, 3 or 5, and it is {patches.resample}"
    elif len(fields) == 1:
        name, is_bytes = fields[0].on_disk, _are_bytes(fields[0])
    else:
        name, is_bytes, axis = "", False, None
    given: dict[str, Any] = {"field": name, "probability": settings.probability}
    if settings.kind == "colour" and is_bytes:
        return Colour(**given, brightness=settings.brightness or _NEUTRAL, contrast=settings.contrast or _NEUTRAL)
    if settings.kind == "flip" and axis is not None:
        return Flip(**given, axis=axis, patches=patches)
    shapes = ", ".join(f"{field.name} {list(field.shape)}" for field in fields) or "none"
    if settings.kind == "colour":
        return f"is exact for one field of the bytes of an image by a table of 256 values; there is {shapes}"
    return f"is exact for patches of packs, or one field of [3, height, width] or [height, width, 3]; there is {shapes}"


def _width_axis(field: FieldForm) -> int | None:
    """Returns the axis of the width of images of one size; None where they have another form."""
    shape = field.shape
    if len(shape) != 3 or field.grows or (shape[0], shape[2]) == (3, 3) or 3 not in (shape[0], shape[2]):
        return None
    return 2 if shape[0] == 3 else 1


def _are_bytes(field: FieldForm) -> bool:
    """Whether codes are the bytes of the resized image: the table has a value for each, and they rise with it."""
    if field.table is None or field.stored_dtype != "uint8" or field.table.values.shape[1] != 256:
        return False
    return bool((np.diff(field.table.values, axis=1) > 0).all())


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
