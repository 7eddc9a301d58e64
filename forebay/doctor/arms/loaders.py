"""The arms of loaders: how fast batches come when nobody does anything with them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from forebay.config.plan import BucketConfig, PackConfig, PlanConfig, WindowConfig
from forebay.doctor.bench import Bench
from forebay.doctor.figures import Rate, Rates, Skip
from forebay.plan.make import Planned, plan_of
from forebay.steps.batch import fresh
from forebay.store.source import SampleSource, SourceUnion, parts_of
from forebay.train.collate.collator import BatchMaker, Collator
from forebay.train.loader import Loader
from forebay.train.select import loader_settings, pack_forms
from forebay.train.uncached.source import uncached_source

CACHED_THREADS = (0, 1, 2, 4)
WORKERS = (2, 8)
_ROUND_S = 0.4
"""Of one loader, before the next one has its turn: a busy neighbour meets all of them."""
_UNCACHED_ROWS = 512


@dataclass(slots=True)
class _Counted:
    batches: int = 0
    samples: int = 0
    frames: int = 0
    seconds: float = 0.0


def cached(bench: Bench, seconds: float) -> Rates:
    """Returns the loader over the cache with 0, 1, 2 and 4 threads, and with those of the config."""
    numbers = sorted({*CACHED_THREADS, bench.config.loader.num_threads})
    fit, skipped = _fit(numbers, bench.task.cores, "threads")
    loaders = {number: loader_over(bench, bench.cached, bench.planned, num_threads=number) for number in fit}
    return Rates(rates=_in_turns({n: _loader_round(loader) for n, loader in loaders.items()}, seconds), skipped=skipped)


def uncached(bench: Bench, seconds: float) -> Rates:
    """Returns the loader without a cache, with 0 threads and with those of the config."""
    source, planned = _uncached(bench)
    numbers = sorted({0, bench.config.loader.num_threads})
    fit, skipped = _fit(numbers, bench.task.cores, "threads")
    loaders = {number: loader_over(bench, source, planned, num_threads=number) for number in fit}
    return Rates(rates=_in_turns({n: _loader_round(loader) for n, loader in loaders.items()}, seconds), skipped=skipped)


def workers(bench: Bench, seconds: float) -> Rates:
    """Returns torch's DataLoader without a cache, with 2 and 8 worker processes that collate."""
    fit, skipped = _fit(WORKERS, bench.task.cores, "worker processes")
    if not fit:
        return Rates(rates={}, skipped=skipped)
    source, planned = _uncached(bench)
    data = Batches(source, planned, makers(bench, source), seed=bench.config.loader.seed)
    rates = {number: _of_workers(data, number, seconds / len(fit)) for number in fit}
    return Rates(rates=rates, skipped=skipped)


def _fit(numbers: Sequence[int], cores: int, what: str) -> tuple[list[int], dict[int, str]]:
    fit = [number for number in numbers if number <= cores]
    return fit, {n: f"{n} {what} on {cores} core{'s' * (cores > 1)}" for n in numbers if n not in fit}


def loader_over(bench: Bench, source: SampleSource, planned: Planned, *, num_threads: int) -> Loader:
    """Returns the loader that `make_loader` makes of a config, over another source and with other threads."""
    config = bench.config
    collator, finish = None, None
    if config.modality == "vision":
        collator, finish = pack_forms(config, source, device=None, as_tensordict=False)
    settings = dataclasses.replace(loader_settings(config), num_threads=num_threads)
    return Loader(source, planned, settings, dp_rank=0, dp_world_size=1, collator=collator, finish=finish)


def makers(bench: Bench, source: SampleSource) -> list[BatchMaker]:
    """Returns what makes the batches of each part of a source, as the config wants them."""
    config, settings = bench.config, loader_settings(bench.config)
    if config.modality == "vision":
        return [pack_forms(config, source, device=None, as_tensordict=False)[0]]
    return [Collator(part, dtype=settings.dtype, padding_side=settings.padding_side) for part in parts_of(source)]


class Batches(Dataset[Any]):
    """The batches of an epoch by their number, whole: what worker processes make and send."""

    def __init__(self, source: SampleSource, planned: Planned, makers: Sequence[BatchMaker], *, seed: int) -> None:
        order = planned.plan.order(seed, 0)
        self.indices = [batch.tolist() for batch in order.batches(range(len(order)))]
        self._source, self._makers = source, makers

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[Any, int, int]:
        """Returns a batch, its samples, and the frames that they hold."""
        indices = self.indices[number]
        samples = [self._source.read(index) for index in indices]
        part = self._source.part(indices[0]) if isinstance(self._source, SourceUnion) else 0
        maker = self._makers[part]
        return maker.collate(samples, allocate=fresh), len(indices), maker.count_frames(samples)[0]


