"""The usage log of a run, `logs/data_usage.jsonl`: a head line, then a line every N steps with what was used since.

A line says between which steps and which states it counts, so lines add up. A resumed run only has to cut off the lines
behind its checkpoint. `forebay inspect --usage FILE` adds the lines.

What the nodes of a run asked of stores: each rank counts its own, and the ranks of a node add up.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import CacheError, ForebayError
from forebay.plan.cursor import LoaderState
from forebay.plan.mixture.mixture_plan import MixturePlan
from forebay.plan.plan_usage import (
    USAGE_VERSION,
    UsageCounter,
    expected_shares,
    pack_counts,
    pack_ids,
    population,
    to_line,
    walk_usage,
)
from forebay.plan.remote_cost import node_ranks
from forebay.store.cache import Cache
from forebay.store.files import append
from forebay.store.layout import Array
from forebay.store.remote.remote_shards import RemoteShards
from forebay.store.selection import origin
from forebay.store.source import SampleSource, parts_of
from forebay.train.loader import Loader
from forebay.visible import human_bytes

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one node, or of several together."""

    hits: int = 0
    """Files that were here when a reader opened them."""
    misses: int = 0
    """Files that were not, those included that were being downloaded already."""
    downloads: int = 0
    bytes: int = 0
    """That came from the store, ahead or on demand."""
    evictions: int = 0
    """Files that were removed for others."""
    stalls: int = 0
    """Times that a reader waited for a download."""
    stall_s: float = 0.0
    """For so long, all readers together."""
    damaged: int = 0
    """Files that this node's disk had changed, and that were fetched again."""

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(one + two for one, two in pairs))

    def __str__(self) -> str:
        waits = f", {self.stalls} stalls {self.stall_s:.1f} s" if self.stalls else ""
        damaged = f", {self.damaged} damaged files fetched again" if self.damaged else ""
        opened = self.hits + self.misses
        rate = f", {self.hits / opened:.0%} of {opened} files were here" if opened else ""
        return f"net {human_bytes(self.bytes)} in {self.downloads} downloads{rate}{waits}{damaged}"


_NAMES = [field.name for field in dataclasses.fields(Traffic)]


class NodeTraffic:
    """The traffic of every node of a run, as one consumer looks at it: from its last look to now."""

    def __init__(
        self, shards: RemoteShards, *, rank: int, world: int, sum_over_ranks: Callable[[Sequence[int]], list[int]]
    ) -> None:
        """rank, world: of the processes. sum_over_ranks: adds up integers; every rank calls it at every `take`."""
        # A process counts for each folder that a node keeps, and several caches may share one.
        self._counters = list({id(mirror.counters): mirror.counters for mirror in shards.mirrors}.values())
        ranks = node_ranks(world)
        self._node, self._num_nodes, self._sum = rank // ranks, -(-world // ranks), sum_over_ranks
        self._seen = [0] * len(_NAMES)

    @classmethod
    def of(
        cls, source: SampleSource, *, rank: int, world: int, sum_over_ranks: Callable[[Sequence[int]], list[int]]
    ) -> NodeTraffic | None:
        """Returns the traffic of a source; None where nothing of it is remote."""
        shards = RemoteShards(source)
        return cls(shards, rank=rank, world=world, sum_over_ranks=sum_over_ranks) if len(shards) else None

    def take(self) -> list[Traffic]:
        """Returns what each node did since the last call, at first since its processes began; a node an element."""
        now, size = self._own(), len(_NAMES)
        values = [0] * (size * self._num_nodes)
        start = self._node * size
        values[start : start + size] = [after - before for after, before in zip(now, self._seen, strict=True)]
        self._seen = now
        found = self._sum(values)
        return [_traffic(found[first : first + size]) for first in range(0, len(found), size)]

    def _own(self) -> list[int]:
        """Returns the counts of this process; seconds in nanoseconds, since the ranks add up integers."""
        counts = [counters.to_json() for counters in self._counters]
        return [int(sum(found[name] for found in counts) * (_NS if name == "stall_s" else 1)) for name in _NAMES]


