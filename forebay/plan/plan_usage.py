"""The samples that a run has used: counted from the plan's order, for all ranks at once, between two loader states.

Which samples all ranks together were handed out between two states is a function of (plan, seed, the states, the world
size). So nothing is gathered and nothing is counted step by step: counting costs a run nothing, and a resumed run
counts nothing twice. The usage log that a run keeps on disk is JSON lines, a head first: a training run writes the log,
and `forebay inspect --usage` reads it. `Drawn` holds the shape classes of a run against what its plan says.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from forebay.errors import CacheCorruptError, CacheMismatchError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.cursor import LoaderState, num_steps
from forebay.plan.interface import EpochOrder, Plan
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.plan.pack.pack_plan import PackPlan
from forebay.plan.window import WindowPlan
from forebay.store.layout import ROW_BITS, Array, Ints
from forebay.store.source import SampleSource, SourceUnion
from forebay.visible import an

_CHUNK = 4096
"""Micro-batches whose samples are looked at in one go."""
COLUMNS = ("part", "language", "source")
"""What samples are counted by, where it is known: the cache of `[[mixture.source]]`, and text fields."""


@runtime_checkable
class Weighted(Protocol):
    """A plan that does not take every sample equally often; mixtures do not."""

    def sample_weights(self, end: int = 0) -> Array:
        """Returns how often each sample comes, in proportion to the others, float64 [num_samples].

        end: of the first so many micro-batches of the run.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """The samples that can be used. Arrays are int [num_samples].

    names, codes: by field of `COLUMNS`, the different values and which one each sample has; an empty value is
    `unknown`.
    shards: the number of the shard that holds each sample; None where nothing is sharded.
    """

    num_samples: int
    names: Mapping[str, list[str]]
    codes: Mapping[str, Array]
    shards: Array | None

    @property
    def shard_sizes(self) -> Array:
        """int64 [num_shards], samples a shard; empty where nothing is sharded."""
        return np.zeros(0, np.int64) if self.shards is None else np.bincount(self.shards)

    def sizes(self, column: str) -> Array:
        """Returns the samples of each value of a field, int64 [num_values]."""
        return np.bincount(self.codes[column], minlength=len(self.names[column]))


def population(source: SampleSource) -> Population:
    """Returns what a source holds. Reads the text fields among `COLUMNS` once."""
    names, codes = {}, {}
    for column in COLUMNS:
        if column == "part":
            found = (source.names, source.source_of) if isinstance(source, SourceUnion) else None
        else:
            found = source.categories(column)
        if found is not None:
            names[column], codes[column] = [name or "unknown" for name in found[0]], found[1]
    shards = None if source.slots is None else source.slots >> ROW_BITS
    return Population(num_samples=len(source), names=names, codes=codes, shards=shards)


def expected_shares(population: Population, plan: Plan, column: str, *, end: LoaderState | None = None) -> Array:
    """Returns the share of all samples that each value of a field is to get, float64 [num_values].

    That of a mixture where the plan is one, up to the state `end` of a loader, else the one that it has in the data.
    """
    done = 0 if end is None else end.epoch * plan.num_batches + end.position
    weights = plan.sample_weights(done) if isinstance(plan, Weighted) else None
    sums = np.bincount(population.codes[column], weights=weights, minlength=len(population.names[column]))
    shares: Array = sums / sums.sum()
    return shares


@dataclass(kw_only=True, slots=True)
class Usage:
    """Counts between two states. `counts`: by field, samples of each value; `shards`: samples of each shard.

    batches, samples: handed out to be learnt from, over all ranks; repeats: those of the samples that their epoch had
    handed out before. used: sorted indices, each once; empty where they were not asked for.
    """

    batches: int = 0
    samples: int = 0
    repeats: int = 0
    counts: dict[str, Array]
    shards: Array
    used: Array = field(default_factory=lambda: np.zeros(0, np.int64))


