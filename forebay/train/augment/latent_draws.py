"""Latents that are drawn at load: of the normal distribution that an autoencoder gave of an image, anew each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.steps.form import BatchForm
from forebay.store.layout import Array
from forebay.train.augment.draws import Draws, generator_of

_LOWEST, _HIGHEST = np.float32(-30), np.float32(20)
"""Between these diffusers' DiagonalGaussianDistribution takes a log-variance."""


@dataclass(frozen=True, slots=True)
class LatentDraws:
    """A draw in place of the means: mean + exp(log-variance / 2) * noise, in float32. field: that holds both."""

    field: str

    @classmethod
    def all_of(cls, forms: Mapping[str, BatchForm]) -> Iterator[tuple[str, LatentDraws]]:
        """Yields a change for each field that holds moments, and the place of its draws: no other field moves them."""
        for form in forms.values():
            yield from ((f"latent {f.on_disk}", cls(f.on_disk)) for f in form.stored if f.holds_moments)

    def change(self, samples: Sequence[dict[str, Any]], draws: Draws, ids: Sequence[str]) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `SampleChange`; the images of a sample have their noise one behind the other."""
        return [self._changed(sample, int(key)) for sample, key in zip(samples, draws.keys, strict=True)]

    def _changed(self, sample: dict[str, Any], key: int) -> dict[str, Any]:
        values, generator = sample[self.field], generator_of(key)
        is_one = not isinstance(values, tuple)
        found = tuple(_drawn(value, generator) for value in ((values,) if is_one else values))
        return {**sample, self.field: found[0] if is_one else found}


def _drawn(moments: Array, generator: np.random.Generator) -> Array:
    """Returns moments whose means are drawn, float32; in memory they lie before the log-variances."""
    found = moments.astype(np.float32)
    mean, log_variance = np.split(found.reshape(-1), 2)
    np.clip(log_variance, _LOWEST, _HIGHEST, out=log_variance)
    mean += np.exp(log_variance / 2) * generator.standard_normal(len(mean), dtype=np.float32)
    return found