def _traffic(values: Sequence[int]) -> Traffic:
    counts: dict[str, Any] = dict(zip(_NAMES, values, strict=True))
    return Traffic(**{**counts, "stall_s": counts["stall_s"] / _NS})


logger = logging.getLogger(__name__)
_MAX_COMPARED = 64
"""Languages, or sources, that a line compares with their expected share; with more of them a line has counts alone."""


class UsageLog:
    """The log of one run, seen from one rank: rank 0 counts and writes; the others only say how much they padded."""

    def __init__(
        self,
        path: Path,
        loader: Loader,
        *,
        step: int,
        sum_over_ranks: Callable[[Sequence[int]], list[int]],
        with_ids: bool = False,
        traffic: NodeTraffic | None = None,
    ) -> None:
        """Touches no file yet: the first `record` starts it anew, or cuts it back to `step` where that is above 0.

        step: steps done before; 0, or those of the checkpoint whose state the loader has. sum_over_ranks: adds up
        integers, called by every rank at every `record`. traffic: of the nodes, where caches are remote.
        """
        self.path, self._loader, self._step, self._sum = path, loader, step, sum_over_ranks
        self._traffic = traffic
        self._state, self._frames = loader.state, _frames(loader)
        self._lines = _Lines(path, loader, step=step, with_ids=with_ids) if loader.dp_rank == 0 else None

    def record(self, step: int) -> None:
        """Writes what was used since the last record, if a step was done. Every rank calls it at the same step.

        step: steps done by now. Raises ForebayError where the file cannot be written.
        """
        if step == self._step:
            return
        state, frames = self._loader.state, _frames(self._loader)
        remote = {} if self._traffic is None else {"remote": _nodes(self._traffic.take())}
        held, room = self._sum([now - then for now, then in zip(frames, self._frames, strict=True)])
        if self._lines is not None:
            span = {"step": step, "from_step": self._step, "dp_world_size": self._loader.dp_world_size}
            padding = {"padding": _share(room - held, room), "frames": held, "padded_frames": room - held}
            self._lines.add(span, self._state, state, {**padding, **remote})
        self._step, self._state, self._frames = step, state, frames