class UsageCounter:
    """Counts what was used between two states of the loaders of a run, of all its ranks together."""

    def __init__(self, population: Population, plan: Plan, *, dp_world_size: int, with_ids: bool = False) -> None:
        self.population, self.plan, self.dp_world_size = population, plan, dp_world_size
        self._with_ids = with_ids
        # Otherwise a sample stands once in an epoch, and it need not be remembered which ones were there.
        self._can_repeat = plan.tail == "pad" or isinstance(plan, Weighted)
        self._seen: tuple[LoaderState, Array] | None = None

    def count(self, start: LoaderState, end: LoaderState) -> Usage:
        """Returns what all ranks were handed out from `start` on and before `end`, two states of a loader of one run.

        O(samples between them). Where samples can repeat in an epoch (`tail = "pad"`, mixtures) the first call also
        looks at what came before in the epoch.
        """
        usage = Usage(
            counts={name: np.zeros(len(values), np.int64) for name, values in self.population.names.items()},
            shards=np.zeros(len(self.population.shard_sizes), np.int64),
        )
        used = [np.zeros(0, np.int64)]
        for state, positions in stretches(self.plan, start, end, dp_world_size=self.dp_world_size):
            seen = self._seen_before(state) if self._can_repeat else None
            for _, batches in in_chunks(self.plan.order(state.seed, state.epoch), positions):
                indices = np.concatenate(batches)
                self._add(usage, indices, batches=len(batches), seen=seen)
                if self._with_ids:
                    used.append(indices)
            if seen is not None:
                self._seen = (state.at(state.position + len(positions)), seen)
        usage.used = np.unique(np.concatenate(used))
        return usage

    def _seen_before(self, state: LoaderState) -> Array:
        """Returns which samples the epoch had handed out before `state`, bool [num_samples]."""
        if self._seen is not None and self._seen[0] == state:
            return self._seen[1]
        seen = np.zeros(self.population.num_samples, bool)
        for _, batches in in_chunks(self.plan.order(state.seed, state.epoch), np.arange(state.position)):
            seen[np.concatenate(batches)] = True
        return seen

    def _add(self, usage: Usage, indices: Array, *, batches: int, seen: Array | None) -> None:
        usage.batches += batches
        usage.samples += len(indices)
        for name, codes in self.population.codes.items():
            usage.counts[name] += np.bincount(codes[indices], minlength=len(usage.counts[name]))
        if self.population.shards is not None:
            usage.shards += np.bincount(self.population.shards[indices], minlength=len(usage.shards))
        if seen is not None:
            different = np.unique(indices)
            usage.repeats += len(indices) - int(np.count_nonzero(~seen[different]))
            seen[different] = True


def stretches(
    plan: Plan, start: LoaderState, end: LoaderState, *, dp_world_size: int
) -> Iterator[tuple[LoaderState, Array]]:
    """Yields, an epoch at a time, where all ranks entered it and the positions, int64, that they took from there on.

    Without fillers of weight 0. start, end: two states of a loader of one run.
    """
    count = plan.num_batches
    state = start
    while state.epoch < end.epoch:
        steps = num_steps(count, dp_world_size, tail=plan.tail, start=state.position)
        last = state.position + steps * dp_world_size
        if plan.tail != "pad":  # nothing, or what has weight 0, fills the last step
            last = min(last, count)
        yield state, np.arange(state.position, last) % count
        state = state.next_epoch()
    if end.position > state.position:
        yield state, np.arange(state.position, end.position)


def in_chunks(order: EpochOrder, positions: Array) -> Iterator[tuple[Array, list[Ints]]]:
    """Yields some positions of an epoch and their micro-batches, until all have been through."""
    for start in range(0, len(positions), _CHUNK):
        chunk = positions[start : start + _CHUNK]
        yield chunk, order.batches(chunk)


USAGE_VERSION = 2
"""1 had the shards of a line as an object, `{"17": 3}`; it is still read."""
FILE_NAME = "data_usage.jsonl"


def to_line(document: Mapping[str, Any]) -> bytes:
    """Returns a document as one line."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def read_usage(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the head of a usage log and all of its lines; raises as `walk_usage`, which holds one at a time."""
    head, lines = walk_usage(path)
    return head, [line for line, _ in lines]


def walk_usage(path: Path) -> tuple[dict[str, Any], Iterator[tuple[dict[str, Any], int]]]:
    """Returns the head of a usage log and an iterator of its lines, each with the byte of the file behind it.

    A last line that a crash has cut short is left out.
    Raises CacheCorruptError, naming file and line, for what is no usage log, CacheMismatchError for a newer version,
    OSError where the file cannot be read.
    """
    documents = _documents(path)
    head, _ = next(documents, ({}, 0))
    if not isinstance(head.get("version"), int):
        raise CacheCorruptError(f"{path} does not begin like a usage log; name a run's logs/{FILE_NAME}")
    version = head["version"]
    if version > USAGE_VERSION:
        raise CacheMismatchError(
            f"{path}: version is {version}, this forebay reads up to {USAGE_VERSION}; install a newer forebay",
            code="FB406",
        )
    return head, documents


