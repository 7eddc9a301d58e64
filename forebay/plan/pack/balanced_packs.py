"""Packs of like cost side by side: what the ranks of a step do takes them the same time, and each learns as much.

The cost of a pack is a function of lengths alone, so steps are planned and ranks exchange nothing. The tokens that a
sample learns are read without its items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.config.plan import PackCosts
from forebay.store.cache import Cache
from forebay.store.cut_samples import CutSamples
from forebay.store.layout import TEXT, Array, Ints
from forebay.store.selection import origin
from forebay.store.source import SampleSource, length_of

_STRATUM = 8
"""Groups of packs whose costs are neighbours and which are then dealt by learnt tokens: fewer are more alike in cost,
more in tokens."""
RANKS = 8
"""Ranks whose spread is told."""


@dataclass(frozen=True, slots=True)
class StepSpread:
    """How far the packs of a step lie apart: the mean coefficient of variation over steps of `RANKS` packs."""

    cost: float
    learnt: float

    @classmethod
    def of(cls, cost: Array, learnt: Array, order: Ints) -> StepSpread:
        """Returns that of packs in an order; 0 where they are fewer than the ranks. cost, learnt: of each pack."""
        steps = order[: len(order) // RANKS * RANKS].reshape(-1, RANKS)
        return cls(*(_variation(held[steps]) for held in (cost, learnt)))

    def __str__(self) -> str:
        return f"cost {self.cost:.3f}, learnt tokens {self.learnt:.3f}"


def _variation(steps: Array) -> float:
    means = np.maximum(steps.mean(axis=1), 1e-12)
    return float((steps.std(axis=1) / means).mean()) if len(steps) else 0.0


def pack_costs(
    members: Array, offsets: Array, *, tokens: Array, patches: Array, images: Array, costs: PackCosts
) -> Array:
    """Returns the cost of each pack, float64 [num_packs]: b n + a n^2 over its samples, and over their images.

    tokens, patches, images: of each sample; the images of a sample count as if they were alike, which is the least that
    their squares can be.
    """
    wide = patches.astype(np.float64)
    seen = costs.patch * wide + costs.patch_squared * wide * wide / np.maximum(images, 1)
    read = costs.token * tokens + costs.token_squared * tokens.astype(np.float64) ** 2
    found: Array = np.add.reduceat((seen + read)[members], offsets[:-1])
    return found


def in_groups(cost: Array, learnt: Array, *, lockstep: int) -> Ints:
    """Returns the packs, int64 [num_packs], so that `lockstep` that follow each other have like costs and learn alike.

    By cost, cut into strata of eight groups; in each by learnt tokens, cut into groups. What is over stands last.
    """
    order = np.argsort(cost, kind="stable")
    whole = len(order) // lockstep * lockstep
    strata = [order[start : start + _STRATUM * lockstep] for start in range(0, whole, _STRATUM * lockstep)]
    dealt = [own[: whole - number * _STRATUM * lockstep] for number, own in enumerate(strata)]
    found = [own[np.argsort(learnt[own], kind="stable")] for own in dealt]
    return np.concatenate([np.empty(0, np.int64), *found, order[whole:]])


def regrouped(members: Array, offsets: Array, order: Ints) -> tuple[Array, Array]:
    """Returns members and offsets of the same packs in another order."""
    sizes = np.diff(offsets)[order]
    ends = np.cumsum(sizes)
    places = np.arange(len(members)) + np.repeat(offsets[:-1][order] - ends + sizes, sizes)
    return members[places], np.concatenate(([0], ends))


_MASK = "label_mask"


def learnt_tokens(source: SampleSource) -> Array:
    """Returns how many tokens each sample learns, integers [num_samples]; all of its tokens where no mask is stored.

    source: a cache, or some samples of one. Reads one column of every text shard, and checks it.
    """
    base, places = origin(source)
    if not isinstance(base, Cache) or _MASK not in base.fields:
        return length_of(source, "num_tokens")
    found: Ints = np.zeros(len(base), np.int64)
    for shard, samples, rows in base.by_shard():
        values, offsets = base.shard(TEXT, shard).column(_MASK)
        sums = np.concatenate(([0], np.cumsum(values != 0)))[offsets]
        found[samples] = np.diff(sums)[rows]
    if isinstance(source, CutSamples):
        return source.learnt(found)
    return found if places is None else found[places]
