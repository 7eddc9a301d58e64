"""Random numbers of samples, of a counter: they depend on seed, epoch, sample id and change alone. By them a variant of
each sample is drawn, the same on any rank and after any resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from forebay.plan.permutation import derive_key
from forebay.store.layout import Array, Constants, FieldSpec, variant_name
from forebay.store.source import Sample, SampleBatch, column

AUGMENT_VERSION = 1
"""Bumped when the same seed, epoch and sample id give other changes."""
_SPEEDS_PLACE = 1 << 16
"""The place of their draw among those of the changes of `[[augment]]`, of which there are fewer."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class EpochDraws:
    """The draws of one epoch."""

    seed: int
    epoch: int

    def of(self, ids: Sequence[str], place: int | str) -> Draws:
        """Returns the draws of some samples for one change. place: of the change among all of the config, or a name."""
        key = derive_key("forebay augment", AUGMENT_VERSION, self.seed, self.epoch, place).to_bytes(8, "little")
        # Ids are names of tar members too, which need not be UTF-8.
        texts = (text.encode("utf-8", "surrogateescape") for text in ids)
        found = b"".join(hashlib.blake2b(text, digest_size=8, key=key).digest() for text in texts)
        return Draws(np.frombuffer(found, np.uint64))


@dataclass(frozen=True, slots=True)
class Drawing:
    """The samples of a batch, and the draws of its epoch."""

    ids: Sequence[str]
    draws: EpochDraws


@dataclass(frozen=True, slots=True)
class Draws:
    """A stream of numbers for every sample. keys: uint64 [samples]."""

    keys: Array

    def uniform(self, count: int, *, first: int = 0) -> Array:
        """Returns numbers `first` to `first + count` of every stream, float64 [samples, count] in [0, 1).

        SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) of a counter.
        """
        with np.errstate(over="ignore"):
            places = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN
            bits = self.keys[:, None] + places
            bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
            bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
            bits ^= bits >> np.uint64(31)
        found: Array = (bits >> np.uint64(11)) * 2.0**-53
        return found


def generator_of(key: int) -> np.random.Generator:
    """Returns a generator for one of `Draws.keys`, Philox: it is of a counter too."""
    return np.random.Generator(np.random.Philox(key=key))


def between(uniform: Array, low: float, high: float) -> Any:
    """Returns numbers in [low, high] for numbers in [0, 1)."""
    return low + (high - low) * uniform


@dataclass(frozen=True, slots=True)
class Variants:
    """The variants of a group. names: theirs. fields: those that every variant has, by the names that models know.

    place: of their draw. Groups that are made of one kind of item share it: what is made of an image is mirrored
    together.
    """

    names: tuple[str, ...]
    fields: tuple[str, ...]
    place: int | str

    @classmethod
    def all_of(cls, constants: Constants, fields: Iterable[FieldSpec]) -> tuple[Self, ...]:
        """Returns the variants of each group of a source of these constants and fields that has some."""
        fields, found = [*fields], []
        for group, values in constants.groups.items():
            names, own = tuple(values.get("variants") or ()), [spec.name for spec in fields if spec.group == group]
            kind = values.get("takes", group)
            of_stored = (name for name in own if names and variant_name(name, names[0]) in own)
            # Patches have another name where they are compressed.
            if varied := tuple(values.get("varied") or of_stored):
                found.append(cls(names, varied, _SPEEDS_PLACE if kind == "audio" else f"variants of {kind}"))
        return tuple(found)

    def chosen(self, samples: Sequence[Sample], drawing: Drawing) -> SampleBatch:
        """Returns samples with one variant of each, the plain one among them, all as likely.

        Of several items that a sample lists it is the same one.
        """
        draws = drawing.draws.of(drawing.ids, self.place)
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
    found = Variants.all_of(constants, fields)
    varied = {variant_name(field, name) for each in found for field in each.fields for name in each.names}
    return [spec for spec in fields if spec.name not in varied]