def _documents(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            document = _document(line, path, number)
            if number > 1 and not all(isinstance(document.get(name), int) for name in ("step", "from_step")):
                raise CacheCorruptError(f"{path} line {number} has no step; it is no line of a usage log")
            yield document, end


def _document(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise CacheCorruptError(f"{path} line {number} is not JSON: {err}") from err
    if not isinstance(document, dict):
        raise CacheCorruptError(f"{path} line {number} is {an(type(document).__name__)}, wanted an object")
    return document


def pack_ids(indices: Array) -> str:
    """Returns rising sample indices, int64 [n], as text: the gaps between them, uint32, zlib, base64.

    A run of neighbours costs next to nothing, a sample among thousands two bytes. Indices are below 2^32.
    """
    return base64.b64encode(zlib.compress(np.diff(indices, prepend=0).astype("<u4").tobytes(), 6)).decode("ascii")


def unpack_ids(text: str) -> Array:
    """Returns the sample indices of `pack_ids`, int64 [n]. ValueError for a text that it did not make."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as err:
        raise ValueError(f"no packed sample indices: {err}") from err
    return np.cumsum(np.frombuffer(data, "<u4"), dtype=np.int64)


def pack_counts(counts: Array) -> str:
    """Returns counts, int64 [n], as text: which are not 0 and how many they are, packed as `pack_ids` does.

    A shard that was used takes a byte or two, one that was not next to nothing.
    """
    touched = np.flatnonzero(counts)
    return f"{pack_ids(touched)} {pack_ids(np.cumsum(counts[touched]))}"


def add_counts(totals: Array, counted: str | Mapping[str, int]) -> None:
    """Adds the counts of one line to `totals`, int64 [n]. ValueError, IndexError for what is none."""
    if isinstance(counted, str):
        touched, sums = map(unpack_ids, counted.split(" "))
        totals[touched] += np.diff(sums, prepend=0)
        return
    for number, count in counted.items():
        totals[int(number)] += count


_MOST_LINES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The samples of one shape class that a run has drawn."""

    batches: int
    """Micro-batches, over all ranks."""
    hours: float | None
    """Audio in them, without padding; None where samples are no audio."""
    share: float
    """Of all micro-batches of the run."""
    expected: float
    """Share of all micro-batches of an epoch."""


def drawn_classes(
    plan: Plan,
    *,
    start: LoaderState,
    end: LoaderState,
    dp_world_size: int,
    durations_s: Array | None,
) -> dict[str, Drawn]:
    """Returns what was drawn between two states of a loader, by the name of a shape class, in the plan's order.

    Names are those of calibration (`b_0_3`); windows have `place_0` on, packs are `packs`. Classes that an epoch has
    and the run has not drawn are there with 0.
    durations_s: float64 [num_samples]; None where samples are no audio.
    """
    names = class_names(plan)
    expected = _expected(plan, start, count=len(names))
    batches, hours = np.zeros(len(names), np.int64), np.zeros(len(names))
    for state, positions in stretches(plan, start, end, dp_world_size=dp_world_size):
        order = plan.order(state.seed, state.epoch)
        for chunk, found in in_chunks(order, positions):
            classes = order.buckets(chunk)
            batches += np.bincount(classes, minlength=len(names))
            if durations_s is not None:
                weights = durations_s[np.concatenate(found)] / 3600
                owners = np.repeat(classes, list(map(len, found)))
                hours += np.bincount(owners, weights=weights, minlength=len(names))
    total = max(int(batches.sum()), 1)
    return {
        name: Drawn(
            batches=int(batches[number]),
            hours=None if durations_s is None else round(float(hours[number]), 6),
            share=round(int(batches[number]) / total, 6),
            expected=round(float(expected[number]), 6),
        )
        for number, name in enumerate(names)
        if batches[number] or expected[number]
    }


def class_names(plan: Plan) -> list[str]:
    """Returns the name of every shape class of a plan, see `drawn_classes`."""
    if isinstance(plan, PackPlan):
        return ["packs"]
    if isinstance(plan, WindowPlan):
        return [f"place_{number}" for number in range(max(plan.batches_per_window, plan.last_batches))]
    if isinstance(plan, BucketPlan):
        return plan.names
    return list(plan.class_names) if isinstance(plan, MixturePlan) else ["0"]


def drawn_lines(drawn: Mapping[str, Drawn]) -> Iterator[str]:
    """Yields a line for each of the first shape classes in the plan's order."""
    for name, found in list(drawn.items())[:_MOST_LINES]:
        hours = "" if found.hours is None else f", {found.hours:.3g} h"
        yield (
            f"bucket {name}: {found.batches} batches{hours}, {100 * found.share:.1f} %, "
            f"expected {100 * found.expected:.1f} %"
        )
    if len(drawn) > _MOST_LINES:
        yield f"and {len(drawn) - _MOST_LINES} more buckets (--json lists them all)"


def _expected(plan: Plan, start: LoaderState, *, count: int) -> Array:
    """Returns the share of each shape class in the micro-batches of the epoch of a state, float64 [count]."""
    order, counts = plan.order(start.seed, start.epoch), np.zeros(count, np.int64)
    for first in range(0, plan.num_batches, _CHUNK):
        chunk = np.arange(first, min(first + _CHUNK, plan.num_batches))
        counts += np.bincount(order.buckets(chunk), minlength=count)
    shares: Array = counts / max(int(counts.sum()), 1)
    return shares
