"""Several caches of one recipe as one: what `forebay cache merge` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from forebay.errors import CacheMismatchError, ConfigError
from forebay.preprocess.many.combine import Linked, contents_of, rejections_of
from forebay.preprocess.many.parts import Part, opened, require_one_recipe
from forebay.preprocess.many.place import put, target_of
from forebay.preprocess.many.report import ManyReport
from forebay.store.cache import Cache
from forebay.store.derived import MERGED
from forebay.store.key import SHORT
from forebay.store.layout import Array, Ints

OnDuplicate = Literal["refuse", "keep-first"]

_SHOWN = 5
"""Ids that a message lists."""


def merge(
    places: Sequence[str],
    out: str,
    *,
    on_duplicate: OnDuplicate = "refuse",
    cache_root: str | None = None,
    progress: bool = False,
) -> ManyReport:
    """Makes several sealed caches of one recipe one cache, with their shards linked, and returns what was done.

    Samples are in the order of the caches. The recipes may differ in `[source]` alone. on_duplicate: what becomes of a
    sample whose id an earlier cache has: it is an error, or the earlier one is kept.
    out: a folder, or a name beside the first cache, or below `cache_root`.
    Raises CacheMismatchError, which names field, values and caches, where they are not of one recipe or have ids in
    common; ConfigError for fewer than two caches, or one in a store; CacheCorruptError for a damaged shard.
    """
    started_s = time.monotonic()
    if len(places) < 2:
        raise ConfigError("a merge is of two caches or more; to link some samples of one: forebay cache subset")
    caches = [opened(place, command="merge") for place in places]
    _require_different(caches)
    require_one_recipe(caches)
    again = _again(caches)
    if len(again) and on_duplicate == "refuse":
        raise CacheMismatchError(_duplicates_message(caches, again), code="FB414")
    parts = _parts(caches, again)
    if not sum(len(part.kept) for part in parts):
        raise ConfigError("no cache has a sample: nothing is there to be merged")
    section = {"of": [cache.key for cache in caches], **({"on_duplicate": on_duplicate} if len(again) else {})}
    linked = Linked.of(parts)
    rejections = {line: row for cache in caches for line, row in rejections_of(cache).items()}
    contents = contents_of(parts, linked, made={MERGED: section}, rejections=rejections)
    folder = target_of(out, beside=caches[0], cache_root=cache_root)
    is_there = put(folder, contents, linked, caches=caches, progress=progress)
    counts = {"duplicates": len(again), "already_there": is_there, "seconds": time.monotonic() - started_s}
    return ManyReport.of("merge", folder, contents, parts=parts, linked=linked, **counts)


def _require_different(caches: Sequence[Cache]) -> None:
    seen: dict[str, Cache] = {}
    for cache in caches:
        if (first := seen.setdefault(cache.key, cache)) is not cache:
            raise ConfigError(f"{first.place} and {cache.place} have one key, {cache.key[:SHORT]}: name it once")


@dataclass(frozen=True, kw_only=True)
class _Again:
    """Samples whose ids an earlier cache has. Both are int64, counted through all caches: these, and the first ones."""

    places: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.places)


def _ids(cache: Cache) -> pa.ChunkedArray:
    return cache.table(["sample_id"])["sample_id"]


def _offsets(caches: Sequence[Cache]) -> Array:
    return np.cumsum([0, *map(len, caches)])


def _again(caches: Sequence[Cache]) -> _Again:
    ids = pa.chunked_array([chunk for cache in caches for chunk in _ids(cache).chunks], type=pa.large_string())
    codes = ids.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    first = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # the last write stays: the first place of each id
    owner = np.repeat(np.arange(len(caches)), np.diff(_offsets(caches)))
    # An id that one cache has twice is that cache's own matter.
    places = np.flatnonzero(owner[first[codes]] < owner)
    return _Again(places=places, first=first[codes[places]])


def _parts(caches: Sequence[Cache], again: _Again) -> list[Part]:
    parts = []
    for cache, start in zip(caches, _offsets(caches).tolist(), strict=False):
        is_kept = np.ones(len(cache), bool)
        inside = again.places[(again.places >= start) & (again.places < start + len(cache))]
        is_kept[inside - start] = False
        parts.append(Part(cache=cache, kept=np.flatnonzero(is_kept)))
    return parts


def _duplicates_message(caches: Sequence[Cache], again: _Again) -> str:
    offsets = _offsets(caches)
    shown = []
    for places in zip(again.first[:_SHOWN].tolist(), again.places[:_SHOWN].tolist(), strict=True):
        numbers = [int(np.searchsorted(offsets, place, side="right")) - 1 for place in places]
        name = caches[numbers[1]].sample_id(places[1] - int(offsets[numbers[1]]))
        shown.append(f"{name!r} of {caches[numbers[0]].place} and {caches[numbers[1]].place}")
    more = f", and {len(again) - _SHOWN} more" if len(again) > _SHOWN else ""
    return (
        f"{len(again)} sample ids are in two of the caches: {'; '.join(shown)}{more}; to keep the sample of the cache "
        "that is named first, add: --on-duplicate keep-first"
    )
