"""A bounded cache of shards under each policy of eviction, use by use; `benchmarks.remote_sim` asks it."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.store.layout import Ints

Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A cache's result at each use. missed: bool [num_uses]; victims: int64 [num_uses], the shard evicted or -1."""

    missed: Bools
    victims: Ints

    @property
    def fetches(self) -> int:
        """Shards that were fetched, each time counted."""
        return int(self.missed.sum())


def next_uses(uses: Ints) -> Ints:
    """Returns for each use the place of the next use of the same shard, int64.

    Where none comes, 2 * len(uses) - place: farther than any, and the farther the longer ago the last use was.
    """
    order = np.argsort(uses, kind="stable")
    found = 2 * len(uses) - np.arange(len(uses))
    is_used_again = uses[order[1:]] == uses[order[:-1]]
    found[order[:-1][is_used_again]] = order[1:][is_used_again]
    return found


def simulate(uses: Ints, *, capacity: int, policy: str) -> Result:
    """Returns what a cache of `capacity` shards does when its node uses these shards one after the other.

    uses: int64 [num_uses], shards from 0 on. A shard that is not there is fetched, and takes the place of another one
    where the cache is full. policy: a name of `POLICIES`.
    """
    if capacity < 1:
        raise ValueError(f"a cache of {capacity} shards holds none that is used")
    victims = POLICIES[policy](uses, capacity)
    return Result(missed=victims != _HIT, victims=np.maximum(victims, -1))


_HIT = -2
"""Stands where nothing was fetched; -1 where a shard was fetched into a free place."""


def _lru(uses: Ints, capacity: int) -> Ints:
    victims = np.full(len(uses), _HIT)
    resident: OrderedDict[int, None] = OrderedDict()
    for place, shard in enumerate(uses.tolist()):
        if shard in resident:
            resident.move_to_end(shard)
            continue
        victims[place] = resident.popitem(last=False)[0] if len(resident) == capacity else -1
        resident[shard] = None
    return victims


def _fifo(uses: Ints, capacity: int) -> Ints:
    victims = np.full(len(uses), _HIT)
    line: deque[int] = deque()
    resident: set[int] = set()
    for place, shard in enumerate(uses.tolist()):
        if shard in resident:
            continue
        victims[place] = line.popleft() if len(line) == capacity else -1
        resident.discard(int(victims[place]))
        resident.add(shard)
        line.append(shard)
    return victims


def _belady(uses: Ints, capacity: int) -> Ints:
    """Belady 1966, "A study of replacement algorithms for a virtual-storage computer", MIN."""
    victims = np.full(len(uses), _HIT)
    count, shards = len(uses), uses.tolist()
    resident: set[int] = set()
    # Next uses of resident shards, farthest first. An entry whose use has come is never the farthest while the cache is
    # full: the shard has a later one, or has been evicted together with its farthest.
    farthest: list[int] = []
    for place, (shard, following) in enumerate(zip(shards, next_uses(uses).tolist(), strict=True)):
        if shard not in resident:
            victim = -1
            if len(resident) == capacity:
                use = -heapq.heappop(farthest)
                victim = shards[use if use < count else 2 * count - use]
                resident.remove(victim)
            victims[place] = victim
            resident.add(shard)
        heapq.heappush(farthest, -following)
    return victims


POLICIES: dict[str, Callable[[Ints, int], Ints]] = {"lru": _lru, "belady": _belady, "fifo": _fifo}
