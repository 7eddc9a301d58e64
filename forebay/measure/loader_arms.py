"""The arms of loaders: how fast batches come when nothing is done with them but to wait as long as a step takes.

The arms of one thread over a cache: reading samples, collating them, copying batches to a device.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from forebay.config.plan import BucketConfig, PackConfig, PlanConfig, WindowConfig
from forebay.measure.doctor_bench import Bench, dropped
from forebay.measure.machine import timed, within
from forebay.measure.predict import Pieces, Rate, Rates, Skip, StageCost, Timed, costs
from forebay.plan.make import Planned, plan_of
from forebay.steps.batch import fresh
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import ROW_BITS, TEXT
from forebay.store.source import Sample, SampleSource, SourceUnion, parts_of
from forebay.train.collate.collator import BatchMaker, Collator
from forebay.train.collate.device_features import DeviceFeatures
from forebay.train.collate.patches import PatchBatch, moved
from forebay.train.loader import Loader
from forebay.train.select import loader_settings, pack_makers

_ROUND_S = 0.4
"""Of one loader, before the next one has its turn: a busy neighbour meets all of them."""
_LONGEST_REST = 3.0
"""Of the loop between two batches, times what a batch takes: whoever rests longer never waits."""


@dataclass(slots=True)
class _Turn:
    """The batches of a loader while nothing was done with them."""

    batches: list[Timed]
    seconds: float


def cached(bench: Bench, seconds: float) -> Rates:
    """Returns the loader over the cache with 0, 1, 2 and 4 threads, and with those of the config."""
    return _by_threads(bench, bench.cached, bench.planned, (0, 1, 2, 4), seconds)


def uncached(bench: Bench, seconds: float) -> Rates:
    """Returns the loader without a cache, with 0 threads and with those of the config."""
    return _by_threads(bench, *_uncached(bench), (0,), seconds)


def _by_threads(bench: Bench, source: SampleSource, planned: Planned, threads: Sequence[int], seconds: float) -> Rates:
    own = bench.config.loader.num_threads
    fit, skipped = _fit(sorted({*threads, own}), bench.task.cores, "threads")
    loaders = {number: loader_over(bench, source, planned, num_threads=number) for number in fit}
    rounds = {number: _loader_round(loader, pace_s=bench.pace_s) for number, loader in loaders.items()}
    return Rates(rates=_in_turns(rounds, seconds, own=own), skipped=skipped)


def workers(bench: Bench, seconds: float) -> Rates:
    """Returns torch's DataLoader without a cache, with 2 and 8 worker processes that collate."""
    fit, skipped = _fit((2, 8), bench.task.cores, "worker processes")
    if not fit:
        return Rates(rates={}, skipped=skipped)
    source, planned = _uncached(bench)
    data = Batches(source, planned, makers(bench, source), seed=bench.config.loader.seed)
    return Rates(rates={number: _of_workers(data, number, seconds / len(fit)) for number in fit}, skipped=skipped)


def _fit(numbers: Sequence[int], cores: int, what: str) -> tuple[list[int], dict[int, str]]:
    fit = [number for number in numbers if number <= cores]
    return fit, {n: f"{n} {what} on {cores} core{'s' * (cores > 1)}" for n in numbers if n not in fit}


def loader_over(bench: Bench, source: SampleSource, planned: Planned, *, num_threads: int) -> Loader:
    """Returns the loader that `make_loader` makes of a config, over another source and with other threads."""
    config = bench.config
    collator, finish = None, None
    if isinstance(config.plan, PackConfig):
        collator, finish = pack_makers(config, source, planned.plan, device=None, as_tensordict=False)
    settings = dataclasses.replace(loader_settings(config), num_threads=num_threads)
    features = config.loader.device_features
    named: dict[str, Any] = {"dp_rank": 0, "dp_world_size": 1, "features": features}
    return Loader(source, planned, settings, collator=collator, finish=finish, **named)


def makers(bench: Bench, source: SampleSource) -> list[BatchMaker]:
    """Returns what makes the batches of each part of a source, as the config wants them."""
    config, settings = bench.config, loader_settings(bench.config)
    if isinstance(config.plan, PackConfig):
        return [pack_makers(config, source, bench.planned.plan, device=None, as_tensordict=False)[0]]
    made = config.loader.device_features
    named: dict[str, Any] = {"dtype": settings.dtype, "padding_side": settings.padding_side}
    return [Collator(part, **named, features=DeviceFeatures.wanted(made, part)) for part in parts_of(source)]


def collated(source: SampleSource, makers: Sequence[BatchMaker], samples: list[Sample], *, index: int) -> Any:
    """Returns a batch of samples. index: of one of them, whose part of the source says which maker it is."""
    return _maker(source, makers, index).collate(samples, allocate=fresh)


def _maker(source: SampleSource, makers: Sequence[BatchMaker], index: int) -> BatchMaker:
    return makers[source.part(index) if isinstance(source, SourceUnion) else 0]


