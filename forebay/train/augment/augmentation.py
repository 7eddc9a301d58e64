"""The changes of a config in their order: of samples as they are stored, then of the batch where it lies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from forebay.config.train import OF_IMAGES, OF_WAVEFORMS, AugmentConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, ForebayError
from forebay.steps.audio.speeds import faster
from forebay.steps.form import BatchForm
from forebay.steps.step import Stored
from forebay.steps.table import forms_of
from forebay.store.cache import open_cache
from forebay.store.memo import note
from forebay.store.source import Sample, SampleSource
from forebay.train.augment.changes import (
    Change,
    Clips,
    Drawn,
    Gain,
    ImageChange,
    Masks,
    Noise,
    Reverb,
    image_change,
    model_policy,
)
from forebay.train.augment.draws import Draws, EpochDraws
from forebay.train.augment.own_function import OwnFunction
from forebay.train.augment.stored_draws import CaptionDraws, LatentDraws
from forebay.train.collate.device_features import DeviceFeatures

Values = dict[str, Any]
"""The stored fields of a sample: arrays; of images that it lists tuples of arrays."""
_HOST = ("speed", *OF_IMAGES, "function")
"""The kinds that change samples as they are stored; they come before the others."""


class SampleChange(Protocol):
    """A change of samples as they are stored, in the loader's threads."""

    def change(self, samples: Sequence[Values], draws: Draws, ids: Sequence[str]) -> list[Values]:
        """Returns the changed samples."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The changes of one source. Threads share it.

    of_samples, of_batches: with the place of each among all of the config, which is in its draws.
    """

    of_samples: tuple[tuple[int | str, SampleChange], ...]
    of_batches: tuple[tuple[int, Change], ...]

    @classmethod
    def of(cls, config: Config, source: SampleSource) -> Augmentation:
        """Returns the changes that a config wants of a source. Raises ConfigError for one that cannot be made of it."""
        stored = Stored.of(source)
        features = config.loader.device_features and DeviceFeatures.of(config.loader.device_features, stored)
        samples: list[tuple[int | str, SampleChange]] = []
        batches: list[tuple[int, Change]] = []
        for place, settings in enumerate(config.augment):
            what = _Wanted(config, settings, f"augment.{place}", stored, features or None)
            if settings.kind not in _HOST:
                if settings.kind in OF_WAVEFORMS and any(isinstance(change, Masks) for _, change in batches):
                    raise what.refused("changes waveforms, and spec_augment before it features; put spec_augment last")
                batches.append((place, what.of_batches()))
                continue
            if batches:
                raise ConfigError(
                    f"{config.path}: augment.{place}: {settings.kind} changes samples as they are stored, and "
                    f"{config.augment[place - 1].kind} before it changes their batch; put {settings.kind} first"
                )
            samples.append((place, what.of_samples()))
        samples += draws_of(config, stored)
        return cls(tuple(samples), tuple(batches))

    def changed(self, samples: Sequence[Sample], ids: Sequence[str], draws: EpochDraws) -> Sequence[Sample]:
        """Returns samples as they are to be collated."""
        if not self.of_samples:
            return samples
        found = [dict(sample) for sample in samples]
        for place, change in self.of_samples:
            found = change.change(found, draws.of(ids, place), ids)
        return found

    def draw(
        self, ids: Sequence[str], draws: EpochDraws, *, samples: Sequence[int], frames: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """Returns what the changes of a batch draw, by place and name.

        samples, frames: lengths of the clips, of waveforms and of features.
        """
        return {
            f"{place}.{name}": torch.from_numpy(values)
            for place, change in self.of_batches
            for name, values in change.draw(
                draws.of(ids, place), frames if isinstance(change, Masks) else samples
            ).items()
        }

    def of_waveforms(self) -> Augmentation:
        """Returns the changes of waveforms alone, and leaves the others: those of features that are made of them."""
        kept = tuple(each for each in self.of_batches if not isinstance(each[1], Masks))
        return Augmentation((), kept)

    def of_features(self) -> Augmentation:
        """Returns the changes of features alone."""
        return Augmentation((), tuple(each for each in self.of_batches if isinstance(each[1], Masks)))

    def apply(self, values: torch.Tensor, lengths: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        """Returns the values of a padded batch, float32 [batch, room, ...], changed; they may be overwritten."""
        for place, change in self.of_batches:
            own = {name.partition(".")[2]: part for name, part in drawn.items() if name.startswith(f"{place}.")}
            values = change.apply(values, lengths, own)
        return values


def draws_of(config: Config, stored: Stored) -> list[tuple[str, SampleChange]]:
    """Returns the draws of texts and latents that `[loader]` wants; ragged batches are what a cache holds."""
    if config.loader.form != "padded":
        return []
    is_drawn = config.loader.latent == "sample" and stored.constants.has_items
    return [*CaptionDraws.all_of(config.loader, stored), *(LatentDraws.all_of(forms_of(stored)) if is_drawn else ())]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One change that is wanted of one source."""

    config: Config
    settings: AugmentConfig
    name: str
    stored: Stored
    features: DeviceFeatures | None

    def refused(self, what: str) -> ConfigError:
        """Returns the error for a change that cannot be made."""
        return ConfigError(f"{self.config.path}: {self.name}: {self.settings.kind} {what}")

    def of_batches(self) -> Change:
        """Returns a change of batches."""
        settings, probability = self.settings, self.settings.probability
        if settings.kind == "spec_augment":
            return self._masks()
        self._require_waveform()
        if settings.kind == "gain":
            assert settings.db is not None
            return Gain(probability=probability, db=(settings.db[0], settings.db[1]))
        clips = self._clips()
        if settings.kind == "noise":
            assert settings.snr_db is not None
            return Noise(probability=probability, clips=clips, snr_db=(settings.snr_db[0], settings.snr_db[1]))
        return Reverb(probability=probability, clips=clips)

    def of_samples(self) -> SampleChange:
        """Returns a change of samples as they are stored."""
        settings = self.settings
        if settings.kind == "function":
            return OwnFunction.of(self.config, settings, self.name)
        if settings.kind == "speed":
            self._require_waveform()
            return Speed(settings.factors or (), settings.probability)
        return self._of_images()

    def _masks(self) -> Masks:
        form = self.features.form if self.features is not None else self._forms().get("audio")
        frames = None if form is None else form.main
        if frames is None or len(frames.shape) != 2 or len(frames.grows) != 1:
            raise self.refused(
                f"is of frames, and audio.features is {self.stored.get('features')!r}; take features of frames, for "
                'example audio.features = "log_mel", or noise and gain for waveforms'
            )
        settings, model = self.settings, _model_settings(self.config)
        bins = int(frames.shape[1 - frames.grows[0]] or 0) * (2 if frames.finish is not None else 1)
        policies = [model_policy(model, name) for name in ("time", "feature")]
        own = (
            (settings.time_prob, settings.time_length, settings.time_min_masks),
            (settings.feature_prob, settings.feature_length, settings.feature_min_masks),
        )
        time, bands = (
            tuple(number if given is None else given for given, number in zip(left, right, strict=True))
            for left, right in zip(own, policies, strict=True)
        )
        return Masks(probability=settings.probability, time=time, bins=bands, num_bins=bins)  # type: ignore[arg-type]

    def _forms(self) -> Mapping[str, BatchForm]:
        return forms_of(self.stored) if self.stored.constants.has_items else {}

    def _require_waveform(self) -> None:
        if (found := self.stored.get("features")) != "waveform":
            raise self.refused(
                f"changes waveforms, and {self.stored.name} holds audio.features = {found!r}; build a cache of "
                'audio.features = "waveform": forebay preprocess CONFIG'
            )

    def _clips(self) -> Clips:
        place = self.settings.cache
        assert place is not None
        setting = f"{self.config.path}: {self.name}.cache"
        rate = int(self.stored.constant("sample_rate_hz"))
        try:
            cache = open_cache(place, remote=self.config.remote)
        except ForebayError as err:
            err.args = (f"{setting}: {err}",)
            raise
        note(cache.folder)
        return Clips(cache, setting=setting, rate_hz=rate)

    def _of_images(self) -> ImageChange:
        found = image_change(self.settings, self.stored, self._forms().get("image"))
        if isinstance(found, str):
            raise self.refused(found)
        return found


def _model_settings(config: Config) -> Mapping[str, Any]:
    """Returns the config.json of the folder `train.model`; nothing where none is named or there."""
    model = config.train.model
    path = None if model is None else Path(model) / "config.json"
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as err:
        raise ConfigError(f"{path} is no JSON: {err}") from err
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Speed:
    """Recordings that are faster or slower, and higher or lower with it: resampled by a factor (soxr HQ)."""

    factors: tuple[float, ...]
    probability: float

    def change(self, samples: Sequence[Values], draws: Draws, ids: Sequence[str]) -> list[Values]:  # noqa: ARG002
        """See `SampleChange`."""
        drawn = draws.uniform(2)
        return [
            self._faster(sample, self.factors[int(numbers[1] * len(self.factors))])
            if numbers[0] < self.probability
            else sample
            for sample, numbers in zip(samples, drawn, strict=True)
        ]

    def _faster(self, sample: Values, factor: float) -> Values:
        return sample if factor == 1 else {**sample, "waveform": faster(sample["waveform"], factor)}
