"""The search for calibrated sizes: the longest shapes of each bucket, or a full pack, as batches of any size.

The largest batch that fits, found in a few trials: a pure function of a line and of what the trials say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forebay.config.plan import BucketConfig, PackConfig
from forebay.config.tree import Config
from forebay.errors import ConfigError, PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make import make_plan, samples_of
from forebay.steps.batch import fresh
from forebay.steps.step import Stored
from forebay.store.layout import Array
from forebay.store.source import Sample, SampleSource, SourceUnion
from forebay.train.augment.draws import Variants
from forebay.train.augment.stored_draws import CaptionDraws
from forebay.train.collate.collator import Collator
from forebay.train.collate.device_features import DeviceFeatures
from forebay.train.device import Batch
from forebay.train.select import loader_settings, pack_collator

PACK_UNIT = 128
"""Tokens that packs grow by: the size of a pack is counted in these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketCase:
    """A bucket's longest audio beside its longest labels, as often as the batch has samples.

    A line is laid through two sizes: fake_sizes, where a size costs nothing, else real_sizes.
    """

    name: str
    index: int
    """The sample with the longest audio; of text alone, the longest text."""
    seconds: float
    tokens: int
    """Token ids of the longest text of the bucket; 0 where there is no text."""
    fake_sizes: tuple[int, int] = (8, 32)
    real_sizes: tuple[int, int] = (2, 4)

    @property
    def longest(self) -> dict[str, float]:
        """Seconds of audio and tokens of text: with the model and its settings they decide about the memory."""
        return {"seconds": round(self.seconds, 4), "tokens": self.tokens}

    def least(self, min_bs: int) -> int:
        """Returns the smallest size that counts: `--min-bs`."""
        return min_bs

    def entry(self, size: int) -> dict[str, Any]:
        """Returns what the entry of a size says of it."""
        return {"batch_size": size}

    def amount(self, size: int) -> str:
        """Returns a size for a message."""
        return f"{size} samples" if size != 1 else "1 sample"

    def told(self, entry: Mapping[str, Any]) -> str:
        """Returns the size of an entry for its line."""
        return f"{entry['batch_size']} samples a batch, grad_acc {entry['grad_acc']}"

    def size_of(self, labels: torch.Tensor) -> int:
        """Returns the samples of a batch with such labels."""
        return len(labels)

    def batch(self, config: Config, source: SampleSource, size: int) -> Batch:
        """Returns the longest clip `size` times, its text as long as the longest of the bucket.

        It is as the loader hands it out on the host, with the real fields and dtypes; equal on every rank.
        """
        sample = self._sample(source)
        part = source.sources[source.part(self.index)] if isinstance(source, SourceUnion) else source
        settings = loader_settings(config)
        features = DeviceFeatures.wanted(config.loader.device_features, part)
        named = {name: getattr(settings, name) for name in ("dtype", "padding_side", "crop_s")}
        return Collator(part, **named, features=features).collate([sample] * size, allocate=fresh)

    def _sample(self, source: SampleSource) -> Sample:
        sample: Sample = source.read(self.index)
        for variants in Variants.all_of(source.constants, source.fields.values()):
            sample = variants.longest(sample)
        if (captions := CaptionDraws.of(Stored.of(source))) is not None:
            sample = captions.longest(sample)
        missing = self.tokens - len(sample["input_ids"]) if "input_ids" in sample else 0
        if missing <= 0:
            return sample
        # More targets at the end: they count in the loss, so the longest text has its logits too.
        ids: Array = sample["input_ids"]
        return {**sample, "input_ids": np.concatenate([ids, np.full(missing, ids[-1], ids.dtype)])}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCase:
    """A full pack of `size` times `PACK_UNIT` tokens, with as many patches as it may have; see `BucketCase`."""

    index: int
    """The sample with the most patches a token."""
    patches_per_token: float
    """Of a whole pack: `max_patches / seq_len` of the plan, else that of the sample."""
    merged: int
    """Patches of one image token."""
    units: int
    """Of the longest sample."""
    name: str = "pack"

    @property
    def real_sizes(self) -> tuple[int, int]:
        """Packs of the longest sample, and of twice as much."""
        return self.units, 2 * self.units

    fake_sizes = real_sizes

    @property
    def longest(self) -> dict[str, float]:
        """Patches a token, and units of the longest sample."""
        return {"patches_per_token": round(self.patches_per_token, 6), "units": self.units}

    def least(self, min_bs: int) -> int:  # noqa: ARG002  a pack holds any sample
        """Returns the smallest size that counts: the longest sample's."""
        return self.units

    def entry(self, size: int) -> dict[str, Any]:
        """Returns what the entry of a size says of it."""
        return {"seq_len": size * PACK_UNIT, "max_patches": self.max_patches(size)}

    def amount(self, size: int) -> str:
        """Returns a size for a message."""
        return self.told(self.entry(size))

    def told(self, entry: Mapping[str, Any]) -> str:
        """Returns the size of an entry for its line."""
        return f"seq_len {entry['seq_len']}, max_patches {entry['max_patches']}"

    def size_of(self, labels: torch.Tensor) -> int:
        """Returns the tokens of a pack with such labels."""
        return labels.numel()

    def max_patches(self, size: int) -> int:
        """Returns the patches of a pack of `size`: whole image tokens."""
        return int(self.patches_per_token * size * PACK_UNIT) // self.merged * self.merged

    def batch(self, config: Config, source: SampleSource, size: int) -> Batch:
        """Returns the sample with the most patches again and again, and text where no more of it fits."""
        sample, seq_len = source.read(self.index), size * PACK_UNIT
        tokens, patches = len(sample["input_ids"]), int(source.lengths["num_patches"][self.index])
        times = min(seq_len // tokens, self.max_patches(size) // max(patches, 1))
        rest = seq_len - times * tokens
        fill = [_text(sample, min(tokens, rest - start)) for start in range(0, rest, tokens)]
        return pack_collator(config.loader, source).collate([sample] * times + fill, allocate=fresh)


def _text(sample: Sample, length: int) -> Sample:
    """Returns a sample of so many tokens, all targets, without an item."""
    ids: Array = sample["input_ids"]
    made = {"input_ids": np.full(length, ids[-1], ids.dtype), "label_mask": np.ones(length, np.uint8)}
    return {name: made.get(name, value[:0]) for name, value in sample.items()}


Case = BucketCase | PackCase
"""Batches of one shape class at its longest, of any size."""


def bucket_cases(source: SampleSource, settings: BucketConfig) -> dict[str, BucketCase | None]:
    """Returns the case of every bucket of a plan by its name, the shortest first; None for a bucket without samples.

    settings: how many samples a batch has does not count. Raises PlanError as a plan of these lengths does.
    """
    plan = make_plan(samples_of(source), _of_one_sample(settings))
    if not isinstance(plan, BucketPlan):
        raise TypeError("settings of buckets give a plan of buckets")
    members = np.split(np.asarray(plan.members), plan.offsets[1:-1])
    return {name: _case(name, own, source) if len(own) else None for name, own in zip(plan.names, members, strict=True)}


def _of_one_sample(settings: BucketConfig) -> BucketConfig:
    """Returns settings of the same buckets: which file or budget sizes their batches is what is being found out."""
    return dataclasses.replace(
        settings, batch_size=1, batch_seconds=None, batch_tokens=None, calibration=None, locality="global", tail="short"
    )


def _case(name: str, members: Array, source: SampleSource) -> BucketCase:
    zeros = np.zeros(len(members), np.int64)
    audio, tokens = (
        np.asarray(source.lengths[field])[members] if field in source.lengths else zeros
        for field in ("num_audio_samples", "num_tokens")
    )
    place = int(np.argmax(audio if audio.any() else tokens))
    rate = int(source.constants.get("sample_rate_hz", 0)) or 1
    return BucketCase(
        name=name, index=int(members[place]), seconds=float(audio[place]) / rate, tokens=int(tokens.max())
    )


def pack_case(source: SampleSource, settings: PackConfig) -> PackCase:
    """Returns the case of a plan of packs. Raises PlanError where no sample has tokens, ConfigError without patches."""
    if "merge_size" not in source.constants:
        raise ConfigError(
            "calibrate tries packs of images as patches, and these packs have none; set plan.seq_len, and "
            "plan.max_frames or plan.max_patches, by hand"
        )
    tokens, patches = (np.asarray(source.lengths[name], np.float64) for name in ("num_tokens", "num_patches"))
    if not len(tokens):
        raise PlanError("no samples to plan: the cache or the filters in [source] leave none", code="FB501")
    shares = patches / np.maximum(tokens, 1)
    index = int(np.argmax(shares))
    wanted = np.inf if settings.max_patches is None else settings.max_patches / settings.seq_len
    return PackCase(
        index=index,
        patches_per_token=min(float(shares[index]), float(wanted)),
        merged=int(source.constants["merge_size"]) ** 2,
        units=int(-(-tokens.max() // PACK_UNIT)),
    )


MAX_TRIALS = 6
"""Trials of one search at most."""


def granule(size: int) -> int:
    """Returns the step between the sizes that are tried: 1 below 16, 8 up to 511, then about 3 % of the size."""
    return 1 if size < 16 else 1 << max(size.bit_length() - 6, 3)


def grid_down(size: int) -> int:
    """Returns the largest size of the grid that is not above `size`, 1 at least."""
    size = max(size, 1)
    return size - size % granule(size)


def grid_up(size: int) -> int:
    """Returns the next size of the grid above `size`."""
    return grid_down(size) + granule(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Bytes of a training step as a line in the size of its batch: `base + slope * size`."""

    base: float
    slope: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Line:
        """Returns the line through two points (size, bytes) of different sizes."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(base=first[1] - slope * first[0], slope=slope)

    def at(self, size: float) -> float:
        """Returns the bytes of a size."""
        return self.base + self.slope * size

    def largest(self, limit: float, *, most: int) -> int:
        """Returns the largest size of the grid, `most` at most, whose bytes are not above `limit`; 0 where none is."""
        if self.slope <= 0:
            return grid_down(most) if self.base <= limit else 0
        size = min((limit - self.base) / self.slope, float(most))
        return 0 if size < 1 else grid_down(int(size))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOutcome:
    """The result of a trial of one size."""

    fits: bool
    peak_bytes: int | None = None
    """What it took; None where it ran out of memory first."""


@dataclass(kw_only=True, slots=True)
class Search:
    """A search from `least` to `most`, and what it knows: the last fit, the first failure, points to guess by.

    line: the expectation before the first trial; None: nothing is expected, and `start` is the first size.
    """

    limit_bytes: int
    least: int
    most: int
    line: Line | None = None
    start: int | None = None
    trials: int = 0
    fit: int | None = None
    """The largest size that fits so far."""
    failure: int | None = None
    """The smallest size that does not fit so far."""
    _points: list[tuple[int, float]] = field(default_factory=list)
    _blind: int = 0
    """Failures without a figure in a row."""
    _side: int = 0
    """How many guesses in a row fell on one side, with its sign."""

    def run(self, trial: Callable[[int], TrialOutcome]) -> int | None:
        """Returns the largest size that fits, within one step of the grid where the trials were enough; None: none.

        At most `MAX_TRIALS` calls of `trial`. The last of them is spent on `least` where nothing has fit until then, so
        that None means that `least` does not fit.
        """
        guess = self.start
        if guess is None:
            guess = self.line.largest(self.limit_bytes, most=self.most) if self.line else self.least
        size: int | None = min(max(grid_down(guess), self.least), self.most)
        while size is not None:
            self._learn(size, trial(size))
            size = self._next()
        return self.fit

    def _learn(self, size: int, outcome: TrialOutcome) -> None:
        self.trials += 1
        if outcome.peak_bytes is not None:
            self._points.append((size, float(outcome.peak_bytes)))
        self._blind = 0 if outcome.peak_bytes is not None else self._blind + 1
        if outcome.fits:
            self.fit, self._side = size, max(self._side, 0) + 1
        else:
            self.failure, self._side = size, min(self._side, 0) - 1

    def _next(self) -> int | None:
        """Returns the next size to try; None where the search is over."""
        left = MAX_TRIALS - self.trials
        if left <= 0 or self.fit == self.most or self.failure == self.least:
            return None
        low = self.least if self.fit is None else grid_up(self.fit)
        high = self.most if self.failure is None else grid_down(self.failure - 1)
        if self.fit is None and (left == 1 or low >= high):
            return self.least
        return None if low > high else min(max(grid_down(int(self._guess(low, high))), low), high)

    def _guess(self, low: int, high: int) -> float:
        if self.fit is not None and self.failure is not None and abs(self._side) > 1:
            return (low + high) / 2  # the figures mislead: halve
        if not self._points or self._blind:
            # A size that ran out of memory without a figure is followed by this share of it, then by its square, ...
            share = 0.5 if self.line is None else 0.85
            failed = float(self.failure or high)
            return (low + high) / 2 if self.fit is not None else failed * share ** max(self._blind, 1)
        # Bytes a sample as measured: between the two largest sizes, or from the line's base to the one.
        *others, (size, peak) = sorted(self._points)
        before = others[-1] if others else (0, self.line.base if self.line else 0.0)
        slope = (peak - before[1]) / (size - before[0])
        size, peak = min(self._points, key=lambda point: abs(point[1] - self.limit_bytes))
        return size + (self.limit_bytes - peak) / slope if slope > 0 else high
