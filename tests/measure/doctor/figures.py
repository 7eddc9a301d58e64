"""Possible results of arms, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from forebay.config.tree import Config
from forebay.measure.diagnosis import MeasuredArms
from forebay.measure.predict import (
    Listed,
    Made,
    OpeningTimes,
    OtherPlan,
    Pieces,
    PlanFacts,
    PlannedBatch,
    Rate,
    Rates,
    StageCost,
    StepTime,
    StepTimes,
)
from forebay.steps.recipe import load_config

CONFIG = "configs/demo_speech.toml"
FRAMES = 1000
"""Of each of ten samples of a batch."""


def demo(*settings: str) -> Config:
    """Returns the demo's config with other settings."""
    return load_config(CONFIG, overrides=list(settings))


def rate(workers: int, *, batch_s: float) -> Rate:
    """Returns the rate of hands that each fill a batch in so many seconds."""
    return Rate(
        workers=workers,
        samples_per_s=10 * max(workers, 1) / batch_s,
        seconds_per_sample=0.0,
        seconds_per_frame=batch_s / (10 * FRAMES),
        batches=50,
    )


def plan(*, others: tuple[OtherPlan, ...] = (), padding: float = 0.1, is_fixed: bool = False) -> PlanFacts:
    """Returns an epoch of 100 equal batches."""
    batch = PlannedBatch(samples=10, frames=10 * FRAMES, room=round(10 * FRAMES / (1 - padding)), bucket=0)
    return PlanFacts(
        num_batches=100,
        num_samples=1000,
        batches=(batch,) * 50,
        padding=padding,
        is_exact=True,
        room_is_fixed=is_fixed,
        others=others,
    )


def steps(seconds: float, *, device: str = "given") -> StepTimes:
    """Returns steps that all take as long."""
    time = StepTime(bucket=0, samples=1, room=1, seconds=seconds, cpu_s=0.0 if device == "given" else seconds, steps=0)
    return StepTimes(device=device, times=(time,))


def raw_stages(**ms: float) -> tuple[StageCost, ...]:
    """Returns stages from raw data, by name."""
    return tuple(StageCost(name=name, kind="raw", ms=each, samples=100) for name, each in ms.items())


def measured(**changes: Any) -> MeasuredArms:
    """Returns what the doctor has measured of 1,000 rows without a cache, on four cores."""
    stages = raw_stages(decode=8.0, features=4.0)
    found: dict[str, Any] = {
        "cores": 4,
        "prefetch": 4,
        "num_threads": 2,
        "num_workers": 4,
        "opened": OpeningTimes(place=None, num_samples=0, hours=None, size_bytes=0),
        "listed": Listed(num_rows=1000, hours=2.0, is_whole=True, seconds=0.5),
        "made": Made(stages=stages, samples=100, cpu_ms=13.0, bytes_a_sample=1e5, failed=0),
        "pieces": Pieces(stages=(StageCost(name="collate", kind="cache", ms=0.1, samples=100),)),
        "plan": plan(),
        "uncached": Rates(rates={0: rate(0, batch_s=0.12), 2: rate(2, batch_s=0.14)}),
        "workers": Rates(rates={2: rate(2, batch_s=0.13)}),
        "cached": Rates(rates={0: rate(0, batch_s=0.002), 2: rate(2, batch_s=0.003)}),
        "steps": steps(0.05),
    }
    return MeasuredArms(**{**found, **changes})


def sealed(**changes: Any) -> MeasuredArms:
    """Returns the same with a sealed cache."""
    place = OpeningTimes(place="caches/demo", num_samples=1000, hours=2.0, size_bytes=10**8, num_shards=4)
    return measured(opened=place, **changes)
