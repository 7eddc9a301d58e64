"""A plan that mixes sources by exact weights, and its order: whole caches, or the values of a column of one cache.

The order is one endless stream, cut into epochs, and computed at any place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import xxhash

from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.interface import EpochOrder, Tail, check_epoch, checked_positions
from forebay.plan.mixture.draw import ClassSplit, Draw, MixedDraw, PerSourceDraw
from forebay.plan.mixture.sources import PERIOD, AnyAssignment, Assignment, ChangingAssignment, WeightChange, quantise
from forebay.plan.permutation import Permutations, derive_key
from forebay.plan.shard_line import ShardLine, Windows
from forebay.store.layout import Array, Ints

Batches = Literal["mixed", "per_source"]
Exhausted = Literal["repeat", "end"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceShards:
    """Where the samples of each source lie. shards: those of each source, rising; counts: their samples, [shards, c].

    window: shards of a source that its shuffle reaches into. run: consecutive ones that stay together.
    """

    window: int
    run: int
    shards: list[Array]
    counts: list[Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixturePlan:
    """Sources with weights over the length classes of a bucket plan. Every micro-batch is full and of one class.

    The stream of samples (`mixed`) or of lockstep groups (`per_source`) is within one of each source's share at every
    prefix, see `Assignment`. What has been handed out of a mixed stream differs from it only by the samples that wait
    for their group to fill, so at every micro-batch each source is within `bound` samples of its share, for ever.
    An epoch under `repeat` is as many groups as leave while the stream takes as many samples as the sources hold (one
    at least); the stream goes on from epoch to epoch, and a source that is through begins its next pass in a new order.
    Under `end` every epoch begins anew and ends before any source gives a sample twice.

    names: [k]; class_names: [c]. weights: int64 [k], of 65,536. sizes: int64 [k, c], samples by source and class.
    members: int32 or int64 [num_samples], sample indices by class, then source; offsets: int64 [c k + 1], where each
    such part begins. batch_sizes: int64 [c]. changes: other weights of the run, rising by place; an epoch is as long as
    by the first weights, so that a change moves no epoch. shards: under `locality`, where every pass of a source goes
    through its shards block by block, each source at its own pace; shares, lengths of epochs and states are those of a
    mixture without.
    """

    names: tuple[str, ...]
    weights: Array
    sizes: Array
    members: Array
    offsets: Array
    batch_sizes: Array
    class_names: tuple[str, ...]
    lockstep: int
    tail: Tail
    batches: Batches = "mixed"
    exhausted: Exhausted = "repeat"
    grad_accs: tuple[int, ...] | None = None
    patch_classes: tuple[int, ...] = ()
    shards: SourceShards | None = None
    changes: tuple[WeightChange, ...] = ()

    @property
    def windows(self) -> Windows | None:
        """The moving windows of the sources that are drawn from; None: any sample may come at any time."""
        if self.shards is None:
            return None
        live = np.flatnonzero(self.stretch_shares.any(0)).tolist()
        sizes = np.array([len(self.shards.shards[i]) for i in live], np.int64)
        return Windows(window=self.shards.window, sizes=sizes, run=self.shards.run)

    @cached_property
    def draw(self) -> Draw:
        """The source that each group is drawn from."""
        draw = self._first_draw
        parts, starts = [self._first], [0]
        groups = [self.group_of(change.at) for change in self.changes]
        for number, change in enumerate(self.changes):
            start = draw.place_behind(groups[number])
            kept = sum(begin < start for begin in starts)  # a change at the same group is followed by no sample
            following = groups[number + 1 : number + 2]
            length = self._most_places(following[0] - groups[number]) if following else None
            parts = [*parts[:kept], Assignment(change.weights, length=length)]
            starts = [*starts[:kept], start]
            draw = self._drawn(ChangingAssignment(parts, starts))
        return draw

    @cached_property
    def _first(self) -> Assignment:
        return Assignment(self.weights)

    @cached_property
    def _first_draw(self) -> Draw:
        return self._drawn(self._first)

    def _drawn(self, assignment: AnyAssignment) -> Draw:
        # Not of the run's seed: the length of an epoch must not depend on it.
        split = ClassSplit(self.sizes, derive_key("forebay mixture", MIXTURE_VERSION, "classes"))
        make = MixedDraw if self.batches == "mixed" else PerSourceDraw
        return make(assignment, split, self.batch_sizes, self.lockstep)

    def group_of(self, position: int) -> int:
        """Returns the lockstep group that begins at, or next behind, a micro-batch of the global order."""
        return -(-position // self.lockstep)

    def _most_places(self, groups: int) -> int:
        """Returns how many places of the stream so many groups can need, with all that may wait."""
        if self.batches == "per_source":
            return groups + 1
        sizes = self.batch_sizes * self.lockstep
        return groups * int(sizes.max()) + int(sizes.sum())

    @cached_property
    def num_batches(self) -> int:
        """Micro-batches of one epoch, over all ranks; a multiple of `lockstep`."""
        draw = self._first_draw
        groups = max(draw.groups_once(), 1) if self.exhausted == "repeat" else draw.groups_before_repeat()
        return groups * self.lockstep

    def described(self) -> str:
        return f"{self.num_batches} batches of {len(self.names)} sources"

    @property
    def shares(self) -> Array:
        """float64 [k]: the share of each source at the head of the run, exactly (65,536 is a power of two)."""
        return self.weights / PERIOD

    @property
    def stretch_shares(self) -> Array:
        """float64 [1 + num_changes, k]: the shares at the head of the run and from each change on."""
        return np.stack([self.weights, *(change.weights for change in self.changes)]) / PERIOD

    def shares_until(self, end: int) -> Array:
        """Returns the mean shares of the first `end` micro-batches of a run, float64 [k]; of none those of its head."""
        starts = [0, *(self.group_of(change.at) * self.lockstep for change in self.changes)]
        lengths = np.diff(np.minimum([*starts, max(end, 1)], max(end, 1)))
        mean: Array = lengths @ self.stretch_shares / lengths.sum()
        return mean

    @property
    def revisions(self) -> tuple[tuple[int, str], ...]:
        """The changes made to a run that has begun: the micro-batch of each, and its weights in one word."""
        found = [change for change in self.changes if change.is_revision]
        return tuple((each.at, xxhash.xxh3_64_hexdigest(each.weights.data)) for each in found)

    @property
    def bound(self) -> int:
        """How far a source can be from its share of what was handed out: samples or, if `per_source`, micro-batches.

        `mixed`: less than 1 + the samples that can wait, one group less one sample for each class; with one class and
        counted at any sample inside a batch: 1. `per_source`: one group. Each change of weights adds what is rounded,
        and the share that moves of what waits then.
        """
        shares = self.stretch_shares
        if self.batches == "per_source":
            return self.lockstep * len(shares)
        used = self.sizes[shares.any(0)].sum(0) > 0
        waiting = int((self.batch_sizes[used] * self.lockstep - 1).sum()) if used.sum() > 1 else 0
        moved = float(np.abs(np.diff(shares, axis=0)).max(axis=1, initial=0).sum())
        return len(shares) + math.ceil(waiting * (1 + moved))

    def order(self, seed: int, epoch: int) -> MixtureOrder:
        return MixtureOrder(self, seed=seed, epoch=epoch)

    def sample_weights(self, end: int = 0) -> Array:
        """Returns the share of all samples that each sample is to get, float64 [num_samples]; all of a source alike.

        end: of the first so many micro-batches of the run; 0: by the weights at its head.
        Of `per_source`, shares are of micro-batches, and those of another source may hold more samples.
        """
        sizes = self.sizes.sum(1)
        shares = self.shares_until(end)
        if self.batches == "per_source":
            shares = shares * sizes / np.maximum((self.sizes / self.batch_sizes).sum(1), 1e-300)
            shares = shares / shares.sum()
        each = shares / np.maximum(sizes, 1)
        weights = np.empty(len(self.members))
        for cell, (start, end) in enumerate(itertools.pairwise(self.offsets.tolist())):
            weights[self.members[start:end]] = each[cell % len(self.names)]
        return weights


def mixture_plan(
    plan: BucketPlan,
    source_of: Array,
    *,
    names: Sequence[str],
    weights: Sequence[float],
    batches: Batches = "mixed",
    exhausted: Exhausted = "repeat",
) -> MixturePlan:
    """Returns the mixture of the sources over the buckets of a plan of all their samples.

    source_of: integers [num_samples], the source of each sample. weights: [num_sources], of any scale; a source of
    weight 0, or one that is quantised to 0, is left out.
    Raises PlanError for weights that are none, a source with a weight and no samples, and, under `end`, where a source
    is through before one group is full.
    """
    quantised = quantise(weights)
    if len(weights) != len(names) or len(source_of) != len(plan.members):
        raise PlanError(
            f"a mixture of {len(names)} names has {len(weights)} weights, and sources of {len(source_of)} samples for "
            f"the plan's {len(plan.members)}"
        )
    members, sizes = _cells(plan, source_of, len(names))
    for number in np.flatnonzero((quantised > 0) & (sizes.sum(1) == 0))[:1].tolist():
        raise PlanError(
            f"source {names[number]!r} of the mixture has weight {weights[number]} and no samples; leave it out",
            code="FB116",
        )
    made = MixturePlan(
        names=tuple(names),
        weights=quantised,
        sizes=sizes,
        members=members,
        offsets=np.concatenate(([0], np.cumsum(sizes.T.ravel()))),
        batch_sizes=plan.batch_sizes,
        class_names=tuple(plan.names),
        lockstep=plan.lockstep,
        tail=plan.tail,
        batches=batches,
        exhausted=exhausted,
        grad_accs=plan.grad_accs,
        shards=None if plan.shard_counts is None else _source_shards(plan, source_of, len(names)),
    )
    if made.num_batches == 0:
        raise _ends_at_once(made)
    return made


def _ends_at_once(plan: MixturePlan) -> PlanError:
    samples, weights = plan.sizes.sum(1), plan.weights
    smallest = int(np.argmin(np.where(weights > 0, samples / np.maximum(weights, 1), np.inf)))
    return PlanError(
        'mixture.exhausted = "end" leaves no batch: '
        f"{plan.names[smallest]!r}, of {samples[smallest]} samples, is through before {plan.lockstep} batches "
        f"(plan.lockstep) of {_range(plan.batch_sizes)} samples of one bucket are full; lower plan.lockstep, give "
        'fewer edges, or set mixture.exhausted = "repeat"',
        code="FB116",
    )


def _range(values: Array) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _cells(plan: BucketPlan, source_of: Array, num_sources: int) -> tuple[Array, Array]:
    """Returns the samples by class, then source, and their numbers, int64 [num_sources, num_classes]."""
    num_classes = len(plan.batch_sizes)
    members = np.empty_like(plan.members)
    sizes = np.zeros((num_sources, num_classes), np.int64)
    for bucket in range(num_classes):
        part = slice(int(plan.offsets[bucket]), int(plan.offsets[bucket + 1]))
        own = plan.members[part]
        sources = source_of[own]
        sizes[:, bucket] = np.bincount(sources, minlength=num_sources)
        # Small unsigned integers: numpy sorts them stably by radix.
        members[part] = own[np.argsort(sources.astype(np.uint16), kind="stable")]
    return members, sizes


def _source_shards(plan: BucketPlan, source_of: Array, num_sources: int) -> SourceShards:
    assert plan.shard_counts is not None
    assert plan.locality_shards is not None
    count, found = len(plan.shard_counts), []
    for bucket, (start, end) in enumerate(itertools.pairwise(plan.offsets.tolist())):
        lying = np.repeat(np.arange(count), plan.shard_counts[:, bucket])
        found.append(np.unique(source_of[plan.members[start:end]] * np.int64(count) + lying, return_counts=True))
    pairs = np.unique(np.concatenate([own for own, _ in found]))
    counts = np.zeros((len(pairs), len(found)), np.int64)
    for bucket, (own, samples) in enumerate(found):
        counts[np.searchsorted(pairs, own), bucket] = samples
    cuts = np.searchsorted(pairs, np.arange(1, num_sources) * count)
    return SourceShards(
        window=plan.locality_shards,
        run=plan.shard_run,
        shards=np.split(pairs % count, cuts),
        counts=np.split(counts, cuts),
    )


MIXTURE_VERSION = 1
"""Bumped when the same mixture, seed, epoch and position give other samples."""
_MAX_LINES = 256
"""Passes whose permutations are kept: a tiny source of large weight goes through many in one batch."""


class MixtureOrder(EpochOrder):
    """One epoch of a mixture: a function of (plan, seed, epoch, position) and nothing else.

    Each cell (source, class) has a line of its samples, put in order by a keyed permutation, another one each pass.
    Under `end`, an epoch is one pass. Under `locality` the lines of a source go through its shards block by block, the
    shards in a keyed order of the pass. All sources take it from one order: those that lie in the same shards and go at
    the same pace read them together.
    """

    def __init__(self, plan: MixturePlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer)."""
        check_epoch(epoch)
        self.plan, self.seed, self.epoch = plan, seed, epoch
        goes_on = plan.exhausted == "repeat"
        self._first_group = epoch * (plan.num_batches // plan.lockstep) if goes_on else 0
        self._lines: dict[int, Permutations] = {}
        self._shard_lines: dict[tuple[int, int], ShardLine] = {}

    def __len__(self) -> int:
        return self.plan.num_batches

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        different, back = np.unique(self._locate(positions)[0], return_inverse=True)
        found: Ints = self.plan.draw.classes(different)[back]
        return found

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        groups, inside = self._locate(positions)
        if not len(groups):
            return []
        drawn = self.plan.draw.batches(groups, inside)
        samples = self._samples(drawn.sources, drawn.classes, drawn.ordinals)
        found, end = [], 0
        while end < len(samples):
            size = int(self.plan.batch_sizes[drawn.classes[end]])
            found.append(samples[end : end + size])
            end += size
        return found

    def drawn(self, position: int) -> Ints:
        """Returns the samples of each source in this epoch before `position` (0 to len), int64 [num_sources]."""
        counted: Ints = (self._cells(position) - self._cells(0)).sum(1)
        return counted

    def repeated(self, position: int) -> int:
        """Returns how many samples before `position`, since the head of the stream, came in an earlier pass already."""
        return int(np.maximum(self._cells(position) - self.plan.sizes, 0).sum())

    def _cells(self, position: int) -> Ints:
        if not 0 <= position <= len(self):
            raise IndexError(f"position {position} is outside of the epoch's {len(self)} micro-batches")
        group, inside = divmod(position, self.plan.lockstep)
        return self.plan.draw.cells(self._first_group + group, inside)

    def _locate(self, positions: Sequence[int] | Array) -> tuple[Ints, Ints]:
        groups, inside = np.divmod(checked_positions(positions, len(self)), self.plan.lockstep)
        return groups + self._first_group, inside

    def _samples(self, sources: Ints, classes: Ints, ordinals: Ints) -> Ints:
        cells = classes * len(self.plan.names) + sources
        passes, places = np.divmod(ordinals, self.plan.sizes[sources, classes])
        found = np.empty_like(places)
        if self.plan.shards is not None:
            for number, source in np.unique(np.stack([passes, sources], 1), axis=0).tolist():
                chosen = (passes == number) & (sources == source)
                found[chosen] = self._shard_line(self.plan.shards, number, source)(classes[chosen], places[chosen])
            in_shards: Ints = self.plan.members[found].astype(np.int64)
            return in_shards
        for number in np.unique(passes).tolist():
            chosen = passes == number
            found[chosen] = self._line(number)(places[chosen], member=cells[chosen])
        samples: Ints = self.plan.members[self.plan.offsets[cells] + found].astype(np.int64)
        return samples

    def _line(self, number: int) -> Permutations:
        if number not in self._lines:
            if len(self._lines) >= _MAX_LINES:
                self._lines.clear()
            self._lines[number] = Permutations(np.diff(self.plan.offsets).tolist(), self._key(number, "samples"))
        return self._lines[number]

    def _shard_line(self, shards: SourceShards, number: int, source: int) -> ShardLine:
        if (number, source) not in self._shard_lines:
            if len(self._shard_lines) >= _MAX_LINES + 2 * len(self.plan.names):
                self._shard_lines.clear()
            own = shards.shards[source]
            last = int(max(map(np.max, filter(len, shards.shards))))
            every = Permutations([last // shards.run + 1], self._key(number, "shards"))
            self._shard_lines[number, source] = ShardLine(
                shards.counts[source],
                self.plan.offsets[source : -1 : len(self.plan.names)],
                shards=np.argsort(every(own // shards.run), kind="stable"),
                window=shards.window,
                key=self._key(number, "shard lines", source),
            )
        return self._shard_lines[number, source]

    def _key(self, number: int, *purpose: object) -> int:
        turn = number if self.plan.exhausted == "repeat" else self.epoch
        return derive_key("forebay mixture", MIXTURE_VERSION, self.seed, turn, *purpose)
