"""All that was measured of a config, what is predicted of it, and where its bottleneck is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from forebay.measure.predict import (
    Codecs,
    Listed,
    Made,
    OpeningTimes,
    Pieces,
    PlanFacts,
    Prediction,
    Rates,
    Reads,
    StageCost,
    StepTimes,
    Training,
    build_seconds,
    more_workers,
)

FED = 0.05
"""The idle share below which data is no bottleneck: the step is."""
STEP = "step"
WORKERS = (0, 2, 8)
"""Of the DataLoader whose runs without a cache are predicted."""


def plural(number: int) -> str:
    """Returns what a number of things ends with."""
    return "" if number == 1 else "s"


@dataclass(frozen=True, kw_only=True)
class MeasuredArms:
    """What the arms told. None: an arm that was not measured, `not_measured` says why."""

    cores: int
    prefetch: int
    num_threads: int
    num_workers: int
    """Of a build, as the config says; 0: as many as there are cores."""
    opened: OpeningTimes | None = None
    listed: Listed | None = None
    raw_read: Reads | None = None
    made: Made | None = None
    pieces: Pieces | None = None
    plan: PlanFacts | None = None
    cached: Rates | None = None
    uncached: Rates | None = None
    workers: Rates | None = None
    steps: StepTimes | None = None
    codecs: Codecs | None = None
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
        training = self.training
        if training is None or training.steps is None:
            return None
        samples = sum(batch.samples for batch in training.batches)
        ms = 1e3 * sum(training.steps_s) / max(samples, 1)
        return StageCost(name=STEP, kind="step", ms=ms, samples=samples, note=training.steps.device)

    @cached_property
    def training(self) -> Training | None:
        """The consumer; None where there is no plan."""
        if self.plan is None or not self.plan.batches:
            return None
        return Training(
            batches=self.plan.batches,
            num_batches=self.plan.num_batches,
            steps=self.steps,
            cores=self.cores,
            prefetch=self.prefetch,
        )

    @cached_property
    def predictions(self) -> list[Prediction]:
        """What runs would do, those without a cache first."""
        if self.training is None:
            return []
        return [*self._of_uncached(self.training), *self._of_cached(self.training)]

    def _of_uncached(self, training: Training) -> list[Prediction]:
        found = []
        rates = dict(self.uncached.rates) if self.uncached else {}
        for number, rate in rates.items():
            if number == self.num_threads:
                name = f"uncached, loader, {number} thread{plural(number)}"
                found.append(training.of_loader(rate, name=name, is_cached=False))
        of_workers = dict(self.workers.rates) if self.workers else {}
        if 0 in rates:
            of_workers[0] = rates[0]
        for number in WORKERS:
            if number in of_workers:
                found.append(training.of_workers(of_workers[number], sure="measured"))
            elif (rate_of := more_workers(list(of_workers.values()), number, cores=self.cores)) is not None:
                found.append(training.of_workers(rate_of, sure="extrapolated"))
        return found

    def _of_cached(self, training: Training) -> list[Prediction]:
        sure = "measured" if self.is_sealed else "extrapolated"
        rates = self.cached.rates if self.cached else {}
        return [
            training.of_loader(rate, name=f"cached, loader, {number} thread{plural(number)}", is_cached=True, sure=sure)
            for number, rate in sorted(rates.items())
        ]

    def predicted(self, *, is_cached: bool, workers: int | None = None) -> Prediction | None:
        """Returns what forebay's loader would do, with the config's threads or others."""
        number = self.num_threads if workers is None else workers
        return next(
            (
                each
                for each in self.predictions
                if each.is_cached == is_cached and each.workers == number and "loader" in each.name
            ),
            None,
        )

    @property
    def now(self) -> Prediction | None:
        """What a run would do as things are."""
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
        """What to look at first: the step if it is hardly kept waiting, else the longest stage of the data's way."""
        now = self.now
        if self.step is not None and now is not None and now.idle is not None and now.idle < FED:
            return self.step
        return next(iter(self.path), self.step)

    @property
    def build_s(self) -> float | None:
        """What a build takes."""
        if self.made is None or self.listed is None:
            return None
        read_ms = 0.0 if self.raw_read is None else self.raw_read.cold_ms or self.raw_read.warm_ms
        workers = self.num_workers or self.cores
        rows = self.listed.num_rows
        machine: dict[str, Any] = {"workers": workers, "cores": self.cores, "start_s": self.start_s}
        made_s = build_seconds(rows=rows, cpu_ms=self.made.cpu_ms, read_ms=read_ms, **machine)
        return made_s + (self.listed.seconds if self.listed.is_whole else 0.0)

    @property
    def size_bytes(self) -> float | None:
        """What a cache takes: the sealed one's bytes, else those of the sample in proportion."""
        if self.opened is not None and self.is_sealed:
            return self.opened.size_bytes
        if self.made is None or self.listed is None:
            return None
        return self.made.bytes_a_sample * self.listed.num_rows
