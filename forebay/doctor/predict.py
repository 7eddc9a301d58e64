"""What measured rates say about a run: the idle share of its device, the time of an epoch and of a build. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.doctor.figures import PlannedBatch, Rate, Steps, StepTime
from forebay.doctor.pipeline import Shared, Timeline, run

Sure = str
"""`measured`, `extrapolated` or `rule`."""

_AHEAD_A_WORKER = 2
"""torch's DataLoader asks each worker for two batches ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A way to read, and what a run by it would do."""

    name: str
    is_cached: bool
    workers: int
    idle: float | None
    """Share of the time in which the device waits; None where nothing says what a step takes."""
    epoch_s: float
    samples_per_s: float
    sure: Sure


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is known of the consumer: the batches of an epoch's beginning, their steps, the cores."""

    batches: tuple[PlannedBatch, ...]
    num_batches: int
    steps: Steps | None
    cores: int
    prefetch: int

    @property
    def steps_s(self) -> list[float]:
        """Seconds of each batch's step; zeros where nothing is known."""
        if self.steps is None:
            return [0.0] * len(self.batches)
        return seconds_of(self.steps.times, [batch.room for batch in self.batches])

    @property
    def shared(self) -> Shared | None:
        """The cores, where the steps need them too."""
        if self.steps is None or self.steps.device != "cpu":
            return None
        busy = [time.cpu_s / time.seconds for time in self.steps.times if time.seconds > 0]
        return Shared(cores=self.cores, step_cores=float(np.mean(busy)) if busy else 0.0)

    def timeline(self, rate: Rate, *, prefetch: int | None = None) -> Timeline:
        """Returns how these batches go where a loader gives them. prefetch: None: that of the config."""
        fills = [rate.fill_s(batch) for batch in self.batches]
        ahead = self.prefetch if prefetch is None else prefetch
        return run(fills, self.steps_s, hands=rate.workers, ahead=ahead, shared=self.shared)

    def of_loader(self, rate: Rate, *, name: str, is_cached: bool, sure: Sure = "measured") -> Prediction:
        """Returns what forebay's loader would do."""
        return self._prediction(self.timeline(rate), rate, name=name, is_cached=is_cached, sure=sure)

    def of_workers(self, rate: Rate, *, sure: Sure) -> Prediction:
        """Returns what torch's DataLoader with worker processes would do."""
        found = self.timeline(rate, prefetch=max(_AHEAD_A_WORKER * rate.workers, 1))
        name = f"uncached, DataLoader, {rate.workers} workers"
        return self._prediction(found, rate, name=name, is_cached=False, sure=sure)

    def _prediction(self, found: Timeline, rate: Rate, *, name: str, is_cached: bool, sure: Sure) -> Prediction:
        share = self.num_batches / max(len(self.batches), 1)
        samples = sum(batch.samples for batch in self.batches)
        return Prediction(
            name=name,
            is_cached=is_cached,
            workers=rate.workers,
            idle=None if self.steps is None else found.idle,
            epoch_s=found.total_s * share,
            samples_per_s=samples / found.total_s if found.total_s else rate.samples_per_s,
            sure=sure,
        )


def seconds_of(times: Sequence[StepTime], rooms: Sequence[int]) -> list[float]:
    """Returns what steps on batches of these rooms take, on the line through the measured ones.

    Beyond the smallest and the largest measured room a step takes in proportion to its room.
    """
    known = sorted({time.room: time.seconds for time in times}.items())
    xs, ys = [room for room, _ in known], [seconds for _, seconds in known]
    if len(known) == 1:
        fixed = times[0].steps == 0  # given, not measured: it is that of every batch
        return [ys[0] if fixed else ys[0] * room / max(xs[0], 1) for room in rooms]
    inside = np.interp(rooms, xs, ys)
    above = [ys[-1] * room / xs[-1] if room > xs[-1] else None for room in rooms]
    return [float(value if more is None else more) for value, more in zip(inside, above, strict=True)]


def more_workers(rates: Sequence[Rate], workers: int, *, cores: int) -> Rate | None:
    """Returns the rate of so many workers by the one that was measured with the most: work shares the cores evenly.

    None where nothing was measured.
    """
    if not rates:
        return None
    base = max(rates, key=lambda rate: rate.workers)
    own = max(base.workers, 1)
    slower = max(workers, cores) / cores / (max(own, cores) / cores)
    speed = min(workers, cores) / min(own, cores)
    return Rate(
        workers=workers,
        samples_per_s=base.samples_per_s * speed,
        seconds_per_sample=base.seconds_per_sample * slower,
        seconds_per_frame=base.seconds_per_frame * slower,
        batches=0,
    )


def build_seconds(*, rows: int, cpu_ms: float, read_ms: float, workers: int, cores: int, start_s: float = 0.0) -> float:
    """Returns what a build takes: the steps of all rows over its workers, and one read of all to hash them.

    start_s: of a process. Before the steps the command starts, then the workers, as many at once as there are cores.
    """
    hands = max(min(workers, cores), 1)
    return start_s * (1 + max(workers / cores, 1)) + rows * (cpu_ms + read_ms) / 1e3 / hands
