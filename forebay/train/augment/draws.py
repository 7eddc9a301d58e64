"""Random numbers of samples: of a counter, so that they depend on seed, epoch, sample id and change alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.plan.permutation import derive_key
from forebay.store.layout import Array

AUGMENT_VERSION = 1
"""Bumped when the same seed, epoch and sample id give other changes."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class EpochDraws:
    """The draws of one epoch."""

    seed: int
    epoch: int

    def of(self, ids: Sequence[str], place: int) -> Draws:
        """Returns the draws of some samples for one change. place: of the change among all of the config."""
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
