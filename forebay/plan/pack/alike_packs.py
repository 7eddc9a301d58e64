"""Packs that ranks take side by side: of fixed shapes, and of like cost.

A pack of a fixed shape has `seq_len` tokens and one of at most two numbers of patches, its padding among them. Patches
that fill up a pack have image tokens too, so both kinds of padding are reserved here: a pack whose shape has images of
p tokens holds samples with at most p tokens of images and `seq_len` - p others. Sizes are pairs of those: int64
[2, num_samples], the other tokens first.

With packs of like cost what the ranks of a step do takes them the same time, and each learns as much. The cost of a
pack is a function of lengths alone, so steps are planned and ranks exchange nothing. The tokens that a sample learns
are read without its items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from forebay.config.plan import PackCosts
from forebay.store.cache import Cache
from forebay.store.cut_samples import CutSamples
from forebay.store.layout import TEXT, Array, Constants, Ints
from forebay.store.selection import origin
from forebay.store.source import SampleSource, length_of

_SEEN, _NEAR = 96, 48
"""Samples in sight, and the oldest of those that fit, of which a pair completes a pack."""
_PAIR = 2.0
"""Samples of mean size for which there is room when a pair is to fill it."""
_SPREADS = (4, 8, 16, 32)
"""Parts of `seq_len` by which shapes are tried that lie around the mean share of images."""
_TRIED, _TRIAL_PACKS, _TRIAL_SAMPLES = 12, 200, 8192
"""Choices of shapes that are packed as a trial, about how many packs of it, and the most samples."""
_ONE_MORE = 1.002
"""Packs that a second shape has to save: it is one more graph of a compiled model."""
_GONE = np.iinfo(np.int64).max // 4


def reserved_tokens(constants: Constants) -> int:
    """Returns the tokens of every pack beside its shape: an image and a video of one each, where there are videos."""
    return 2 if "video_family" in constants else 0


def best_shapes(sizes: Array, *, seq_len: int, most: int) -> tuple[int, ...]:
    """Returns one or two shapes, rising, by their image tokens: those that the most samples fit in, with least padding.

    most: image tokens of any shape. sizes: in random order; the first of them are packed as a trial. Each shape has one
    image token at least, because a pack without images has an image of padding.
    """
    sums = sizes.sum(axis=1)
    ideal = seq_len * int(sums[1]) // max(int(sums.sum()), 1)
    around = [ideal + side * seq_len // part for part in _SPREADS for side in (-1, 1)]
    marks = [1, ideal, *around, int(sizes[1].max()), seq_len - int(sizes[0].max())]
    shapes = sorted({min(max(mark, 1), most, seq_len - 1) for mark in marks})
    choices: list[tuple[int, ...]] = [*((one,) for one in shapes), *combinations(shapes, 2)]
    fits = {shape: _fits(sizes, seq_len, shape) for shape in shapes}
    missed = {choice: int((~np.logical_or.reduce([fits[each] for each in choice])).sum()) for choice in choices}
    least = min(missed.values())
    trial = sizes[:, : min(_TRIAL_SAMPLES, max(1, _TRIAL_PACKS * seq_len * sizes.shape[1] // max(int(sums.sum()), 1)))]
    good = [choice for choice in choices if missed[choice] == least]
    tried = sorted(good, key=lambda choice: _bound(trial, seq_len, choice))[:_TRIED]
    costs = {choice: _trial(trial, seq_len, choice) * _ONE_MORE ** len(choice) for choice in tried}
    return min(tried, key=lambda choice: costs[choice])


def fits_a_shape(sizes: Array, *, seq_len: int, shapes: Sequence[int]) -> Array:
    """Returns which samples fit in a pack of one of these shapes, bool [num_samples]."""
    found: Array = np.logical_or.reduce([_fits(sizes, seq_len, shape) for shape in shapes])
    return found


def fixed_packs(sizes: Array, *, seq_len: int, shapes: Sequence[int], seen: int = _SEEN) -> tuple[Ints, Ints]:
    """Returns the places of all samples pack by pack, int64, and where packs begin and end, along the line of `sizes`.

    `seen` samples that wait are in sight at any time. The oldest begins a pack, and with the next oldest fills half of
    it. Then the pack takes what brings its mix nearest to the room that is left, and in the end the pair that fills
    this best. Of two shapes it takes, at each step, the one in which most more samples of mean size have room.
    """
    packer, places, ends = _Packer(sizes, seq_len, shapes, seen), list[int](), [0]
    while packer.left:
        places += packer.pack()
        ends.append(len(places))
    return np.array(places, np.int64), np.array(ends, np.int64)


def _fits(sizes: Array, seq_len: int, shape: int) -> Array:
    found: Array = (sizes[0] <= seq_len - shape) & (sizes[1] <= shape)
    return found


def _bound(sizes: Array, seq_len: int, choice: Sequence[int]) -> float:
    """Returns packs that no packing goes below if samples with few images for their tokens have the smaller shape."""
    order = np.argsort(sizes[1] / np.maximum(sizes.sum(axis=0), 1), kind="stable")
    low = np.concatenate((np.zeros((2, 1), np.int64), np.cumsum(sizes[:, order], axis=1)), axis=1)
    high = low[:, -1:] - low
    packs = [
        np.max(held / np.array([[seq_len - shape], [shape]]), axis=0)
        for held, shape in zip((low, high), (choice[0], choice[-1]), strict=True)
    ]
    return float((packs[0] + packs[1]).min())


def _trial(sizes: Array, seq_len: int, choice: Sequence[int]) -> float:
    """Returns the packs of samples, the last one as far as it is full; samples that fit in none do not count."""
    held = sizes[:, fits_a_shape(sizes, seq_len=seq_len, shapes=choice)]
    if not held.shape[1]:
        return 0.0
    places, ends = fixed_packs(held, seq_len=seq_len, shapes=choice)
    return len(ends) - 2 + int(held[:, places[ends[-2] :]].sum()) / seq_len


class _Packer:
    """The samples in sight, each in a slot of its own, and the packs that are made of them."""

    def __init__(self, sizes: Array, seq_len: int, shapes: Sequence[int], seen: int) -> None:
        self._sizes, self.left = sizes, sizes.shape[1]
        self._rooms = np.array([(seq_len - shape, shape) for shape in shapes], np.int64)
        self._next = min(seen, self.left)
        self._held, self._places = sizes[:, : self._next].copy(), np.arange(self._next)
        self._mean = np.maximum(sizes.sum(axis=1), 1) / max(self.left, 1)
        self._half = float((self._rooms / self._mean).min(axis=1).max()) / 2

    def pack(self) -> list[int]:
        """Takes the samples of the next pack and returns their places."""
        rooms, places, found = self._rooms, list[int](), [int(self._places.argmin())]
        while found:
            rooms = rooms - self._held[:, found].sum(axis=1)
            rooms = rooms[(rooms >= 0).all(axis=1)]
            places += map(self._take, found)
            found, rooms = self._following(rooms)
        return places

    def _take(self, slot: int) -> int:
        """Returns the place of a sample; the next of the line has its slot."""
        place, self.left = int(self._places[slot]), self.left - 1
        is_over = self._next == self._sizes.shape[1]
        self._held[:, slot] = _GONE if is_over else self._sizes[:, self._next]
        self._places[slot] = _GONE if is_over else self._next
        self._next += not is_over
        return place

    def _following(self, rooms: Array) -> tuple[list[int], Array]:
        """Returns the slots that a pack takes next, none where nothing fits, and the rooms that it may still have."""
        more = (rooms / self._mean).min(axis=1)
        for shape in np.argsort(-more, kind="stable").tolist():
            room, count = rooms[shape], float(more[shape])
            fits = (self._held <= room[:, None]).all(axis=0)
            if not fits.any():
                continue
            if count <= _PAIR:
                return self._completion(np.flatnonzero(fits), room), rooms[shape : shape + 1]
            oldest = int(self._places.argmin())
            if count > self._half and fits[oldest]:
                return [oldest], rooms
            away = (np.abs(self._held - (room / count)[:, None]) / self._mean[:, None]).sum(axis=0)
            return [int(np.where(fits, away, np.inf).argmin())], rooms
        return [], rooms

    def _completion(self, slots: Array, room: Array) -> list[int]:
        """Returns the one or two of these slots that leave the least of a room, in samples of mean size."""
        if len(slots) > _NEAR:
            slots = slots[np.argsort(self._places[slots], kind="stable")[:_NEAR]]
        held = self._held[:, slots]
        rest = room[:, None, None] - held[:, :, None] - held[:, None, :]
        cost = (rest / self._mean[:, None, None]).sum(axis=0)
        cost[(rest < 0).any(axis=0)] = np.inf
        np.fill_diagonal(cost, ((room[:, None] - held) / self._mean[:, None]).sum(axis=0))
        first, second = divmod(int(cost.argmin()), len(slots))
        return [int(slot) for slot in slots[sorted({first, second})]]


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
