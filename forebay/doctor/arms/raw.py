"""The arms of raw data: what training finds, the listing, reading, and the steps of a build on a sample of rows."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from forebay.doctor.bench import Bench
from forebay.doctor.cold import dropped
from forebay.doctor.figures import Listed, Made, Opened, Reads, Skip
from forebay.doctor.sample_cache import make_sample
from forebay.preprocess.group import ItemGroup
from forebay.rows.manifest import WHOLE_FILE
from forebay.store.cache import Cache
from forebay.store.remote.raw.sources import is_here
from forebay.store.source import parts_of

_READS = 64


def find(bench: Bench, seconds: float) -> Opened:  # noqa: ARG001  it takes what it takes
    """Returns what training would read."""
    source = bench.sealed
    if source is None:
        return Opened(place=None, num_samples=0, hours=None, size_bytes=0)
    caches = [part for part in parts_of(source) if isinstance(part, Cache)]
    rate = float(source.constants.get("sample_rate_hz", 0) or 0)
    lengths = source.lengths.get("num_audio_samples")
    return Opened(
        place=", ".join(str(cache.place) for cache in caches),
        num_samples=len(source),
        hours=float(lengths.sum()) / rate / 3600 if rate and lengths is not None else None,
        size_bytes=sum(int(cache.metadata.get("size_bytes", 0)) for cache in caches),
        num_shards=sum(cache.num_shards for cache in caches),
    )


def listing(bench: Bench, seconds: float) -> Listed:  # noqa: ARG001  its parent ends it
    """Returns what is known of the raw data."""
    began = time.perf_counter()
    bench.manifest  # noqa: B018  is listed now
    return bench.listed(time.perf_counter() - began)


def reads(bench: Bench, seconds: float) -> Reads:
    """Returns what reading an encoded sample takes, out of memory and from the disk."""
    group = next(iter(bench.groups.items), None)
    places = [] if group is None else _places(bench, group)
    if group is None or not places:
        raise Skip("no sample has media to read")
    cold, warm, sizes, why = [], [], [], ""
    ends = time.perf_counter() + seconds
    with bench.reader(group) as read:
        for file, offset, size in places:
            path = os.fspath(bench.manifest.files[file].path)
            problem = dropped(path, 0 if size == WHOLE_FILE else offset, 0 if size == WHOLE_FILE else size)
            first = _timed(read, file, offset, size)
            if problem is None:
                cold.append(first[0])
            why = problem or why
            again = _timed(read, file, offset, size)
            warm.append(again[0])
            sizes.append(again[1])
            if time.perf_counter() > ends:
                break
    return Reads(
        warm_ms=1e3 * statistics.median(warm),
        cold_ms=1e3 * statistics.median(cold) if cold else None,
        mean_bytes=statistics.fmean(sizes),
        samples=len(warm),
        why_not_cold="" if cold else why,
    )


def _timed(read: Any, file: int, offset: int, size: int) -> tuple[float, int]:
    began = time.perf_counter()
    data = read(file, offset, size)
    return time.perf_counter() - began, len(data)


def _places(bench: Bench, group: ItemGroup) -> list[tuple[int, int, int]]:
    """Returns file, offset and size of some encoded items, those that the listing could place."""
    items, files = group.table(bench.picked), bench.picked.files
    order = bench.random.permutation(len(items))[: 4 * _READS]
    taken = items.select(["file", "offset", "size"]).take(order).to_pylist()
    return [(row["file"], row["offset"], row["size"]) for row in taken if is_here(files[row["file"]].path)][:_READS]


def made(bench: Bench, seconds: float) -> Made:
    """Returns what the steps of a build take on some rows; the temporary cache is made of these."""
    return make_sample(bench, seconds)
