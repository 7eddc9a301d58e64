"""Variants of recordings: the same steps on the recording at other speeds, stored beside what it is.

A variant of a field is a field of the same row, `input_features~0.9`: a sample stays one row with one hash, counts once
in every plan, and is planned by its longest variant. The loader hands out one of them; see `forebay.train.augment`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forebay.steps.step import AudioStep
from forebay.store.layout import Array, FieldSpec, variant_name


def faster(waveform: Array, factor: float) -> Array:
    """Returns samples, int16 or float32 [n], as floor(n / factor + 0.5) of the same dtype (soxr HQ)."""
    import soxr  # not at import: reading alone is to be light

    scale = np.float32(32768) if waveform.dtype == np.int16 else np.float32(1)
    made = soxr.resample(waveform.astype(np.float32) / scale, factor, 1.0, quality="HQ")
    if waveform.dtype != np.int16:
        return np.asarray(made, np.float32)
    return np.asarray(np.clip(np.rint(made * scale), -32768, 32767), np.int16)


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of `audio.speeds` but 1; none: there are no variants.

    least, most: audio samples that the steps take. A recording that is not so long at a speed has no values there.
    """

    factors: tuple[float, ...] = ()
    least: int = 1
    most: int | None = None

    @classmethod
    def of(cls, speeds: Iterable[float], steps: Sequence[AudioStep], *, rate_hz: int) -> Speeds:
        """Returns the speeds at which these steps make values."""
        limits = [round(step.max_s * rate_hz) for step in steps if step.max_s is not None]
        factors = tuple(sorted(set(speeds) - {1.0}))
        return cls(factors, max(step.min_samples for step in steps), min(limits, default=None))

    @property
    def names(self) -> list[str]:
        """The names of the variants."""
        return [f"{factor:g}" for factor in self.factors]

    @property
    def constants(self) -> dict[str, Any]:
        """Facts of a cache: its variants, and how long the longest is, as a multiple of the recording."""
        if not self.factors:
            return {}
        return {"variants": self.names, "longest_variant": max(1.0, 1 / min(self.factors))}

    def fields(self, specs: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
        """Returns fields, and behind them those of the variants."""
        varied = (replace(spec, name=variant_name(spec.name, name)) for name in self.names for spec in specs)
        return (*specs, *varied)

    def longest(self, num_samples: Array) -> Array:
        """Returns the audio samples of the longest variant of recordings, the recording itself among them."""
        found = np.asarray(num_samples)
        for lengths in self._lengths(num_samples):
            found = np.where(self._has_values(lengths), np.maximum(found, lengths), found)
        return found

    def num_missing(self, num_samples: Array) -> int:
        """Returns how many recordings have no values at one of the speeds: there they are handed out as they are."""
        has_all = np.ones(len(num_samples), bool)
        for lengths in self._lengths(num_samples):
            has_all &= self._has_values(lengths)
        return int((~has_all).sum())

    def made(
        self, waveforms: Sequence[Array], make: Callable[[Sequence[Array]], Sequence[Mapping[str, Array]]]
    ) -> list[dict[str, Array]]:
        """Returns the values of every recording, by field, and those of its variants. make: the steps."""
        plain = make(waveforms)
        found = [dict(values) for values in plain]
        for factor, name in zip(self.factors, self.names, strict=True):
            clips = [faster(waveform, factor) for waveform in waveforms]
            has_values = [bool(self._has_values(len(clip))) for clip in clips]
            made = iter(make([clip for clip, has in zip(clips, has_values, strict=True) if has]))
            for values, own, has in zip(found, plain, has_values, strict=True):
                varied = next(made) if has else {field: np.atleast_1d(value)[:0] for field, value in own.items()}
                values |= {variant_name(field, name): value for field, value in varied.items()}
        return found

    def _lengths(self, num_samples: Array) -> Iterator[Array]:
        return (np.floor(np.asarray(num_samples) / factor + 0.5).astype(np.int64) for factor in self.factors)

    def _has_values(self, lengths: Any) -> Any:
        return (lengths >= self.least) & (self.most is None or lengths <= self.most)
