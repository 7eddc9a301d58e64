"""A plan of buckets and its order: which samples share a length range, and which micro-batch stands at which position.

An epoch is one sequence of micro-batches, the same for every world size. Its first part holds the full lockstep groups
(`lockstep` batches of one bucket each) of all buckets under one keyed permutation: at every place the next group falls
to a bucket in proportion to the full groups that the bucket still has. Its last part holds the incomplete groups, at
most one a bucket, in keyed order. The incomplete groups stand last because a shorter group anywhere else would shift
all later groups against the ranks' steps: so a world size that divides `lockstep` never mixes buckets before that last
part. Cells are many, and so are their incomplete groups: there the last part is cut into groups of `lockstep` batches
of like cost. Any position is computed at once: nothing that came before is replayed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np

from forebay.config.plan import BucketConfig, BucketRange, PlanConfig, bucket_ranges
from forebay.errors import ConfigError, PlanError
from forebay.plan.interface import EpochOrder, KeptPlan, Tail, check_epoch, checked_positions, in_batches, places_of
from forebay.plan.permutation import Permutations, derive_key
from forebay.plan.shard_line import ShardLine, in_runs
from forebay.store.layout import Array, Ints
from forebay.visible import an


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketPlan(KeptPlan):
    """Samples in buckets, and the rules by which `Order` makes micro-batches of them. No seed, no epoch: one for all.

    members: int32 (int64 from 2^31 samples on) [num_samples], sample indices bucket by bucket, rising inside one; under
    `locality_shards` shard by shard inside a bucket.
    offsets: int64 [num_buckets + 1]; bucket b holds members[offsets[b] : offsets[b + 1]].
    batch_sizes: int64 [num_buckets], samples a micro-batch. grad_accs: micro-batches an optimizer step, where a
    calibration says so.
    edges_s: the upper edges; sample_rate_hz: of the durations that the plan was made from.
    edges: upper edges, in tokens, of the buckets of samples without audio, which come behind the others.
    cells: upper edges, in tokens, of the cells of each range of seconds, which are buckets then; (): seconds alone.
    shapes: of the samples of each bucket, where a bucket is a shape.
    token_cost: of a label token beside a second's audio samples, for the cost of a cell.
    shard_counts: int32 [num_shards, num_buckets], samples of each, with `locality_shards`, the shards of the moving
    window. shard_run: consecutive shards that stay together in it, see `shard_run`.
    """

    members: Array
    offsets: Array
    batch_sizes: Array
    edges_s: tuple[float, ...]
    sample_rate_hz: int
    lockstep: int
    tail: Tail
    grad_accs: tuple[int, ...] | None = None
    shard_counts: Array | None = None
    locality_shards: int | None = None
    shard_run: int = 1
    edges: tuple[int, ...] = ()
    cells: tuple[tuple[int, ...], ...] = ()
    shapes: tuple[str, ...] = ()
    token_cost: int = 0
    check: Callable[[Ints], None] | None = None

    def order(self, seed: int, epoch: int) -> Order:
        kind = Order if self.shard_counts is None else ShardOrder
        return kind(self, seed=seed, epoch=epoch)

    @property
    def bucket_sizes(self) -> Array:
        """int64 [num_buckets], samples a bucket."""
        sizes: Array = np.diff(self.offsets)
        return sizes

    @property
    def ranges(self) -> list[BucketRange]:
        """The lengths that each bucket holds."""
        return bucket_ranges(self.edges_s, cells=self.cells, edges=self.edges, shapes=self.shapes)

    @property
    def names(self) -> list[str]:
        """The name of each bucket, by which a calibration calls it."""
        return [found.name(bucket) for bucket, found in enumerate(self.ranges)]

    @property
    def sample_costs(self) -> Array:
        """float64 [num_buckets], a sample that is padded to the upper edges, in audio samples."""
        ranges = self.ranges
        seconds = [0.0 if found.seconds is None else found.seconds[1] for found in ranges]
        tokens = [0 if found.tokens is None else found.tokens[1] for found in ranges]
        costs: Array = np.rint(np.array(seconds) * self.sample_rate_hz) + self.token_cost * np.array(tokens)
        return costs

    @property
    def batch_counts(self) -> Array:
        """int64 [num_buckets], micro-batches of each bucket in one epoch; under `drop` only full ones."""
        counts: Array = np.asarray(self.bucket_sizes // self.batch_sizes)
        if self.tail != "drop":
            counts = counts + (self.bucket_sizes % self.batch_sizes > 0)
        return counts

    @property
    def num_batches(self) -> int:
        return int(self.batch_counts.sum())

    def described(self) -> str:
        if not self.shapes:
            return f"{self.num_batches} batches in {len(self.batch_sizes)} buckets"
        short = 0 if self.tail in ("drop", "pad") else np.count_nonzero(self.bucket_sizes % self.batch_sizes)
        left = {"short batches": short, "samples left out": self.dropped.sum(), "repeated": self.repeated.sum()}
        counted = "".join(f", {count} {what}" for what, count in left.items() if count)
        return f"{self.num_batches} batches of {len(self.batch_sizes)} shapes{counted}"

    @property
    def dropped(self) -> Array:
        """int64 [num_buckets], samples that an epoch leaves out under `drop`: other ones each epoch."""
        rest: Array = self.bucket_sizes % self.batch_sizes
        return rest if self.tail == "drop" else np.zeros_like(rest)

    @property
    def repeated(self) -> Array:
        """int64 [num_buckets], samples taken a second time to fill the incomplete batch; above 0 under `pad` only."""
        missing: Array = -self.bucket_sizes % self.batch_sizes
        return missing if self.tail == "pad" else np.zeros_like(missing)

    def arrays(self) -> dict[str, Array]:
        kept = {"members": self.members, "offsets": self.offsets, "batch_sizes": self.batch_sizes}
        return kept if self.shard_counts is None else {**kept, "shard_counts": self.shard_counts}

    def counts(self) -> dict[str, int]:
        rate, samples = self.sample_rate_hz, len(self.members)
        return {"sample_rate_hz": rate, "num_samples": samples, "num_batches": self.num_batches}

    def figures(self, settings: PlanConfig) -> dict[str, Any]:
        run: dict[str, Any] = {} if self.shard_run == 1 else {"shard_run": self.shard_run}
        if self.cells:
            run["cells"] = [list(own) for own in self.cells]
        if self.shapes:
            run["shapes"] = list(self.shapes)
        if self.edges or self.cells:
            return {"edges_s": list(self.edges_s), "edges": list(self.edges), **run}
        return {"edges_s": list(self.edges_s)} if isinstance(settings, BucketConfig) and settings.k is not None else {}

    @classmethod
    def restored(cls, kept: dict[str, Any], *, metadata: Mapping[str, Any], settings: BucketConfig) -> Self:
        edges: dict[str, Any] = {
            "edges_s": tuple(metadata["edges_s"]) if "edges_s" in metadata else settings.edges_s,
            "edges": tuple(metadata.get("edges", ())),
            "cells": tuple(map(tuple, metadata.get("cells", ()))),
            "shapes": tuple(metadata.get("shapes", ())),
        }
        return cls(
            **kept,
            **edges,
            sample_rate_hz=metadata["sample_rate_hz"],
            token_cost=token_cost(settings, metadata["sample_rate_hz"]),
            lockstep=settings.lockstep,
            tail=settings.tail,
            grad_accs=grad_accs(settings, bucket_ranges(**edges)),
            locality_shards=settings.locality_shards,
            shard_run=metadata.get("shard_run", 1),
        )


def shuffled_buckets(plan: BucketPlan, *, seed: int) -> list[Array]:
    """Returns the sample indices of every bucket, int64, in the order in which a shuffle of all samples has them."""
    count = len(plan.members)
    owners = np.empty(count, dtype=np.int64)
    owners[plan.members_at(np.arange(count))] = np.repeat(np.arange(len(plan.batch_sizes)), plan.bucket_sizes)
    line = Permutations([count], derive_key("forebay bucket manifests", seed))(np.arange(count))
    return np.split(line[np.argsort(owners[line], kind="stable")], plan.offsets[1:-1])


ORDER_VERSION = 1
"""Bumped when the same plan, seed, epoch and position give other samples."""


class Order(EpochOrder):
    """One epoch of a plan: a function of (plan, seed, epoch, position) and nothing else. Costs O(buckets) to make.

    Inside a bucket a keyed permutation, another one each epoch, puts the samples in line; batch i of the bucket takes
    places i * batch_size on. The last, incomplete batch of a bucket, by `plan.tail`: `short` has the fewer samples that
    are left; `drop` leaves it out; `pad` fills it with the samples at the head of the bucket's line, which come twice.
    """

    __slots__ = (
        "_bucket_sizes",
        "_group_offsets",
        "_groups",
        "_lines",
        "_tail_buckets",
        "_tail_numbers",
        "epoch",
        "plan",
        "seed",
    )

    def __init__(self, plan: BucketPlan, *, seed: int, epoch: int) -> None:
        """Makes the order of epoch `epoch` (0 or more) under `seed` (any integer)."""
        check_epoch(epoch)
        self.plan, self.seed, self.epoch = plan, seed, epoch
        counts = plan.batch_counts
        self._group_offsets = np.concatenate(([0], np.cumsum(counts // plan.lockstep)))
        self._groups = Permutations([int(self._group_offsets[-1])], self._key("groups"))
        self._bucket_sizes = plan.bucket_sizes
        self._lines = Permutations(self._bucket_sizes.tolist(), self._key("samples"))
        self._tail_buckets, self._tail_numbers = self._tail(counts)

    def __len__(self) -> int:
        return int(self._group_offsets[-1]) * self.plan.lockstep + len(self._tail_buckets)

    def buckets(self, positions: Sequence[int] | Array) -> Ints:
        return self.locate(positions)[0]

    def batches(self, positions: Sequence[int] | Array) -> list[Ints]:
        buckets, numbers = self.locate(positions)
        sizes = self.batch_lengths(buckets, numbers)
        places = places_of(numbers * self.plan.batch_sizes[buckets], sizes)
        return in_batches(self.samples(np.repeat(buckets, sizes), places), sizes)

    def batch_lengths(self, buckets: Ints, numbers: Ints) -> Ints:
        """Returns how many samples the micro-batches `numbers` of `buckets` have, int64."""
        sizes: Ints = self.plan.batch_sizes[buckets]
        return sizes if self.plan.tail == "pad" else np.minimum(sizes, self._bucket_sizes[buckets] - numbers * sizes)

    def samples(self, buckets: Ints | int, places: Ints) -> Ints:
        """Returns the sample indices, int64, that stand at `places` in the epoch's lines of `buckets`.

        A place behind the end of its line counts from its head again (this is how `pad` fills a batch).
        """
        lines = self._lines(places % self._bucket_sizes[buckets], member=buckets)
        return self.plan.members_at(self.plan.offsets[buckets] + lines)

    def locate(self, positions: Sequence[int] | Array) -> tuple[Ints, Ints]:
        """Returns bucket and number inside the bucket of each micro-batch."""
        where = checked_positions(positions, len(self))
        buckets, numbers = np.empty_like(where), np.empty_like(where)
        first = int(self._group_offsets[-1]) * self.plan.lockstep
        in_tail = where >= first
        slots, inside = np.divmod(where[~in_tail], self.plan.lockstep)
        owners, groups = self._full_groups(slots)
        buckets[~in_tail] = owners
        numbers[~in_tail] = groups * self.plan.lockstep + inside
        late = where[in_tail] - first
        buckets[in_tail], numbers[in_tail] = self._tail_buckets[late], self._tail_numbers[late]
        return buckets, numbers

    def _tail(self, counts: Ints) -> tuple[Ints, Ints]:
        """Returns bucket and number inside the bucket of the micro-batches behind the full groups.

        counts: int64 [num_buckets], micro-batches of each bucket.
        """
        incomplete = np.flatnonzero(counts % self.plan.lockstep)
        if not self.plan.cells:
            incomplete = incomplete[self._tail_places(len(incomplete))]
        sizes = counts[incomplete] % self.plan.lockstep
        buckets, numbers = np.repeat(incomplete, sizes), places_of(counts[incomplete] - sizes, sizes)
        if not self.plan.cells:
            return buckets, numbers
        # Groups of batches of like cost, in keyed order; the one that is not full stays last.
        costs = self.plan.sample_costs[buckets] * self.batch_lengths(buckets, numbers)
        full, rest = divmod(len(buckets), self.plan.lockstep)
        line = np.argsort(costs, kind="stable")
        groups = line[rest:].reshape(full, self.plan.lockstep)[self._tail_places(full)]
        line = np.concatenate((groups.ravel(), line[:rest]))
        return buckets[line], numbers[line]

    def _tail_places(self, count: int) -> Ints:
        return Permutations([count], self._key("tail"))(np.arange(count))

    def _full_groups(self, slots: Ints) -> tuple[Ints, Ints]:
        """Returns bucket and number inside the bucket of the full lockstep groups that stand at `slots`."""
        groups = self._groups(slots)
        owners = np.searchsorted(self._group_offsets, groups, side="right") - 1
        return owners, groups - self._group_offsets[owners]

    def _key(self, purpose: str) -> int:
        return derive_key("forebay order", ORDER_VERSION, self.seed, self.epoch, purpose)


class ShardOrder(Order):
    """One epoch of a plan with `locality_shards` = N, for disks where every new shard is slow.

    Costs O(shards * buckets) to make, nothing a sample.

    The shards (in runs, where their samples list the same items), in a keyed order of their own each epoch, form blocks
    of N / 2. A bucket's line goes through the blocks one after the other, and is shuffled inside each. A lockstep group
    belongs to the block in which its first sample lies; the epoch takes the groups block by block, inside a block by a
    keyed permutation. A group may end in the next block: its samples lie in N shards at most, and the window moves on
    by N / 2. (The groups of a bucket too rare to fill one in a block reach over several, and so do the incomplete
    groups at the epoch's end.)
    """

    def __init__(self, plan: BucketPlan, *, seed: int, epoch: int) -> None:
        super().__init__(plan, seed=seed, epoch=epoch)
        assert plan.shard_counts is not None
        assert plan.locality_shards is not None
        self._shard_line = ShardLine(
            plan.shard_counts,
            plan.offsets[:-1],
            shards=in_runs(len(plan.shard_counts), run=plan.shard_run, key=self._key("shards")),
            window=plan.locality_shards,
            key=self._key("lines"),
        )
        sizes = plan.batch_sizes * plan.lockstep
        self._first_groups = np.minimum(-(-self._shard_line.block_starts // sizes), np.diff(self._group_offsets))
        per_block = np.diff(self._first_groups, axis=0)
        self._group_starts = np.concatenate(([0], np.cumsum(per_block.sum(axis=1))))
        self._block_groups = Permutations(np.diff(self._group_starts), self._key("groups"))

    def samples(self, buckets: Ints | int, places: Ints) -> Ints:
        """Returns the sample indices, int64, that stand at `places` in the epoch's lines of `buckets`."""
        return self.plan.members_at(self._shard_line(buckets, places % self._bucket_sizes[buckets]))

    def _full_groups(self, slots: Ints) -> tuple[Ints, Ints]:
        blocks = np.searchsorted(self._group_starts, slots, side="right") - 1
        inside = self._block_groups(slots - self._group_starts[blocks], member=blocks)
        # The groups of a block stand bucket by bucket.
        per_bucket = self._first_groups[blocks + 1] - self._first_groups[blocks]
        ends = np.cumsum(per_bucket, axis=1)
        owners: Ints = (inside[:, None] >= ends).sum(axis=1)
        one = np.arange(len(slots))
        return owners, self._first_groups[blocks, owners] + inside - (ends - per_bucket)[one, owners]


def token_cost(settings: BucketConfig, sample_rate_hz: int) -> int:
    """Returns the audio samples that a label token counts as; 0 where buckets are of one length."""
    return round(Fraction(repr(settings.token_s)) * sample_rate_hz) if settings.has_cells else 0


def grad_accs(settings: BucketConfig, ranges: Sequence[BucketRange]) -> tuple[int, ...] | None:
    """Returns the micro-batches an optimizer step of each bucket, where a calibration file says so, else None."""
    if settings.calibration is None:
        return None
    return tuple(entry["grad_acc"] for entry in calibrated(settings.calibration, ranges))


def calibrated(path: str, ranges: Sequence[BucketRange]) -> list[dict[str, int]]:
    """Returns `batch_size` and `grad_acc` of every bucket of a calibration file, which calls it by name or index.

    ranges: of the plan's buckets; cells have no index, which a file of another number of axes has too. Raises
    PlanError, naming the file and what differs, where its buckets are not these.
    """
    table, names = read_calibration(path), [found.name(bucket) for bucket, found in enumerate(ranges)]
    has_cells = any(each.seconds and each.tokens for each in ranges)
    found: dict[int, str] = {}
    unknown = []
    for written in table:
        bucket = names.index(written) if written in names else None if has_cells else _index(written, len(names))
        if bucket is None:
            unknown.append(written)
        elif bucket in found:
            raise PlanError(
                f"plan.calibration {path}: {found[bucket]} and {written} are one bucket; leave one of them out",
                code="FB505",
            )
        else:
            found[bucket] = written
    missing = [name for bucket, name in enumerate(names) if bucket not in found]
    if missing or unknown:
        indices = "by name, as plan.by has tokens" if has_cells else f"or their indices 0 to {len(names) - 1}"
        raise PlanError(
            f"plan.calibration {path} is of other buckets: "
            f"missing {', '.join(missing) or 'none'}; unknown {', '.join(map(repr, unknown)) or 'none'}; wanted "
            f"{', '.join(names)}, {indices}: calibrate these buckets",
            code="FB505",
        )
    return [table[found[bucket]] for bucket in range(len(names))]


def _index(written: str, num_buckets: int) -> int | None:
    """Returns the bucket that an index of at most nine digits stands for, None where there is no such bucket."""
    is_index = written.isascii() and written.isdecimal() and len(written) < 10
    return int(written) if is_index and int(written) < num_buckets else None


def read_calibration(path: str) -> dict[str, dict[str, int]]:
    """Returns the content of a calibration file, `{bucket: {"batch_size", "grad_acc"}}`; `grad_acc` is 1 if left out.

    Other fields of a bucket (what was measured) are not read. Raises ConfigError naming file, bucket and value.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as err:
        raise ConfigError(f"plan.calibration: cannot read {path}: {err.strerror}", code="FB505") from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"plan.calibration: {path} is not JSON: {err}", code="FB505") from err
    if not isinstance(document, dict):
        raise ConfigError(f"plan.calibration: {path} holds {an(type(document).__name__)}, {_WANTED}", code="FB505")
    return {bucket: _entry(path, bucket, entry) for bucket, entry in document.items()}


_WANTED = 'wanted {"b_0_3": {"batch_size": 40, "grad_acc": 1}, ...}, one entry a bucket, by name or index'


def _entry(path: str, bucket: str, entry: Any) -> dict[str, int]:
    if not isinstance(entry, dict):
        raise ConfigError(f"plan.calibration: {path}: bucket {bucket} is {entry!r}, {_WANTED}", code="FB505")
    values = {"batch_size": entry.get("batch_size"), "grad_acc": entry.get("grad_acc", 1)}
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"plan.calibration: {path}: bucket {bucket}: {name} is {value!r}, wanted 1 or more", code="FB505"
            )
    return values
