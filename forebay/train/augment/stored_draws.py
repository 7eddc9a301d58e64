"""Draws at load from what a cache stores: one of the texts of a row, and latents, anew each epoch.

The text is the same for every text encoder. Latents are drawn of the normal distribution that an autoencoder gave of an
image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config.tree import LoaderConfig
from forebay.errors import ConfigError
from forebay.steps.form import BatchForm
from forebay.steps.step import Stored
from forebay.store.layout import CHOICES, TEXT, Array
from forebay.train.augment.draws import Draws, generator_of


@dataclass(frozen=True, slots=True)
class CaptionDraws:
    """Which text of its row a sample has in a batch; without these draws it is the first one.

    fields: that hold outputs for texts. has_empty: the last text of each row is the empty one, which a share `dropout`
    of the samples has.
    """

    fields: tuple[str, ...]
    has_empty: bool = False
    is_drawn: bool = True
    dropout: float = 0.0

    @classmethod
    def of(cls, stored: Stored) -> CaptionDraws | None:
        """Returns the draws among the texts of a source; None where each row has one text."""
        found = {group: values[CHOICES] for group, values in stored.constants.groups.items() if CHOICES in values}
        fields = tuple(s.name for s in stored.fields.values() if s.group in found and s.role == "tensor")
        return cls(fields, all(said["has_empty"] for said in found.values())) if fields else None

    @classmethod
    def all_of(cls, loader: LoaderConfig, stored: Stored) -> list[tuple[str, CaptionDraws]]:
        """Returns the change that `[loader]` wants of a source, if any, and the place of its draws.

        Raises ConfigError where no empty text is there to be handed out, and where the batch has the tokens of the
        first text beside the outputs for another one.
        """
        found = cls.of(stored)
        if loader.caption_dropout and not (found and found.has_empty):
            raise ConfigError(
                f"loader.caption_dropout is {loader.caption_dropout}, and {stored.name} has no outputs for the empty "
                "text; set source.captions.empty = true and run: forebay preprocess CONFIG; or leave it out"
            )
        is_drawn = loader.caption == "sample"
        if found is None or not (is_drawn or loader.caption_dropout):
            return []
        if (spec := stored.fields.get("input_ids")) is not None and spec.group == TEXT:
            raise ConfigError(
                "source.captions: a batch would have tokens (input_ids) of a row's first text beside a model's outputs "
                'for another one; leave [text] out, or set loader.caption = "first" and no caption_dropout'
            )
        return [("caption", cls(found.fields, found.has_empty, is_drawn, loader.caption_dropout))]

    def change(self, samples: Sequence[dict[str, Any]], draws: Draws, ids: Sequence[str]) -> list[dict[str, Any]]:  # noqa: ARG002
        """See `SampleChange`."""
        drawn = draws.uniform(2).tolist()
        return [self._with(each, self._number(each, *two)) for each, two in zip(samples, drawn, strict=True)]

    def longest(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a sample with the text whose outputs are longest."""
        sizes = [sum(map(len, outputs)) for outputs in zip(*map(sample.__getitem__, self.fields), strict=True)]
        return self._with(sample, sizes.index(max(sizes)))

    def _number(self, sample: Mapping[str, Any], place: float, dropped: float) -> int:
        count = len(sample[self.fields[0]]) - self.has_empty
        return count if dropped < self.dropout else int(place * count) * self.is_drawn

    def _with(self, sample: Mapping[str, Any], number: int) -> dict[str, Any]:
        return {**sample, **{name: sample[name][number : number + 1] for name in self.fields}}


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
