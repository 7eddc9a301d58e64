"""A plan of packs and its order: which samples share one row of `seq_len` tokens, and which pack stands where.

An epoch's order is one keyed permutation of the packs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf, lcm
from typing import Any, Self

import numpy as np

from forebay.config.plan import PackConfig, PlanConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import ORDER_VERSION
from forebay.plan.interface import EpochOrder, KeptPlan, Tail, check_epoch, checked_positions, in_batches, places_of
from forebay.plan.pack.alike_packs import (
    RANKS,
    StepSpread,
    best_shapes,
    fits_a_shape,
    fixed_packs,
    in_groups,
    pack_costs,
    regrouped,
)
from forebay.plan.pack.along_line import stream_packs
from forebay.plan.pack.fewest import Packs, fewest, fewest_packs, vector_best_fit
from forebay.plan.pack.fit import best_fit_decreasing, hand_out, shuffle_inside, shuffled_groups
from forebay.plan.permutation import Permutations, derive_key
from forebay.store.layout import Array, Ints

logger = logging.getLogger(__name__)


def unplaced_by(settings: PackConfig) -> tuple[str, ...]:
    """Returns why a sample may be in no pack."""
    found = ("too_long", *(f"too_many_{unit}" for unit in settings.budgets or ("patches",)))
    return (*found, NO_SHAPE) if settings.has_shapes else found


NO_SHAPE = "no_shape"
"""The reason of a sample that neither of two fixed shapes has room for, beside the padding of its own images."""
_LOSS = 0.04
"""Share of padding in packs of fixed shapes above which a log line says so."""
_SEEN_AT_ONCE = 256
"""Samples, drawn from all, that a packer under two budgets chooses from."""
_FEW, _BUFFERS = 4096, (64, 256, 1024)
"""So few samples are packed along their line too, as under `buffer_size`: of few a lucky line can be the best."""
_PRICES: tuple[float, ...] = (0.0, 0.1, inf)
_FULL = 1000
"""Prices of `stream_packs` that are tried while packs are more than one in so many above the fewest possible."""
_TRIAL = 8192
"""Samples at the beginning of a line that tell whether exact completions serve it."""
_SLOW, _FAR = 8192, 20
"""Of more samples, best fit of vectors is tried only if a line has one pack in so many above the fewest possible."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackPlan(KeptPlan):
    """Samples in packs; a micro-batch is one pack. No seed, no epoch: one for all.

    members: int32 (int64 from 2^31 samples on) [placed samples], sample indices pack by pack, in the order in which
    they stand in the pack.
    offsets: int64 [num_packs + 1]; pack p holds members[offsets[p] : offsets[p + 1]].
    unplaced: for each reason of `unplaced_by` the indices, rising, of the samples that are in no pack.
    settings: by which the packs were made.
    patch_classes: see `Plan`. cut: counts of conversations that are cut, see `CutSamples`; the plan's samples are then
    what they are cut into.
    """

    members: Array
    offsets: Array
    unplaced: Mapping[str, Array]
    settings: PackConfig
    patch_classes: tuple[int, ...] = ()
    cut: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Ints], None] | None = None

    def order(self, seed: int, epoch: int) -> PackOrder:
        return PackOrder(self, seed=seed, epoch=epoch)

    @property
    def num_batches(self) -> int:
        """Packs: the micro-batches of one epoch, over all ranks."""
        return len(self.offsets) - 1

    def described(self) -> str:
        """See `Plan`; samples that are in no pack are counted by their reason."""
        left_out = [f", {len(own)} left out as {reason}" for reason, own in self.unplaced.items() if len(own)]
        sizes = " or ".join(map(str, self.patch_classes))
        padded = f" of {self.settings.seq_len} tokens and {sizes} rows of items" if self.patch_classes else ""
        if self.cut:
            left_out.append(f", {self.cut['samples']} cut into {self.cut['pieces']}")
            none = self.cut.get("nothing_learnt", 0)
            left_out += [f", {none} pieces left out as nothing_learnt"] if none else []
        return f"{len(self.members)} samples in {self.num_batches} packs{padded}{''.join(left_out)}"

    @property
    def num_samples(self) -> int:
        """Samples that the plan was made from, in packs or not."""
        return len(self.members) + sum(len(samples) for samples in self.unplaced.values())

    @property
    def tail(self) -> Tail:
        return self.settings.tail

    @property
    def lockstep(self) -> int:
        """Packs of like cost that come together; 1 where any may stand beside each other."""
        return self.settings.lockstep if self.settings.is_balanced else 1

    def balanced(self, *, tokens: Array, patches: Array | None, images: Array | None, learnt: Array) -> PackPlan:
        """Returns the same packs in groups of like cost. Arrays are of samples, integers [num_samples]."""
        none = np.zeros_like(tokens)
        seen = {"patches": none if patches is None else patches, "images": none if images is None else images}
        members, offsets = np.asarray(self.members), np.asarray(self.offsets)
        cost = pack_costs(members, offsets, tokens=tokens, **seen, costs=self.settings.costs)
        learns = np.add.reduceat(learnt[members].astype(np.float64), offsets[:-1])
        order = in_groups(cost, learns, lockstep=self.settings.lockstep)
        before = Permutations([len(cost)], derive_key("forebay balance"))(np.arange(len(cost)))
        logger.info(
            "balance over %d ranks, as coefficients of variation: %s; without it %s",
            *(RANKS, StepSpread.of(cost, learns, order), StepSpread.of(cost, learns, before)),
        )
        members, offsets = regrouped(members, offsets, order)
        return replace(self, members=members, offsets=offsets)

    def arrays(self) -> dict[str, Array]:
        return {"members": self.members, "offsets": self.offsets, **self.unplaced}

    def counts(self) -> dict[str, int]:
        return {"num_samples": self.num_samples, "num_packs": self.num_batches}

    def figures(self, _settings: PlanConfig) -> dict[str, Any]:
        """See `KeptPlan`."""
        found: dict[str, Any] = {"patch_classes": list(self.patch_classes)} if self.settings.has_shapes else {}
        return {**found, "cut": dict(self.cut)} if self.cut else found

    @classmethod
    def restored(cls, kept: dict[str, Any], *, metadata: Mapping[str, Any], settings: PackConfig) -> Self:
        """See `KeptPlan`; raises ValueError where the arrays are no packs of so many samples, whatever their sums."""
        unplaced = {reason: kept.pop(reason) for reason in unplaced_by(settings)}
        shapes = tuple(metadata["patch_classes"]) if settings.has_shapes else ()
        plan = cls(unplaced=unplaced, **kept, settings=settings, patch_classes=shapes, cut=metadata.get("cut", {}))
        plan.require_packs(metadata["num_samples"])
        return plan

    def require_packs(self, num_samples: int) -> None:
        """Raises ValueError where the arrays are no packs of so many samples; members with a `check` are not read."""
        members, offsets = self.members, self.offsets
        lists = [members, *self.unplaced.values()]
        if any(array.ndim != 1 or array.dtype.kind != "i" for array in (offsets, *lists)):
            raise ValueError("its arrays are no lists of integers")
        if self.num_samples != num_samples:
            raise ValueError(f"{self.num_samples} samples are in packs or left out, num_samples is {num_samples}")
        if [offsets[0], offsets[-1]] != [0, len(members)] or np.any(offsets[1:] <= offsets[:-1]):
            raise ValueError(f"the offsets of its packs do not rise from 0 to {len(members)}")
        read = lists if self.check is None else lists[1:]
        if any(len(found) and (found.min() < 0 or found.max() >= num_samples) for found in read):
            raise ValueError(f"it names samples outside of 0 to {num_samples - 1}")