class _Lines:
    """The lines that rank 0 counts and writes."""

    def __init__(self, path: Path, loader: Loader, *, step: int, with_ids: bool) -> None:
        self._path, self._loader = path, loader
        self._population = population(loader.source)
        self._counter = UsageCounter(
            self._population, loader.plan, dp_world_size=loader.dp_world_size, with_ids=with_ids
        )
        self._with_ids = with_ids
        self._expected = {name: expected_shares(self._population, loader.plan, name) for name in self._population.names}
        self._totals = {name: np.zeros(len(names), np.int64) for name, names in self._population.names.items()}
        # What the file is to begin with: a head of its own, or so many bytes of it as it stands; None: it does.
        self._kept: bytes | int | None = self._keep(step) if step else to_line(self._head(step=0))

    def add(self, span: dict[str, Any], start: LoaderState, end: LoaderState, figures: dict[str, Any]) -> None:
        """Appends the line of what was used between two states. figures: what else the ranks measured together."""
        usage, plan = self._counter.count(start, end), self._loader.plan
        if isinstance(plan, MixturePlan) and plan.changes:
            people = self._population
            self._expected = {name: expected_shares(people, plan, name, end=end) for name in people.names}
        line = {**span, "from": _place(start), "to": _place(end)}
        line |= {"samples": usage.samples, "batches": usage.batches, "repeats": usage.repeats}
        line |= {f"{name}s": self._column(name, counts) for name, counts in usage.counts.items()}
        line |= {"shards": pack_counts(usage.shards), **figures}
        if self._with_ids:
            line["ids"] = pack_ids(usage.used)
        self._write(to_line(line))

    def _column(self, name: str, counts: Array) -> dict[str, dict[str, Any]]:
        names, totals = self._population.names[name], self._totals[name]
        totals += counts
        if len(names) > _MAX_COMPARED:
            return {names[i]: {"samples": int(counts[i])} for i in np.flatnonzero(counts)}
        return {
            value: {
                "samples": int(counts[i]),
                "total": int(totals[i]),
                "share": _share(int(totals[i]), int(totals.sum())),
                "expected": round(float(self._expected[name][i]), 6),
            }
            for i, value in enumerate(names)
        }

    def _head(self, *, step: int) -> dict[str, Any]:
        source, people = self._loader.source, self._population
        return {
            "version": USAGE_VERSION,
            "from_step": step,
            "plan_key": self._loader.plan_key,
            "seed": self._loader.state.seed,
            "caches": _caches(source, with_places=self._with_ids),
            "source_key": source.key,
            "num_samples": people.num_samples,
            "num_batches": self._loader.plan.num_batches,
            "tail": self._loader.plan.tail,
            **{
                f"{name}s": {
                    value: {"samples": int(size), "expected": round(float(share), 6)}
                    for value, size, share in zip(values, people.sizes(name), self._expected[name], strict=True)
                }
                for name, values in people.names.items()
            },
            "shards": people.shard_sizes.tolist(),
        }

    def _keep(self, step: int) -> bytes | int:
        """Returns where the lines up to `step` end if they lead to the loader's state, else a head alone.

        The file is walked, a line in memory at a time: a long run's log may be gigabytes.
        """
        head = self._head(step=step)
        totals = {name: np.zeros_like(found) for name, found in self._totals.items()}
        last, kept = {}, 0
        try:
            stored, lines = walk_usage(self._path)
            for line, end in lines:
                if line["step"] > step:
                    break
                last, kept = line, end
                for name, found in totals.items():
                    counted = line.get(f"{name}s", {})
                    found += [counted.get(value, {}).get("samples", 0) for value in self._population.names[name]]
        except (OSError, CacheError) as err:
            logger.warning("the usage log begins at step %d: %s", step, err)
            return to_line(head)
        same = all(stored.get(name) == head[name] for name in ("plan_key", "seed", "source_key", "num_samples"))
        if not (same and last.get("step") == step and last.get("to") == _place(self._loader.state)):
            logger.warning("the usage log begins at step %d: %s does not lead there", step, self._path)
            return to_line(head)
        self._totals = totals
        return kept

    def _write(self, line: bytes) -> None:
        try:
            # What stands behind the checkpoint goes; a crash here loses nothing that counts.
            append(self._path, line, kept=self._kept)
            self._kept = None
        except OSError as err:
            raise ForebayError(
                f"cannot write the usage log {self._path}: {err.strerror}; make room or set train.usage_every = 0, "
                "then go on with forebay train --resume",
                code="FB703",
            ) from err


def _caches(source: SampleSource, *, with_places: bool) -> list[dict[str, str]]:
    """Returns the caches whose samples are those of the source, in order; none if some samples are not of a cache.

    with_places: where a filter left samples out, the places of the others are told too.
    """
    found = []
    for cache, places in map(origin, parts_of(source)):
        if not isinstance(cache, Cache):
            return []
        own = {"places": pack_ids(places)} if with_places and places is not None else {}
        found.append({"folder": cache.place, "key": cache.key, **own})
    return found


def _nodes(found: Sequence[Traffic]) -> list[dict[str, Any]]:
    return [{"node": node, **asdict(traffic)} for node, traffic in enumerate(found)]


def _frames(loader: Loader) -> tuple[int, int]:
    """Returns the stored frames that this rank was handed out, and the frames that their batches had room for."""
    report = loader.report()
    return int(report["frames"]), int(report["frames"] + report["padded_frames"])


def _place(state: LoaderState) -> dict[str, int]:
    return {"epoch": state.epoch, "position": state.position}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
