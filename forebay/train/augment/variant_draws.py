"""One of the variants of each sample, drawn by (seed, epoch, id): the same on any rank and after any resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from forebay.store.layout import Constants, FieldSpec, variant_name
from forebay.store.source import Sample, SampleBatch, column
from forebay.train.augment.draws import Draws

VARIANTS_PLACE = 1 << 16
"""The place of this draw among those of the changes of `[[augment]]`, of which there are fewer."""


@dataclass(frozen=True, slots=True)
class Variants:
    """The variants of a source. names: theirs. fields: those that every variant has, by the names that models know."""

    names: tuple[str, ...]
    fields: tuple[str, ...]

    @classmethod
    def of(cls, constants: Constants, fields: Sequence[str]) -> Self | None:
        """Returns the variants of a source of these constants and fields; None where it has none."""
        names = tuple(constants.get("variants") or ())
        if not names:
            return None
        return cls(names, tuple(field for field in fields if variant_name(field, names[0]) in fields))

    def chosen(self, samples: Sequence[Sample], draws: Draws) -> SampleBatch:
        """Returns samples with one variant of each, the recording as it is among them, all as likely."""
        numbers = (draws.uniform(1)[:, 0] * (len(self.names) + 1)).astype(int).tolist()
        return self._taken(samples, numbers)

    def longest(self, sample: Sample) -> Sample:
        """Returns a sample with its longest variant."""
        lengths = [len(sample[self.fields[0]]), *(len(sample[variant_name(self.fields[0], n)]) for n in self.names)]
        found: Sample = self._taken([sample], [lengths.index(max(lengths))])[0]
        return found

    def _taken(self, samples: Sequence[Sample], numbers: Sequence[int]) -> SampleBatch:
        names = samples.columns if isinstance(samples, SampleBatch) else samples[0]
        varied = {variant_name(field, name) for field in self.fields for name in self.names}
        columns: dict[str, list[Any]] = {name: list(column(samples, name)) for name in names if name not in varied}
        for field in self.fields:
            others = [column(samples, variant_name(field, name)) for name in self.names]
            for place, number in enumerate(numbers):
                # A recording that is too long or too short at a speed has no values there.
                if number and len(value := others[number - 1][place]):
                    columns[field][place] = value
        return SampleBatch(columns, len(samples))


def without_variants(fields: Sequence[FieldSpec], constants: Constants) -> list[FieldSpec]:
    """Returns the fields that samples have as they are."""
    variants = Variants.of(constants, [spec.name for spec in fields])
    varied = () if variants is None else {variant_name(f, n) for f in variants.fields for n in variants.names}
    return [spec for spec in fields if spec.name not in varied]
