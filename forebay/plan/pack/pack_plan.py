"""A plan of packs and its order: which samples share one row of `seq_len` tokens, and which pack stands where.

An epoch's order is one keyed permutation of the packs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any, Self

import numpy as np

from forebay.config.plan import PackConfig, PlanConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import ORDER_VERSION
from forebay.plan.interface import EpochOrder, KeptPlan, Tail, check_epoch, checked_positions, in_batches, places_of
from forebay.plan.pack.along_line import stream_packs
from forebay.plan.pack.fewest import Packs, fewest, fewest_packs, vector_best_fit
from forebay.plan.pack.fit import best_fit_decreasing, hand_out, shuffle_inside, shuffled_groups
from forebay.plan.permutation import Permutations, derive_key
from forebay.store.layout import Array, Ints

logger = logging.getLogger(__name__)


def unplaced_by(settings: PackConfig) -> tuple[str, str]:
    """Returns why a sample may be in no pack."""
    return ("too_long", f"too_many_{settings.units}")


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
    """

    members: Array
    offsets: Array
    unplaced: Mapping[str, Array]
    settings: PackConfig
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
        return f"{len(self.members)} samples in {self.num_batches} packs{''.join(left_out)}"

    @property
    def num_samples(self) -> int:
        """Samples that the plan was made from, in packs or not."""
        return len(self.members) + sum(len(samples) for samples in self.unplaced.values())

    @property
    def tail(self) -> Tail:
        return self.settings.tail

    @property
    def lockstep(self) -> int:
        """1: packs are all of one shape class, so ranks step through equal shapes in any order."""
        return 1

    def arrays(self) -> dict[str, Array]:
        return {"members": self.members, "offsets": self.offsets, **self.unplaced}

    def counts(self) -> dict[str, int]:
        return {"num_samples": self.num_samples, "num_packs": self.num_batches}

    def figures(self, _settings: PlanConfig) -> dict[str, Any]:
        """See `KeptPlan`: packs need nothing more."""
        return {}

    @classmethod
    def restored(cls, kept: dict[str, Any], *, metadata: Mapping[str, Any], settings: PackConfig) -> Self:
        """See `KeptPlan`; raises ValueError where the arrays are no packs of so many samples, whatever their sums."""
        plan = cls(unplaced={reason: kept.pop(reason) for reason in unplaced_by(settings)}, **kept, settings=settings)
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


def pack_plan(tokens: Array, *, patches: Array | None = None, settings: PackConfig) -> PackPlan:
    """Returns the plan in which every sample is in one pack or in `unplaced`, and no pack exceeds a budget.

    tokens: integers [num_samples], of 1 or more. patches: integers [num_samples], of the sample's images, or frames of
    its recordings; needed for `max_patches` or `max_frames`.
    With `buffer_size` packs are made along the samples as they are stored (`stream_packs`); a buffer smaller than a
    pack is a warning in the log. Else packs are made of all samples at once, on the histogram of lengths (`best_fit`,
    or `best_fit_decreasing` where that needs fewer packs), and the samples of a length are drawn at random; only where
    such packs exceed the second budget along a shuffled line of all samples. A function of the lengths and settings, on
    any machine. O(num_samples) memory; time: 10 million samples in 3 s on the histogram; along a line 0.4 to 1.2
    million a second, 0.1 million where exact completions do not serve (uniform lengths).
    Raises PlanError for no samples, a length below 1, missing patches, nothing that fits, and under `overlong =
    "error"` for the first sample that does not fit.
    """
    seq_len = _checked(tokens, patches, settings)
    unplaced = _unplaced(tokens, patches, settings, seq_len=seq_len)
    is_placed = np.ones(len(tokens), dtype=bool)
    for found in unplaced.values():
        is_placed[found] = False
    placed = np.flatnonzero(is_placed).astype(np.int32 if len(tokens) < 2**31 else np.int64)
    own_patches = patches[placed].astype(np.int32) if patches is not None and settings.most_units is not None else None
    members, offsets = _packed(tokens[placed].astype(np.int32), own_patches, settings)
    _warn_of_short_buffer(tokens[placed], num_packs=len(offsets) - 1, settings=settings)
    members = placed[members]
    shuffle_inside(members, offsets, key=derive_key("forebay packs", settings.pack_seed, "inside"))
    return PackPlan(members=members, offsets=offsets, unplaced=unplaced, settings=settings)