def pack_plan(
    tokens: Array,
    *,
    patches: Array | None = None,
    frames: Array | None = None,
    merge_size: int = 0,
    reserved: int = 0,
    settings: PackConfig,
) -> PackPlan:
    """Returns the plan in which every sample is in one pack or in `unplaced`, and no pack exceeds a budget.

    tokens: integers [num_samples], of 1 or more. patches, frames: integers [num_samples], of the sample's images and of
    its recordings; needed for `max_patches` and `max_frames`. merge_size: its square is the patches of an image token.
    reserved: tokens of packs of images of fixed shapes that no sample may have.
    With `shapes = "fixed"` packs of images are made by `fixed_packs`, about 10,000 samples a second.
    With `buffer_size` packs are made along the samples as they are stored (`stream_packs`); a buffer smaller than a
    pack is a warning in the log. Else packs are made of all samples at once, on the histogram of lengths (`best_fit`,
    or `best_fit_decreasing` where that needs fewer packs), and the samples of a length are drawn at random; only where
    such packs exceed another budget along a shuffled line of all samples. A function of the lengths and settings, on
    any machine. O(num_samples) memory; time: 10 million samples in 3 s on the histogram; along a line 0.4 to 1.2
    million a second, 0.1 million where exact completions do not serve (uniform lengths).
    Raises PlanError for no samples, a length below 1, missing patches, nothing that fits, and under `overlong =
    "error"` for the first sample that does not fit.
    """
    units = {"patches": patches, "frames": frames}
    sizes = _sizes(tokens, units, settings)
    unplaced = _unplaced(sizes, settings)
    is_placed = np.ones(len(tokens), dtype=bool)
    for found in unplaced.values():
        is_placed[found] = False
    placed = np.flatnonzero(is_placed).astype(np.int32 if len(tokens) < 2**31 else np.int64)
    shapes: tuple[int, ...] = ()
    if settings.has_shapes and merge_size:
        images = np.zeros_like(tokens) if patches is None else patches // merge_size**2
        both = np.stack([tokens - images, images])[:, placed].astype(np.int64)
        placed, (members, offsets), shapes = _in_shapes(both, placed, unplaced, merge_size, reserved, settings)
    else:
        members, offsets = _packed(sizes[:, placed].astype(np.int32), _rooms(settings), settings)
        if settings.has_shapes and settings.max_frames is not None:
            shapes = (-(-settings.max_frames // 2), settings.max_frames)
    _warn_of_short_buffer(tokens[placed], num_packs=len(offsets) - 1, settings=settings)
    members = placed[members]
    shuffle_inside(members, offsets, key=derive_key("forebay packs", settings.pack_seed, "inside"))
    return PackPlan(members=members, offsets=offsets, unplaced=unplaced, settings=settings, patch_classes=shapes)


def _in_shapes(
    sizes: Array, placed: Array, unplaced: dict[str, Array], merge_size: int, reserved: int, settings: PackConfig
) -> tuple[Array, Packs, tuple[int, ...]]:
    """Returns the samples that fit in a shape, their packs, and the shapes in patches; `unplaced` has the others too.

    sizes: int64 [2, placed], see `fixed_packs`. placed: which samples these are.
    """
    seq_len, unit, count = settings.seq_len - reserved, merge_size**2, sizes.shape[1]
    line = np.arange(count)
    if not 0 < settings.buffer_size < count:
        key = derive_key("forebay packs", settings.pack_seed, "line")
        line = shuffled_groups(np.zeros(count, np.int32), key=key)
    most = seq_len if settings.max_patches is None else max(settings.max_patches // unit, 1)
    shapes = best_shapes(sizes[:, line], seq_len=seq_len, most=most)
    fits = fits_a_shape(sizes, seq_len=seq_len, shapes=shapes)
    unplaced[NO_SHAPE] = placed[~fits]
    if settings.overlong == "error":
        _refuse(~fits, sizes.sum(axis=0), NO_SHAPE, limit=f"plan.seq_len is {seq_len}")
    if not fits.any():
        raise PlanError(
            f"none of {count} samples fits into a pack of fixed shapes: texts leave no room for an image of padding in "
            f"plan.seq_len = {seq_len}; raise it",
            code="FB503",
        )
    line = line[fits[line]]
    seen = {"seen": settings.buffer_size} if settings.buffer_size else {}
    members, offsets = fixed_packs(sizes[:, line], seq_len=seq_len, shapes=shapes, **seen)
    loss = 1 - int(sizes[:, line].sum()) / (max(len(offsets) - 1, 1) * seq_len)
    if loss > _LOSS:
        logger.warning(
            'plan.shapes = "fixed": %.1f %% of all tokens are padding; a larger plan.seq_len most often loses less, '
            'and "natural" packs have none beside what their samples leave free',
            100 * loss,
        )
    return placed, (line[members], offsets), tuple(unit * shape for shape in shapes)


def _rooms(settings: PackConfig) -> tuple[int, ...]:
    """Returns the budgets of a pack, that of tokens first."""
    return (settings.seq_len, *settings.budgets.values())


def _packed(sizes: Array, rooms: tuple[int, ...], settings: PackConfig) -> Packs:
    """Returns places pack by pack and where packs begin. sizes: int32 [budgets, num_samples], the tokens first."""
    counts = np.bincount(sizes[0], minlength=settings.seq_len + 1)
    least = max(fewest(counts, seq_len=settings.seq_len), *_fewest_by_sums(sizes, rooms))
    num_samples, along = sizes.shape[1], partial(_as_stored, *_as_two(sizes, rooms), least=least)
    if 0 < settings.buffer_size < num_samples:
        return along(seen=settings.buffer_size)
    found = _by_tokens(sizes, rooms, settings, counts) or _by_all(sizes, rooms, settings, least=least)
    for seen in _BUFFERS if settings.algorithm == "best_fit" and num_samples <= _FEW else ():
        if seen < num_samples and _num_packs(found) > least:
            found = min(found, along(seen=seen), key=_num_packs)
    return found


def _fewest_by_sums(sizes: Array, rooms: tuple[int, ...]) -> list[int]:
    return [-(-int(held.sum(dtype=np.int64)) // room) for held, room in zip(sizes, rooms, strict=True)]


def _as_two(sizes: Array, rooms: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """Returns sizes and budgets with one beside the tokens: a sample's largest share, whose sums bound every other."""
    if len(rooms) <= 2:
        return sizes, rooms
    most, others = max(rooms[1:]), np.array(rooms[1:])[:, None]
    shares = -(-sizes[1:].astype(np.int64) * most // others)
    return np.stack([sizes[0], shares.max(axis=0)]).astype(np.int32), (rooms[0], most)


def _by_tokens(sizes: Array, rooms: tuple[int, ...], settings: PackConfig, counts: Array) -> Packs | None:
    """Returns the packs of all samples on the histogram of lengths; None if they exceed another budget."""
    sums, others = sizes.sum(axis=1, dtype=np.int64).tolist(), range(1, len(rooms))
    for other in others:
        demand, share = sums[other] * rooms[0], sums[0] * rooms[other]
        is_above = sizes[other] * np.int64(rooms[0]) > sizes[0] * np.int64(rooms[other])
        if is_above.any() and 10 * demand > 9 * share:
            return None  # a mean pack is so near the budget that some are above it
    key = derive_key("forebay packs", settings.pack_seed, "line")
    if settings.algorithm == "best_fit":
        patterns = fewest_packs(counts, seq_len=settings.seq_len, key=key)
    else:
        patterns = best_fit_decreasing(counts, seq_len=settings.seq_len)
    members, offsets = hand_out(sizes[0], patterns, key=key)
    held = (np.add.reduceat(sizes[other][members], offsets[:-1], dtype=np.int64).max() for other in others)
    return None if any(most > room for most, room in zip(held, rooms[1:], strict=True)) else (members, offsets)


def _by_all(sizes: Array, rooms: tuple[int, ...], settings: PackConfig, *, least: int) -> Packs:
    """Returns packs of all samples under all budgets, along a shuffled line."""
    key, num_samples = derive_key("forebay packs", settings.pack_seed, "line"), sizes.shape[1]
    line = shuffled_groups(np.zeros(num_samples, np.int32), key=key)
    found = _along(*_as_two(sizes, rooms), line, seen=_SEEN_AT_ONCE)
    is_far = _num_packs(found) > (least if num_samples <= _SLOW else least + least // _FAR)
    if is_far and lcm(*rooms) * len(rooms) < 2**63:  # shares are exact in 64 bits
        found = min(found, vector_best_fit(sizes, rooms, least=least), key=_num_packs)
    return found


def _as_stored(sizes: Array, rooms: tuple[int, ...], *, seen: int, least: int) -> Packs:
    """Returns the packs along the samples as they are stored: under one budget the fewest of several prices.

    Where exact completions alone are worse at the beginning of a long line, they are not made along all of it.
    """
    along, line = partial(_along, sizes, rooms, seen=seen), np.arange(sizes.shape[1])
    if len(rooms) > 1:
        return along(line)
    prices = _PRICES
    if len(line) > 2 * _TRIAL:
        exact = _num_packs(along(line[:_TRIAL]))
        is_full = exact <= int(sizes[0, :_TRIAL].sum(dtype=np.int64)) // rooms[0] + 2
        if not is_full and exact > _num_packs(along(line[:_TRIAL], price=prices[1])):
            prices = prices[1:]
    found = along(line, price=prices[0])
    for price in prices[1:]:
        if _num_packs(found) > least + least // _FULL:
            found = min(found, along(line, price=price), key=_num_packs)
    return found


def _along(sizes: Array, rooms: tuple[int, ...], line: Array, *, seen: int, price: float = 0.0) -> Packs:
    """Returns packs along a line of samples, under a budget of tokens and at most one more."""
    seq_len, *most = rooms
    places, offsets = stream_packs(
        sizes[0][line],
        seq_len=seq_len,
        patches=sizes[1][line] if most else None,
        max_patches=most[0] if most else None,
        buffer_size=seen,
        price=price,
    )
    return line[places], offsets


def _num_packs(packs: Packs) -> int:
    return len(packs[1]) - 1


def _warn_of_short_buffer(tokens: Array, *, num_packs: int, settings: PackConfig) -> None:
    each = len(tokens) / num_packs
    if 0 < settings.buffer_size < each:
        fill = int(tokens.sum(dtype=np.int64)) / num_packs / settings.seq_len
        logger.warning(
            "plan.buffer_size is %d, and a pack of plan.seq_len = %d holds %.1f samples; packs are %.2f %% full: with "
            "more samples in sight they are fuller; set plan.buffer_size = %d, or 0 for all samples",
            *(settings.buffer_size, settings.seq_len, each, 100 * fill, 4 * ceil(each)),
        )


def _sizes(tokens: Array, units: Mapping[str, Array | None], settings: PackConfig) -> Array:
    """Returns the tokens of samples, and of each other budget the units: integers [budgets, num_samples]."""
    given = {name: lengths for name, lengths in {"tokens": tokens, **units}.items() if lengths is not None}
    if absent := [unit for unit in settings.budgets if unit not in given]:
        raise PlanError(f"plan.max_{absent[0]} needs the {absent[0]} of every sample, and none are known; leave it out")
    for name, lengths in given.items():
        least = int(name == "tokens")
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or len(lengths) != len(tokens):
            raise PlanError(f"{name} are {lengths.dtype} {list(lengths.shape)}, wanted integers [{len(tokens)}]")
        if len(lengths) and lengths.min() < least:
            index = int(np.argmax(lengths < least))
            raise PlanError(f"sample {index} has {int(lengths[index])} {name}, wanted {least} or more")
    if len(tokens) == 0:
        raise PlanError("no samples to plan: the cache or the filters in [source] leave none", code="FB501")
    return np.stack([given[name] for name in ("tokens", *settings.budgets)])


def _unplaced(sizes: Array, settings: PackConfig) -> dict[str, Array]:
    """Returns the samples above a budget by reason, each under the first one that it is above."""
    rooms, units = _rooms(settings), ("tokens", *settings.budgets)
    names = ("plan.seq_len", *(f"plan.max_{unit}" for unit in settings.budgets))
    is_over = sizes > np.array(rooms)[:, None]
    is_over[1:] &= ~np.logical_or.accumulate(is_over)[:-1]
    if settings.overlong == "error":
        for mask, held, reason, name, room in zip(is_over, sizes, unplaced_by(settings), names, rooms, strict=False):
            _refuse(mask, held, reason, limit=f"{name} is {room}")
    if is_over.any(axis=0).all():
        counts = zip(is_over.sum(axis=1).tolist(), names, rooms, units, strict=True)
        said = ", ".join(f"{count} with more than {name} = {room} {unit}" for count, name, room, unit in counts)
        raise PlanError(f"none of {sizes.shape[1]} samples fits into a pack: {said}", code="FB503")
    indices = np.int32 if sizes.shape[1] < 2**31 else np.int64
    found = dict.fromkeys(unplaced_by(settings), np.empty(0, indices))
    return found | {reason: np.flatnonzero(mask).astype(indices) for reason, mask in zip(found, is_over, strict=False)}


def _refuse(mask: Array, held: Array, reason: str, *, limit: str) -> None:
    if mask.any():
        first = int(np.argmax(mask))
        raise PlanError(
            f"{mask.sum()} samples are {reason}; the first is sample {first}: {held[first]}, {limit}; "
            'raise it, or set plan.overlong = "drop" to leave them out, counted',
            code="FB503",
        )


class PackOrder(EpochOrder):
    """One epoch of a pack plan: a function of (plan, seed, epoch, position) and nothing else. Costs O(1) to make.

    A micro-batch is one pack. The samples of a pack, and their order in it, are the same in every epoch.
    """

    def __init__(self, plan: PackPlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer)."""
        check_epoch(epoch)
        self.plan = plan
        key = derive_key("forebay order", ORDER_VERSION, seed, epoch, "packs")
        self._size = plan.lockstep
        self._groups = plan.num_batches // self._size
        self._line = Permutations([self._groups, plan.num_batches % self._size], key)
        turns = derive_key("forebay order", ORDER_VERSION, seed, epoch, "turns")
        self._turns = Permutations([self._size] * self._groups, turns) if self._size > 1 else None

    def __len__(self) -> int:
        return self.plan.num_batches

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        packs = self.packs(positions)
        starts = self.plan.offsets[packs]
        sizes = self.plan.offsets[packs + 1] - starts
        return in_batches(self.plan.members_at(places_of(starts, sizes)), sizes)

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        """See `EpochOrder`; packs have one shape class, 0."""
        return np.zeros_like(checked_positions(positions, len(self)))

    def packs(self, positions: Sequence[int] | Array) -> Ints:
        """Returns the numbers, int64 [num_positions], that the packs at some positions have in the plan."""
        where = checked_positions(positions, len(self))
        if self._turns is None:
            return self._line(where)
        # Groups in random order, each in an order of its own; packs that fill no group come last.
        groups, inside = np.divmod(where, self._size)
        is_last = groups >= self._groups
        found = np.empty_like(where)
        own = self._line(groups[~is_last])
        found[~is_last] = own * self._size + self._turns(inside[~is_last], member=own)
        rest = self._line(inside[is_last], member=np.ones(int(is_last.sum()), np.int64))
        found[is_last] = self._groups * self._size + rest
        return found