def _uncached(bench: Bench) -> tuple[SampleSource, Planned]:
    """Returns the first rows of the raw data as a source, and a plan of small batches over them."""
    bench.manifest  # noqa: B018  raises Skip where there is no raw data
    limit = min(_UNCACHED_ROWS, bench.task.limit or _UNCACHED_ROWS)
    config = dataclasses.replace(bench.limited(limit), plan=small(bench.config.plan))
    if bench.on_the_fly is None:
        bench.on_the_fly = uncached_source(config)
    return bench.on_the_fly, plan_of(config, bench.on_the_fly, keep=False)


def small(settings: PlanConfig | None) -> PlanConfig:
    """Returns settings of batches that are quickly made: what counts is what a frame takes."""
    if isinstance(settings, PackConfig):
        return dataclasses.replace(settings, buffer_size=0, overlong="drop")
    if isinstance(settings, WindowConfig):
        return dataclasses.replace(settings, batch_seconds=None, batch_size=4, lockstep=1)
    if isinstance(settings, BucketConfig):
        return dataclasses.replace(
            settings,
            batch_seconds=None,
            batch_tokens=None,
            calibration=None,
            batch_size=4,
            lockstep=1,
            locality="global",
        )
    raise Skip("the config has no [plan]")


Round = Callable[[float], _Counted]


def _loader_round(loader: Loader) -> Round:
    """Returns what runs a loader for some seconds, from where its epoch begins."""

    def run(seconds: float) -> _Counted:
        before, began = loader.report(), time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            for _ in loader:
                if (now := time.perf_counter()) - began > seconds:
                    break
        after = loader.report()
        found = {name: int(after[name] - before[name]) for name in ("batches", "samples", "frames")}
        return _Counted(**found, seconds=now - began)

    return run


def _in_turns(rounds: dict[int, Round], seconds: float) -> dict[int, Rate]:
    """Returns the rates of several loaders that take turns, the median of each one's turns."""
    each_s = max(min(_ROUND_S, seconds / (3 * max(len(rounds), 1))), 0.05)
    found: dict[int, list[_Counted]] = {number: [] for number in rounds}
    for run in rounds.values():
        run(0.01)  # what is loaded at the first batch is loaded
    ends = time.perf_counter() + seconds
    while True:
        for number, run in rounds.items():
            found[number].append(run(each_s))
        if time.perf_counter() + len(rounds) * each_s > ends:
            break
    return {number: _rate(number, counted) for number, counted in found.items() if counted}


def _rate(workers: int, counted: Sequence[_Counted]) -> Rate:
    """Returns the median rate of some turns. Batches that were half made when a turn ended count as halves."""
    hands = max(workers, 1)
    seconds_per_frame, samples_per_s = [], []
    for each in counted:
        if not each.batches:
            continue
        whole = 1 + (hands - 1) / 2 / each.batches
        seconds_per_frame.append(hands * each.seconds / whole / max(each.frames, 1))
        samples_per_s.append(each.samples * whole / each.seconds)
    return Rate(
        workers=workers,
        samples_per_s=statistics.median(samples_per_s),
        seconds_per_frame=statistics.median(seconds_per_frame),
        batches=sum(each.batches for each in counted),
    )


def _of_workers(data: Batches, number: int, seconds: float) -> Rate:
    """Returns the rate of a DataLoader behind its first batches, which wait for its processes to start."""
    loader: Any = DataLoader(data, batch_size=None, sampler=_endless(len(data)), num_workers=number)
    batches = iter(loader)
    for _ in range(number):
        next(batches)
    counted, began = _Counted(), time.perf_counter()
    while counted.batches < 2 or counted.seconds < seconds:
        _, samples, frames = next(batches)
        counted.batches, counted.samples, counted.frames = (
            counted.batches + 1,
            counted.samples + samples,
            counted.frames + frames,
        )
        counted.seconds = time.perf_counter() - began
    rate = _rate(1, [counted])
    return dataclasses.replace(rate, workers=number, seconds_per_frame=rate.seconds_per_frame * number)


class _Endless(torch.utils.data.Sampler[int]):
    """The numbers of an epoch's batches again and again."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(self._count)


def _endless(count: int) -> _Endless:
    return _Endless(count)
