"""Predictions of a run by measured rates, in plain values, which the child that measured sends its parent. Pure.

How long a step waits for its batch: a queue between hands that fill batches and a loop that takes them. `hands` threads
or processes take batches in their order, at most `ahead` of these are asked for before the loop wants them, and a batch
takes what its frames take. The loop takes a batch, then steps. Without hands the loop fills each batch itself. On a CPU
that trains, step and hands share the cores: where they want more cores than there are, both become slower in
proportion.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The seconds of an epoch, or of its beginning."""

    total_s: float
    wait_s: float
    fill_s: float
    """Seconds of all hands together."""

    @property
    def idle(self) -> float:
        """The share in which the loop waited."""
        return self.wait_s / self.total_s if self.total_s else 0.0


def run(
    fills_s: Sequence[float], steps_s: Sequence[float], *, hands: int, ahead: int, cores: int = 0, step_cores: float = 0
) -> Timeline:
    """Returns what a loop over some batches takes. fills_s, steps_s: of each batch in its order, as many of both.

    cores: that the steps and the hands share, of which a step keeps `step_cores` busy; 0: a step needs no core.
    """
    found = _run(fills_s, steps_s, hands=hands, ahead=ahead)
    if not cores or not hands or not found.total_s:
        return found
    slower = (found.fill_s + step_cores * sum(steps_s)) / found.total_s / cores
    if slower <= 1:
        return found
    return _run([slower * s for s in fills_s], [slower * s for s in steps_s], hands=hands, ahead=ahead)


def _run(fills_s: Sequence[float], steps_s: Sequence[float], *, hands: int, ahead: int) -> Timeline:
    if not hands:
        return Timeline(total_s=sum(fills_s) + sum(steps_s), wait_s=sum(fills_s), fill_s=sum(fills_s))
    free = [0.0] * hands
    asked: list[float] = []  # when the loop wanted each batch
    now = wait_s = 0.0
    done: list[float] = []
    for number, step_s in enumerate(steps_s):
        asked.append(now)
        # A batch is given to a hand when the loop wants the one that stands `ahead` places before it.
        while len(done) < min(number + ahead + 1, len(fills_s)):
            place = len(done)
            given = 0.0 if place < ahead else asked[place - ahead]
            begins = max(heapq.heappop(free), given)
            done.append(begins + fills_s[place])
            heapq.heappush(free, done[-1])
        ready = max(now, done[number])
        wait_s += ready - now
        now = ready + step_s
    return Timeline(total_s=now, wait_s=wait_s, fill_s=sum(fills_s))


Kind = Literal["raw", "build", "cache", "step"]


class Skip(Exception):  # noqa: N818  an arm that cannot be, which is no error
    """An arm cannot be measured here; its text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """The cost of one stage of a sample's way in one thread."""

    name: str
    kind: Kind
    """`raw`: on the way out of raw data; `build`: what only a build does; `cache`: on the way out of a cache."""
    ms: float
    """Milliseconds a sample."""
    samples: int
    """Samples that it was measured on."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpeningTimes:
    """The times of opening what training reads. place: the sealed cache of the config, None if there is none."""

    place: str | None
    num_samples: int
    hours: float | None
    size_bytes: int
    num_shards: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The raw data."""

    num_rows: int
    hours: float | None
    is_whole: bool
    """Whether all rows were listed; False: the first ones only."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """Reading encoded samples, from the disk and from memory."""

    warm_ms: float
    cold_ms: float | None
    """None: no sample could be made cold."""
    mean_bytes: float
    samples: int
    why_not_cold: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The sample of rows that was made as a build makes it, in one thread."""

    stages: tuple[StageCost, ...]
    samples: int
    cpu_ms: float
    """CPU milliseconds a sample, in all stages."""
    bytes_a_sample: float
    failed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """The cost of the parts of a batch out of a cache, in one thread."""

    stages: tuple[StageCost, ...]
    cold_ms: float | None = None
    why_not_cold: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The rate of a loader. samples_per_s: with the rests of a loop whose step is known."""

    workers: int
    samples_per_s: float
    seconds_per_sample: float
    seconds_per_frame: float
    """What one worker takes for a batch, while all work, is the sum over its samples and over their frames."""
    batches: int

    def fill_s(self, batch: PlannedBatch) -> float:
        """Returns what one worker takes for a batch."""
        return self.seconds_per_sample * batch.samples + self.seconds_per_frame * batch.frames


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Loaders by the number of their workers. skipped: why some were not measured."""

    rates: Mapping[int, Rate]
    skipped: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """One batch of the plan. frames: of its samples; room: that they are padded to."""

    samples: int
    frames: int
    room: int
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """The plan of the config over what is known of the samples' lengths."""

    num_batches: int
    num_samples: int
    batches: tuple[PlannedBatch, ...]
    """The first ones of an epoch."""
    padding: float
    is_exact: bool
    """Whether the lengths are those of all samples; False: those of a sample of them, drawn again and again."""
    room_is_fixed: bool = False
    """Whether a clip takes as much room whatever its length, so that padding costs a step nothing."""
    others: tuple[OtherPlan, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPlan:
    """The plan that another setting of `[plan]` would give."""

    settings: Mapping[str, object]
    padding: float
    num_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Training steps on batches of one shape."""

    bucket: int
    samples: int
    room: int
    seconds: float
    cpu_s: float
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Training steps. device: what they ran on; `given` where the user said what a step takes."""

    device: str
    times: tuple[StepTime, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codecs:
    """A pack of images by codec: milliseconds to read, and bytes."""

    read_ms: Mapping[str, float]
    bytes_a_sample: Mapping[str, float]
    own: str
    samples_a_pack: float


Sure = Literal["measured", "extrapolated", "rule"]


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


@dataclass(frozen=True, slots=True)
class Timed:
    """One batch, and the seconds in which a worker filled it."""

    samples: int
    frames: int
    seconds: float


def costs(timed: Sequence[Timed]) -> tuple[float, float]:
    """Returns the seconds of a sample and of a frame, neither below 0, that say best what the batches took.

    Together they give the seconds that all batches took: what an epoch takes counts, more than any one batch. From 3
    batches on it is told whether samples or frames count, from 8 on how much of each; before that frames do.
    """
    seconds = np.array([each.seconds for each in timed])
    parts = np.array([[each.samples, each.frames] for each in timed], np.float64)
    total, sums = float(seconds.sum()), parts.sum(axis=0)
    if not len(timed) or not sums[1]:
        return (total / float(sums[0]) if len(timed) and sums[0] else 0.0), 0.0
    if len(timed) >= 8:
        found, *_ = np.linalg.lstsq(parts, seconds, rcond=None)
        if (found >= 0).all() and (guess := float(sums @ found)) > 0:
            return float(found[0]) * total / guess, float(found[1]) * total / guess
    if len(timed) >= 3:
        by_samples, by_frames = (float(np.abs(seconds - parts[:, i] * total / sums[i]).sum()) for i in (0, 1))
        if by_samples < by_frames:
            return total / float(sums[0]), 0.0
    return 0.0, total / float(sums[1])
