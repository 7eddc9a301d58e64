"""Which shards of which remote caches the samples of a source lie in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.cache import Cache
from forebay.store.layout import ROW_BITS, Ints
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.node.holdings import counted
from forebay.store.remote.node.node import WantedFile
from forebay.store.selection import origin
from forebay.store.source import SampleSource, parts_of

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class RemoteShards:
    """The shards of all remote caches of a source, counted through; local caches have none.

    caches, mirrors: the remote ones, in order. firsts: the number here of the first shard of each, and of the end.
    """

    def __init__(self, source: SampleSource) -> None:
        """source: a cache, a selection of one, or a union; anything else has no remote shards."""
        parts = parts_of(source)
        starts = itertools.accumulate((len(part) for part in parts), initial=0)
        found = [(*origin(part), start, len(part)) for part, start in zip(parts, starts, strict=False)]
        remote = [
            (cache, cache.mirror, places, range(start, start + count))
            for cache, places, start, count in found
            if isinstance(cache, Cache) and cache.mirror is not None
        ]
        self.caches: list[Cache] = [cache for cache, _, _, _ in remote]
        self.mirrors: list[Mirror] = [mirror for _, mirror, _, _ in remote]
        # Where the samples of each cache stand in the source, and which ones they are there; None: all of them.
        self._spans = [span for _, _, _, span in remote]
        self._places = [places for _, _, places, _ in remote]
        self.firsts = [0, *itertools.accumulate(cache.num_units for cache in self.caches)]

    def __len__(self) -> int:
        return self.firsts[-1]

    def of(self, indices: Ints) -> Ints:
        """Returns the units (`Cache.units_of`) of samples and their items, once each, rising; none of local caches."""
        if len(self.caches) == 1 and len(indices) and not self._spans[0].start and indices.max() < self._spans[0].stop:
            return self._shards_of(0, indices)
        found = []
        for part, (span, first) in enumerate(zip(self._spans, self.firsts, strict=False)):
            own = indices[(indices >= span.start) & (indices < span.stop)]
            found.append(self._shards_of(part, own - span.start) + first)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _shards_of(self, part: int, indices: Ints) -> Ints:
        places = self._places[part]
        return self.caches[part].units_of(indices if places is None else places[indices])

    @cached_property
    def is_used(self) -> Bools:
        """bool [num_shards]: whether a shard holds a sample of the source; one that a filter emptied does not."""
        found = np.ones(len(self), bool)
        for part, (places, first) in enumerate(zip(self._places, self.firsts, strict=False)):
            if places is not None:
                found[first : self.firsts[part + 1]] = False
                found[self.caches[part].units_of(places) + first] = True
        return found

    @property
    def num_used(self) -> int:
        """Shards that hold a sample of the source."""
        return int(np.count_nonzero(self.is_used))

    def place(self, shard: int) -> tuple[int, int]:
        """Returns which of `caches` a shard is of, and its number there."""
        part = next(part for part, end in enumerate(self.firsts[1:]) if shard < end)
        return part, shard - self.firsts[part]

    def files(self, shard: int) -> list[WantedFile]:
        """Returns the files of a shard."""
        part, number = self.place(shard)
        return self.caches[part].unit_files(number)

    @cached_property
    def sizes(self) -> Ints:
        """int64 [num_shards]: what each takes of the node's disk, with all its files."""
        return np.concatenate([np.zeros(0, np.int64), *map(_sizes, self.caches)])

    def row_shard_bytes(self, *, run: int) -> int:
        """The bytes of a shard of rows at most, with its part of the shards of items of a run of as many shards."""
        found = [
            RunItems(cache).run_bytes(run, sizes=_sizes(cache)) / min(run, cache.num_shards) for cache in self._own()
        ]
        return max((int(np.ceil(each.max(initial=0))) for each in found), default=0)

    @cached_property
    def item_bytes(self) -> int:
        """The bytes of the shards of items that samples list."""
        return sum(int(_sizes(cache)[cache.num_shards :].sum()) for cache in self._own())

    @cached_property
    def text_shard_bytes(self) -> int:
        """The bytes of a shard of rows at most, without items that samples list."""
        return max((int(_sizes(cache)[: cache.num_shards].max(initial=0)) for cache in self._own()), default=0)

    @cached_property
    def kept_bytes(self) -> int:
        """The bytes of the other files of the caches."""
        files = [entry for cache in self._own() for entry in cache.metadata["files"].values()]
        return sum(counted(int(entry["size_bytes"])) for entry in files)

    @cached_property
    def total_bytes(self) -> int:
        """The bytes of all files of the caches that are used; a cache that stands in the source twice counts once."""
        used: dict[Path, Bools] = {}
        for cache, first in zip(self.caches, self.firsts, strict=False):
            own = self.is_used[first : first + cache.num_units]
            used[cache.folder] = used.get(cache.folder, False) | own
        return self.kept_bytes + sum(int(_sizes(cache)[used[cache.folder]].sum()) for cache in self._own())

    @property
    def fit(self) -> bool:
        """Whether this node keeps all of them."""
        return self.total_bytes <= self.bound_bytes

    def _own(self) -> list[Cache]:
        return list({cache.folder: cache for cache in self.caches}.values())

    @property
    def bound_bytes(self) -> int:
        """The bytes that this node keeps at most: the least of the bounds, if caches were opened with several."""
        return min((mirror.settings.cache_size_bytes for mirror in self.mirrors), default=0)

    def is_here(self, shard: int) -> bool:
        """Returns whether all files of a shard are on this node, whole."""
        return all(map(self.mirrors[self.place(shard)[0]].has, self.files(shard)))

    def missing_bytes(self) -> int:
        """Returns what the shards take that are used and not on this node."""
        return sum(int(self.sizes[shard]) for shard in np.flatnonzero(self.is_used).tolist() if not self.is_here(shard))

    def ahead(self, steps: Iterable[Ints]) -> Iterator[Ints]:
        """Yields the shards that each step needs, each once, rising. steps: the samples of each, by index in source."""
        for samples in steps:
            yield self.of(samples)


class RunItems:
    """Which shards of items the shards of rows of a cache need, where consecutive ones of these go together in runs."""

    def __init__(self, cache: Cache) -> None:
        self._num_shards, first = cache.num_shards, cache.num_shards
        rows, pairs = cache.slots >> ROW_BITS, [np.zeros((2, 0), np.int64)]
        for group in cache.listed:
            items = cache.items(group)
            found = np.stack([np.repeat(rows, np.diff(items.offsets)), (items.slots >> ROW_BITS) + first])
            pairs.append(np.unique(found, axis=1))
            first += cache.unit_count(group)
        self._rows, self._items = np.concatenate(pairs, axis=1)

    def run_bytes(self, run: int, *, sizes: Ints) -> Ints:
        """Returns what each run of so many shards takes, int64 [num_runs]: its shards, and those of its items."""
        own = np.add.reduceat(sizes[: self._num_shards], np.arange(0, self._num_shards, run))
        keys = np.unique(self._rows // run * len(sizes) + self._items)
        np.add.at(own, keys // len(sizes), sizes[keys % len(sizes)])
        return own


def _sizes(cache: Cache) -> Ints:
    return cache.unit_bytes(lambda sizes: np.array([counted(size) for size in sizes.tolist()], np.int64))