class Batches(Dataset[Any]):
    """The batches of an epoch by their number, whole: what worker processes make and send."""

    def __init__(self, source: SampleSource, planned: Planned, makers: Sequence[BatchMaker], *, seed: int) -> None:
        order = planned.plan.order(seed, 0)
        self.indices = [batch.tolist() for batch in order.batches(range(len(order)))]
        self._source, self._makers = source, makers

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[Any, int, int, float]:
        """Returns a batch, its samples, the frames that they hold, and the seconds in which it was filled."""
        indices, began = self.indices[number], time.perf_counter()
        samples = [self._source.read(index) for index in indices]
        batch = collated(self._source, self._makers, samples, index=indices[0])
        frames, _ = _maker(self._source, self._makers, indices[0]).count_frames(samples)
        return batch, len(indices), frames, time.perf_counter() - began


def _uncached(bench: Bench) -> tuple[SampleSource, Planned]:
    """Returns the first rows of the raw data as a source, and a plan of small batches over them."""
    config, source = bench.first_rows, bench.on_the_fly
    longest = int(source.lengths["num_tokens"].max(initial=1))
    return source, plan_of(dataclasses.replace(config, plan=small(config.plan, longest=longest)), source, keep=False)


def small(settings: PlanConfig | None, *, longest: int) -> PlanConfig:
    """Returns settings of batches that are quickly made: what counts is what a sample takes, and a frame.

    longest: tokens of a sample, which a pack has to hold.
    """
    if isinstance(settings, PackConfig):
        shorter = min(settings.seq_len, max(settings.seq_len // 8, longest))
        whole: dict[str, Any] = {"overlong": "drop", "truncate_side": "right", "repeat_system": False}
        return dataclasses.replace(settings, seq_len=shorter, buffer_size=0, **whole)
    if isinstance(settings, WindowConfig):
        return dataclasses.replace(settings, batch_seconds=None, batch_size=4, lockstep=1)
    if isinstance(settings, BucketConfig):
        sizes: dict[str, Any] = {"batch_seconds": None, "batch_tokens": None, "calibration": None, "batch_size": 4}
        return dataclasses.replace(settings, **sizes, lockstep=1, locality="global")
    raise Skip("the config has no [plan]")


Round = Callable[[float], _Turn]


def _loader_round(loader: Loader, *, pace_s: float) -> Round:
    """Returns what runs a loader for some seconds, and goes on at its next call with the batches that come next.

    All parts of an epoch are to count: a plan has batches of one bucket in a row.
    pace_s: sleeps so long for each sample of a batch, as a step would: threads that rest now and then, and those that
    never do, are not given the same share of a busy machine. It sleeps no more than leaves time to see some batches.
    """
    hands = max(loader.settings.num_threads, 1)

    def run(seconds: float) -> _Turn:
        batches: list[Timed] = []
        before, began = _totals(loader), time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            for _ in loader:
                after = _totals(loader)
                # A batch handed out adds its own samples, frames and seconds.
                samples, frames, filled_s = (new - old for new, old in zip(after, before, strict=True))
                batches.append(Timed(int(samples), int(frames), filled_s))
                before = after
                if pace_s:
                    mean_s = sum(batch.seconds for batch in batches) / len(batches) / hands
                    time.sleep(min(pace_s * samples, _LONGEST_REST * mean_s))
                if (now := time.perf_counter()) - began > seconds:
                    break
        loader.load_state_dict(loader.state_dict())
        return _Turn(batches, now - began)

    return run


def _totals(loader: Loader) -> tuple[float, float, float]:
    report, times = loader.report(), loader.fill_times
    return report["samples"], report["frames"], times.read_s + times.collate_s


def _in_turns(rounds: dict[int, Round], seconds: float, *, own: int) -> dict[int, Rate]:
    """Returns the rates of several loaders that take turns. own: the config's, which has every second turn."""
    others = [number for number in rounds if number != own]
    turns = [number for other in others for number in (own, other)] if own in rounds and others else [*rounds]
    each_s = max(min(_ROUND_S, seconds / (2 * max(len(turns), 1))), 0.05)
    found = {number: _Turn([], 0.0) for number in rounds}
    for run in rounds.values():
        run(0.01)  # what is loaded at the first batch is loaded
    ends = time.perf_counter() + seconds
    while True:
        for number in turns:
            turn = rounds[number](each_s)
            found[number].batches += turn.batches
            found[number].seconds += turn.seconds
        if time.perf_counter() + len(turns) * each_s > ends:
            break
    return _rates(found)


def _rates(found: dict[int, _Turn]) -> dict[int, Rate]:
    """Returns the rate of each loader, all its turns together: a median would leave the long batches out.

    How samples and frames share a batch's seconds is the same for all loaders, and that with the most batches says it.
    What a batch takes is what a worker was busy with it: a turn's beginning and its end, at which some workers have
    nothing to do, do not count.
    """
    of_sample, of_frame = costs(max((turn.batches for turn in found.values()), key=len))
    rates = {}
    for number, turn in found.items():
        if turn.batches:
            expected = sum(of_sample * batch.samples + of_frame * batch.frames for batch in turn.batches)
            factor = sum(batch.seconds for batch in turn.batches) / max(expected, 1e-12)
            rates[number] = Rate(
                workers=number,
                samples_per_s=sum(batch.samples for batch in turn.batches) / max(turn.seconds, 1e-9),
                seconds_per_sample=factor * of_sample,
                seconds_per_frame=factor * of_frame,
                batches=len(turn.batches),
            )
    return rates


def _of_workers(data: Batches, number: int, seconds: float) -> Rate:
    """Returns the rate of a DataLoader behind its first batches, which wait for its processes to start."""
    loader: Any = DataLoader(data, batch_size=None, sampler=itertools.cycle(range(len(data))), num_workers=number)
    batches = iter(loader)
    for _ in range(number):
        next(batches)
    found, began = _Turn([], 0.0), time.perf_counter()
    while len(found.batches) < 2 or found.seconds < seconds:
        _, samples, frames, filled_s = next(batches)
        found.batches.append(Timed(samples, frames, filled_s))
        found.seconds = time.perf_counter() - began
    # Nobody waits for these batches, so all workers are busy; what is not filling is sending to this process.
    filled_s = sum(batch.seconds for batch in found.batches)
    factor = max(number * found.seconds / max(filled_s, 1e-9), 1.0)
    found.batches = [dataclasses.replace(batch, seconds=factor * batch.seconds) for batch in found.batches]
    return _rates({number: found})[number]


def pieces(bench: Bench, seconds: float) -> Pieces:
    """Returns what reading, collating and copying take, a sample each; and reading from the disk."""
    cold_ms, why = _cold(bench, seconds / 4)
    source, makers_ = bench.cached, makers(bench, bench.cached)
    order = bench.planned.plan.order(bench.config.loader.seed, 0)
    batches = [batch.tolist() for batch in order.batches(range(min(len(order), 64)))]
    read_ms, collate_ms, copy_ms = [], [], []
    count, began = 0, time.perf_counter()
    warm, ends = min(len(batches), 16), began + seconds
    copy = _copying()
    for number in range(10**9):
        indices = batches[number % len(batches)]
        samples, read_s = timed(lambda: [source.read(index) for index in indices])  # noqa: B023  called here
        batch, collate_s = timed(lambda: collated(source, makers_, samples, index=indices[0]))  # noqa: B023  likewise
        # The first ones check their bytes and load libraries.
        if number >= warm or (number and time.perf_counter() > began + seconds / 4):
            read_ms.append(1e3 * read_s / len(indices))
            collate_ms.append(1e3 * collate_s / len(indices))
            if copy is not None:
                copy_ms.append(1e3 * timed(lambda: copy(batch))[1] / len(indices))  # noqa: B023  likewise
            count += len(indices)
        if count and time.perf_counter() > ends:
            break
    found = {"cached read": read_ms, "collate": collate_ms, "copy to device": copy_ms}
    stages = tuple(
        StageCost(name=name, kind="cache", ms=statistics.median(each), samples=count)
        for name, each in found.items()
        if each
    )
    return Pieces(stages=stages, cold_ms=cold_ms, why_not_cold=why)


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


def _cold(bench: Bench, seconds: float) -> tuple[float | None, str]:
    """Returns milliseconds of a sample that lies on the disk alone, or why there is none."""
    caches = [part for part in parts_of(bench.cached) if isinstance(part, Cache)]
    times, why = [], "the cache is a view of samples"
    for cache in caches[:1]:
        again = open_cache(str(cache.folder), verify="never")
        for index in within(seconds, bench.random.permutation(len(again))[:32].tolist()):
            why = _dropped(again, index) or ""
            _, taken_s = timed(lambda: touch(again.read(index)))  # noqa: B023  called here
            if not why:
                times.append(1e3 * taken_s)
    return (statistics.median(times), "") if times else (None, why)


def _dropped(cache: Cache, index: int) -> str | None:
    own = [int(np.asarray(cache.slots)[index])]
    slots = {group: cache.items_of(group, index) if group in cache.listed else own for group in cache.groups}
    names = [name for name in cache.groups if name != TEXT] or [TEXT]
    files = [cache.shard_entries(name)[slot >> ROW_BITS][0] for name in names for slot in slots[name]]
    return next((problem for file in dict.fromkeys(files) if (problem := dropped(str(file), 0, 0))), None)


def touch(sample: Sample) -> None:
    """All bytes of a sample have been in memory then."""
    for value in sample.values():
        for part in value if isinstance(value, tuple) else (value,):
            np.ascontiguousarray(part).sum()
