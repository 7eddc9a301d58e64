"""All that was measured of a config, what is predicted of it, and where its bottleneck is. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from forebay.measure import predict
from forebay.measure.predict import PlannedBatch, Prediction, Rate, StageCost, Sure, Timeline

FED = 0.05
"""The idle share below which data is no bottleneck: the step is."""
STEP = "step"
_WORKERS = (0, 2, 8)
"""Of the DataLoader whose runs without a cache are predicted."""
_AHEAD_A_WORKER = 2
"""torch's DataLoader asks each worker for two batches ahead."""


@dataclass(frozen=True, kw_only=True)
class MeasuredArms:
    """The answers of the arms. None: an arm that was not measured, `not_measured` says why."""

    cores: int
    prefetch: int
    num_threads: int
    num_workers: int
    """Of a build, as the config says; 0: as many as there are cores."""
    opened: predict.OpeningTimes | None = None
    listed: predict.Listed | None = None
    raw_read: predict.Reads | None = None
    made: predict.Made | None = None
    pieces: predict.Pieces | None = None
    plan: predict.PlanFacts | None = None
    cached: predict.Rates | None = None
    uncached: predict.Rates | None = None
    workers: predict.Rates | None = None
    steps: predict.StepTimes | None = None
    codecs: predict.Codecs | None = None
    not_measured: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    """What a process that imports the steps takes to start."""

    @property
    def is_sealed(self) -> bool:
        """Whether training would read a cache."""
        return self.opened is not None and self.opened.place is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the data's way was measured."""
        made = None if self.made is None or not self.made.samples else self.made
        return all(
            each is None for each in (self.raw_read, made, self.pieces, self.cached, self.uncached, self.workers)
        )

    @property
    def stages(self) -> list[StageCost]:
        """The stages of both ways and the step, each as long as one thread needs for a sample."""
        found = [*(self.made.stages if self.made else ()), *(self.pieces.stages if self.pieces else ())]
        return [*found, *([self.step] if self.step else [])]

    @cached_property
    def step(self) -> StageCost | None:
        """A sample's share of a step."""
        if self.steps is None or not self.batches:
            return None
        samples = sum(batch.samples for batch in self.batches)
        ms = 1e3 * sum(self.steps_s) / max(samples, 1)
        return StageCost(name=STEP, kind="step", ms=ms, samples=samples, note=self.steps.device)

    @property
    def batches(self) -> tuple[PlannedBatch, ...]:
        """Those of an epoch's beginning; none where there is no plan."""
        return () if self.plan is None else self.plan.batches

    @cached_property
    def steps_s(self) -> list[float]:
        """Seconds of each batch's step; zeros where nothing is known."""
        if self.steps is None:
            return [0.0] * len(self.batches)
        return predict.seconds_of(self.steps.times, [batch.room for batch in self.batches])

    def timeline(self, rate: Rate, *, prefetch: int) -> Timeline:
        """Returns how these batches go where a loader gives them, which fills so many of them ahead."""
        fills, cores, step_cores = [rate.fill_s(batch) for batch in self.batches], 0, 0.0
        if self.steps is not None and self.steps.device == "cpu":
            busy = [time.cpu_s / time.seconds for time in self.steps.times if time.seconds > 0]
            cores, step_cores = self.cores, statistics.fmean(busy) if busy else 0.0
        return predict.run(fills, self.steps_s, hands=rate.workers, ahead=prefetch, cores=cores, step_cores=step_cores)

    @cached_property
    def predictions(self) -> list[Prediction]:
        """The predicted runs, those without a cache first; none if there is no plan."""
        if not self.batches:
            return []
        found, uncached = [], dict(self.uncached.rates) if self.uncached else {}
        if self.num_threads in uncached:
            found.append(self._of_loader(uncached[self.num_threads], is_cached=False, sure="measured"))
        of_workers = dict(self.workers.rates) if self.workers else {}
        if 0 in uncached:
            of_workers[0] = uncached[0]
        for number in _WORKERS:
            if number in of_workers:
                found.append(self._of_workers(of_workers[number], sure="measured"))
            elif (rate := predict.more_workers(list(of_workers.values()), number, cores=self.cores)) is not None:
                found.append(self._of_workers(rate, sure="extrapolated"))
        sure: Sure = "measured" if self.is_sealed else "extrapolated"
        rates = sorted(self.cached.rates.items()) if self.cached else []
        return [*found, *(self._of_loader(rate, is_cached=True, sure=sure) for _, rate in rates)]

    def _of_loader(self, rate: Rate, *, is_cached: bool, sure: Sure) -> Prediction:
        way, number = "cached" if is_cached else "uncached", rate.workers
        name = f"{way}, loader, {number} thread{'' if number == 1 else 's'}"
        return self._prediction(rate, self.prefetch, name=name, is_cached=is_cached, sure=sure)

    def _of_workers(self, rate: Rate, *, sure: Sure) -> Prediction:
        """Returns what torch's DataLoader with worker processes would do."""
        name = f"uncached, DataLoader, {rate.workers} workers"
        return self._prediction(rate, max(_AHEAD_A_WORKER * rate.workers, 1), name=name, is_cached=False, sure=sure)

    def _prediction(self, rate: Rate, prefetch: int, *, name: str, is_cached: bool, sure: Sure) -> Prediction:
        assert self.plan is not None  # it gave the batches
        found, samples = self.timeline(rate, prefetch=prefetch), sum(batch.samples for batch in self.batches)
        return Prediction(
            name=name,
            is_cached=is_cached,
            workers=rate.workers,
            idle=None if self.steps is None else found.idle,
            epoch_s=found.total_s * self.plan.num_batches / len(self.batches),
            samples_per_s=samples / found.total_s if found.total_s else rate.samples_per_s,
            sure=sure,
        )

    def predicted(self, *, is_cached: bool) -> Prediction | None:
        """Returns what forebay's loader would do with the config's threads."""
        loaders = [each for each in self.predictions if each.is_cached == is_cached and "loader" in each.name]
        return next((each for each in loaders if each.workers == self.num_threads), None)

    @property
    def now(self) -> Prediction | None:
        """The run as things are."""
        return self.predicted(is_cached=self.is_sealed)

    @property
    def path(self) -> list[StageCost]:
        """The stages that a sample goes through as things are, the longest first, without the step."""
        if self.is_sealed:
            own = list(self.pieces.stages if self.pieces else ())
        else:
            own = [stage for stage in (self.made.stages if self.made else ()) if stage.kind == "raw"]
            own += [stage for stage in (self.pieces.stages if self.pieces else ()) if stage.name != "cached read"]
        return sorted(own, key=lambda stage: -stage.ms)

    @property
    def bottleneck(self) -> StageCost | None:
        """The part to look at first: the step if it is hardly kept waiting, else the data's longest stage."""
        now = self.now
        if self.step is not None and now is not None and now.idle is not None and now.idle < FED:
            return self.step
        return next(iter(self.path), self.step)

    @property
    def build_s(self) -> float | None:
        """The seconds of a build."""
        if self.made is None or self.listed is None:
            return None
        read_ms = 0.0 if self.raw_read is None else self.raw_read.cold_ms or self.raw_read.warm_ms
        made_s = predict.build_seconds(
            rows=self.listed.num_rows,
            cpu_ms=self.made.cpu_ms,
            read_ms=read_ms,
            workers=self.num_workers or self.cores,
            cores=self.cores,
            start_s=self.start_s,
        )
        return made_s + (self.listed.seconds if self.listed.is_whole else 0.0)

    @property
    def size_bytes(self) -> float | None:
        """The bytes of a cache: of the sealed one, else those of the sample in proportion."""
        if self.opened is not None and self.is_sealed:
            return self.opened.size_bytes
        return self.made.bytes_a_sample * self.listed.num_rows if self.made and self.listed else None
