"""The batches of a plan without its shuffle: what `shuffle = False` and evaluations read, in the order of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.interface import EpochOrder, Plan, Tail, check_epoch, checked_positions, in_batches, places_of
from forebay.plan.make import Planned
from forebay.plan.names import without_shuffle
from forebay.plan.pack.pack_plan import PackPlan
from forebay.plan.window import WindowPlan, greedy_cut
from forebay.store.layout import Array, Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InOrderPlan:
    """Micro-batches in the order of their first samples; the same at every seed and epoch.

    members: int64, sample indices batch by batch. offsets: int64 [num_batches + 1]; batch b holds
    members[offsets[b] : offsets[b + 1]]. classes: int64 [num_batches], the shape class of each. tail: `split` or
    `short`, so that every sample counts exactly once.
    """

    members: Ints
    offsets: Ints
    classes: Ints
    tail: Tail
    grad_accs: tuple[int, ...] | None = None
    patch_classes: tuple[int, ...] = ()

    @property
    def num_batches(self) -> int:
        return len(self.classes)

    @property
    def lockstep(self) -> int:
        """1: neighbours are of any shapes."""
        return 1

    def order(self, seed: int, epoch: int) -> InOrder:  # noqa: ARG002
        check_epoch(epoch)
        return InOrder(self)

    def described(self) -> str:
        return f"{self.num_batches} batches in the order of the cache"


class InOrder(EpochOrder):
    """Any epoch of an `InOrderPlan`."""

    def __init__(self, plan: InOrderPlan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.num_batches

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        where, plan = checked_positions(positions, len(self)), self.plan
        bounds = zip(plan.offsets[where].tolist(), plan.offsets[where + 1].tolist(), strict=True)
        return [plan.members[start:end] for start, end in bounds]

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        found: Ints = self.plan.classes[checked_positions(positions, len(self))]
        return found


def in_order(planned: Planned, *, parts: Array | None = None, whole: bool = False) -> Planned:
    """Returns a plan's batches without its shuffle, with a key of their own.

    Every sample of the plan is in exactly one batch. Buckets: the samples of a bucket, in the order of the cache, are
    cut into its batches. Windows: the samples of the cache are cut into windows, sorted by length in each. Packs stay
    as they are. Batches come in the order of their first samples. The last batch of a bucket is short, whatever
    `plan.tail` says.
    parts: integers [num_samples], which source each sample is of, where no batch may hold samples of two. whole: the
    last step is not dealt over the ranks, so that what a model makes of a batch is the same on any number of them.
    """
    key = without_shuffle(planned.key, by_part=parts is not None)
    tail: Tail = "short" if whole or planned.plan.tail == "short" else "split"
    return Planned(plan=_in_order(planned.plan, parts, tail), key=key)


def _in_order(plan: Plan, parts: Array | None, tail: Tail) -> InOrderPlan:
    pieces = list(_pieces(plan, parts))
    members = np.concatenate([samples for samples, _, _ in pieces])
    sizes = np.concatenate([sizes for _, sizes, _ in pieces])
    classes = np.repeat([number for _, _, number in pieces], [len(sizes) for _, sizes, _ in pieces]).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    order = np.argsort(np.minimum.reduceat(members, starts), kind="stable")
    sizes = sizes[order]
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    kept = {"members": members[places_of(starts[order], sizes)], "offsets": offsets, "classes": classes[order]}
    return InOrderPlan(**kept, tail=tail, grad_accs=plan.grad_accs, patch_classes=plan.patch_classes)


def _pieces(plan: Plan, parts: Array | None) -> Iterator[tuple[Ints, Ints, int]]:
    """Yields samples batch by batch, the sizes of these batches, and their shape class."""
    if isinstance(plan, PackPlan):
        yield plan.members_at(np.arange(len(plan.members))), np.diff(plan.offsets).astype(np.int64), 0
    elif isinstance(plan, WindowPlan):
        yield from _windows(plan)
    elif isinstance(plan, BucketPlan):
        for bucket, size in enumerate(plan.batch_sizes.tolist()):
            own = np.sort(plan.members_at(np.arange(plan.offsets[bucket], plan.offsets[bucket + 1])))
            groups = [own] if parts is None else [own[parts[own] == part] for part in np.unique(parts[own])]
            for group in groups:
                if len(group):
                    yield group, _cut(len(group), size), bucket
    else:
        raise PlanError(f"a {type(plan).__name__} has no order without its shuffle")


def _windows(plan: WindowPlan) -> Iterator[tuple[Ints, Ints, int]]:
    """Yields the windows of a cache's samples, each sorted by length and cut."""
    count = len(plan.members)
    ranks = np.empty(count, np.int64)
    ranks[plan.members_at(np.arange(count))] = np.arange(count)
    width = plan.batch_size * plan.batches_per_window if plan.batch_size else -(-count // plan.num_windows)
    for start in range(0, count, width):
        own = np.sort(ranks[start : start + width])
        if plan.batch_size:
            sizes = _cut(len(own), plan.batch_size)
        else:
            lengths = plan.lengths_at(own).tolist()
            bounds = greedy_cut(lengths.__getitem__, len(own), budget=plan.budget or 0, limit=len(own) + 1)
            sizes = np.diff(bounds).astype(np.int64)
        samples = plan.members_at(own)
        for place, batch in enumerate(in_batches(samples, sizes)):
            yield np.sort(batch), np.array([len(batch)]), place


def _cut(count: int, size: int) -> Ints:
    """Returns the sizes of the batches of `count` samples: all of `size`, but for the last."""
    sizes = np.full(-(-count // size), size, np.int64)
    sizes[-1] = count - (len(sizes) - 1) * size
    return sizes