def _packed(tokens: Array, patches: Array | None, settings: PackConfig) -> Packs:
    """Returns places pack by pack and where packs begin. patches: None without a second budget."""
    counts = np.bincount(tokens, minlength=settings.seq_len + 1)
    least = fewest(counts, seq_len=settings.seq_len)
    if patches is not None and settings.most_units is not None:
        least = max(least, -(-int(patches.sum(dtype=np.int64)) // settings.most_units))
    as_stored = partial(_as_stored, tokens, patches, settings, least=least)
    if 0 < settings.buffer_size < len(tokens):
        return as_stored(seen=settings.buffer_size)
    found = _by_tokens(tokens, patches, settings, counts)
    if found is None and patches is not None:
        found = _by_both(tokens, patches, settings, least=least)
    assert found is not None
    for seen in _BUFFERS if settings.algorithm == "best_fit" and len(tokens) <= _FEW else ():
        if seen < len(tokens) and _num_packs(found) > least:
            found = min(found, as_stored(seen=seen), key=_num_packs)
    return found


def _by_tokens(tokens: Array, patches: Array | None, settings: PackConfig, counts: Array) -> Packs | None:
    """Returns the packs of all samples on the histogram of lengths; None if they exceed the second budget."""
    most = settings.most_units or 0
    if patches is not None:
        shares = patches.astype(np.int64) * settings.seq_len, tokens.astype(np.int64) * most
        demands = int(patches.sum(dtype=np.int64)) * settings.seq_len, int(tokens.sum(dtype=np.int64)) * most
        if (shares[0] > shares[1]).any() and 10 * demands[0] > 9 * demands[1]:
            return None  # a mean pack is so near the budget that some are above it
    key = derive_key("forebay packs", settings.pack_seed, "line")
    if settings.algorithm == "best_fit":
        patterns = fewest_packs(counts, seq_len=settings.seq_len, key=key)
    else:
        patterns = best_fit_decreasing(counts, seq_len=settings.seq_len)
    members, offsets = hand_out(tokens, patterns, key=key)
    if patches is not None and np.add.reduceat(patches[members], offsets[:-1], dtype=np.int64).max() > most:
        return None
    return members, offsets


def _by_both(tokens: Array, patches: Array, settings: PackConfig, *, least: int) -> Packs:
    """Returns packs of all samples under both budgets, along a shuffled line."""
    line = shuffled_groups(np.zeros_like(tokens), key=derive_key("forebay packs", settings.pack_seed, "line"))
    found = _along(tokens, patches, settings, line, seen=_SEEN_AT_ONCE)
    if _num_packs(found) > (least if len(tokens) <= _SLOW else least + least // _FAR):
        rooms = {"seq_len": settings.seq_len, "max_patches": settings.most_units or 0}
        found = min(found, vector_best_fit(tokens, patches, **rooms, least=least), key=_num_packs)
    return found


def _as_stored(tokens: Array, patches: Array | None, settings: PackConfig, *, seen: int, least: int) -> Packs:
    """Returns the packs along the samples as they are stored: under one budget the fewest of several prices.

    Where exact completions alone are worse at the beginning of a long line, they are not made along all of it.
    """
    along, line = partial(_along, tokens, patches, settings, seen=seen), np.arange(len(tokens))
    if patches is not None:
        return along(line)
    prices = _PRICES
    if len(line) > 2 * _TRIAL:
        exact = _num_packs(along(line[:_TRIAL]))
        is_full = exact <= int(tokens[:_TRIAL].sum(dtype=np.int64)) // settings.seq_len + 2
        if not is_full and exact > _num_packs(along(line[:_TRIAL], price=prices[1])):
            prices = prices[1:]
    found = along(line, price=prices[0])
    for price in prices[1:]:
        if _num_packs(found) > least + least // _FULL:
            found = min(found, along(line, price=price), key=_num_packs)
    return found


def _along(
    tokens: Array, patches: Array | None, settings: PackConfig, line: Array, *, seen: int, price: float = 0.0
) -> Packs:
    held = None if patches is None else patches[line]
    places, offsets = stream_packs(
        tokens[line],
        seq_len=settings.seq_len,
        patches=held,
        max_patches=settings.most_units,
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


def _checked(tokens: Array, patches: Array | None, settings: PackConfig) -> int:
    if settings.most_units is not None and patches is None:
        raise PlanError(
            f"plan.max_{settings.units} needs the {settings.units} of every sample, and none are known; leave it out"
        )
    for name, lengths, least in (("tokens", tokens, 1), (settings.units, patches, 0)):
        if lengths is None:
            continue
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or len(lengths) != len(tokens):
            raise PlanError(f"{name} are {lengths.dtype} {list(lengths.shape)}, wanted integers [{len(tokens)}]")
        if len(lengths) and lengths.min() < least:
            index = int(np.argmax(lengths < least))
            raise PlanError(f"sample {index} has {int(lengths[index])} {name}, wanted {least} or more")
    if len(tokens) == 0:
        raise PlanError("no samples to plan: the cache or the filters in [source] leave none", code="FB501")
    return settings.seq_len


def _unplaced(tokens: Array, patches: Array | None, settings: PackConfig, *, seq_len: int) -> dict[str, Array]:
    is_long = tokens > seq_len
    is_large = np.zeros_like(is_long)
    if patches is not None and settings.most_units is not None:
        is_large = (patches > settings.most_units) & ~is_long
    indices = np.int32 if len(tokens) < 2**31 else np.int64
    masks = zip(unplaced_by(settings), (is_long, is_large), strict=True)
    found = {reason: np.flatnonzero(mask).astype(indices) for reason, mask in masks}
    if settings.overlong == "error":
        _refuse(found, tokens, patches, settings)
    if is_long.sum() + is_large.sum() == len(tokens):
        raise PlanError(
            f"none of {len(tokens)} samples fits into a pack: {len(found['too_long'])} have more than plan.seq_len = "
            f"{seq_len} tokens, {is_large.sum()} more than plan.max_{settings.units} = {settings.most_units} "
            f"{settings.units}",
            code="FB503",
        )
    return found


def _refuse(found: Mapping[str, Array], tokens: Array, patches: Array | None, settings: PackConfig) -> None:
    for reason, name, lengths, limit in (
        ("too_long", "seq_len", tokens, settings.seq_len),
        (unplaced_by(settings)[1], f"max_{settings.units}", patches, settings.most_units),
    ):
        if len(found[reason]) and lengths is not None:
            first = int(found[reason][0])
            raise PlanError(
                f"{len(found[reason])} samples are {reason}; the first is sample {first}: {int(lengths[first])}, "
                f'plan.{name} is {limit}; raise it, or set plan.overlong = "drop" to leave them out, counted',
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
        self._line = Permutations([plan.num_batches], derive_key("forebay order", ORDER_VERSION, seed, epoch, "packs"))

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
        return self._line(checked_positions(positions, len(self)))
