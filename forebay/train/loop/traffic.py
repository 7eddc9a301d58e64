"""What the nodes of a run asked of stores: each rank counts its own, and the ranks of a node add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.plan.remote_cost import node_ranks
from forebay.store.remote.ahead.shards import RemoteShards
from forebay.store.source import SampleSource
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
