"""The arms of one thread over a cache: reading samples, collating them, copying batches to a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from forebay.doctor.arms.loaders import makers
from forebay.doctor.bench import Bench
from forebay.doctor.cold import dropped
from forebay.doctor.figures import Pieces, Stage
from forebay.steps.batch import fresh
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import ROW_BITS, TEXT
from forebay.store.source import SampleSource, SourceUnion, parts_of
from forebay.train.collate.patches import PatchBatch, moved

CACHED_READ, COLLATE, COPY = "cached read", "collate", "copy to device"

_COLD_READS = 32
_BATCHES, _WARM = 64, 16


def pieces(bench: Bench, seconds: float) -> Pieces:
    """Returns what reading, collating and copying take, a sample each; and reading from the disk."""
    cold_ms, why = _cold(bench, ends=time.perf_counter() + seconds / 4)
    source, makers_ = bench.cached, makers(bench, bench.cached)
    order = bench.planned.plan.order(bench.config.loader.seed, 0)
    batches = [batch.tolist() for batch in order.batches(range(min(len(order), _BATCHES)))]
    read_ms, collate_ms, copy_ms = [], [], []
    count, began = 0, time.perf_counter()
    warm, ends = min(len(batches), _WARM), began + seconds
    copy = _copying()
    for number in range(10**9):
        indices = batches[number % len(batches)]
        part = source.part(indices[0]) if isinstance(source, SourceUnion) else 0
        samples, read_s = _timed(lambda: [source.read(index) for index in indices])  # noqa: B023  called here
        batch, collate_s = _timed(lambda: makers_[part].collate(samples, allocate=fresh))  # noqa: B023  likewise
        # The first ones check their bytes and load libraries.
        if number >= warm or (number and time.perf_counter() > began + seconds / 4):
            read_ms.append(1e3 * read_s / len(indices))
            collate_ms.append(1e3 * collate_s / len(indices))
            if copy is not None:
                copy_ms.append(1e3 * _timed(lambda: copy(batch))[1] / len(indices))  # noqa: B023  likewise
            count += len(indices)
        if count and time.perf_counter() > ends:
            break
    found = {CACHED_READ: read_ms, COLLATE: collate_ms, COPY: copy_ms}
    stages = tuple(
        Stage(name=name, kind="cache", ms=statistics.median(each), samples=count)
        for name, each in found.items()
        if each
    )
    return Pieces(stages=stages, cold_ms=cold_ms, why_not_cold=why)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _copying() -> Callable[[Any], None] | None:
    """Returns what copies a batch to the device and waits; None where there is no CUDA."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda")

    def copy(batch: Any) -> None:
        if isinstance(batch, PatchBatch):
            batch.to(device)
        else:
            moved(batch, device, non_blocking=False)
        torch.cuda.synchronize(device)

    return copy


def _cold(bench: Bench, *, ends: float) -> tuple[float | None, str]:
    """Returns milliseconds of a sample that lies on the disk alone, or why there is none."""
    caches = [part for part in parts_of(bench.cached) if isinstance(part, Cache)]
    times, why = [], "the cache is a view of samples"
    for cache in caches[:1]:
        again = open_cache(str(cache.folder), verify="never")
        for index in bench.random.permutation(len(again))[:_COLD_READS].tolist():
            why = _dropped(again, int(index)) or ""
            seconds = _touched(again, int(index))
            if not why:
                times.append(1e3 * seconds)
            if time.perf_counter() > ends:
                break
    return (statistics.median(times), "") if times else (None, why)


def _dropped(cache: Cache, index: int) -> str | None:
    own = [int(np.asarray(cache.slots)[index])]
    slots = {group: cache.items_of(group, index) if group in cache.listed else own for group in cache.groups}
    names = [name for name in cache.groups if name != TEXT] or [TEXT]
    files = [cache.shard_entries(name)[slot >> ROW_BITS][0] for name in names for slot in slots[name]]
    return next((problem for file in dict.fromkeys(files) if (problem := dropped(str(file), 0, 0))), None)


def _touched(source: SampleSource, index: int) -> float:
    """Returns the seconds until all bytes of a sample have been in memory."""
    began = time.perf_counter()
    for value in source.read(index).values():
        for part in value if isinstance(value, tuple) else (value,):
            np.asarray(part).sum()
    return time.perf_counter() - began
