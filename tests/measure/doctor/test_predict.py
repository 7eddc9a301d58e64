from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from forebay.measure.predict import StepTime, build_seconds, more_workers, seconds_of
from tests.measure.doctor.figures import measured, plan, rate, sealed, steps


def time(room: int, seconds: float, *, steps: int = 3) -> StepTime:
    return StepTime(bucket=0, samples=1, room=room, seconds=seconds, cpu_s=0.0, steps=steps)


def test_steps_lie_on_the_line_through_the_measured_ones() -> None:
    found = seconds_of([time(100, 1.0), time(300, 2.0)], [50, 100, 200, 300, 600])
    assert found == pytest.approx([1.0, 1.0, 1.5, 2.0, 4.0])


def test_one_measured_step_is_scaled_and_a_given_one_is_not() -> None:
    assert seconds_of([time(100, 1.0)], [100, 200]) == pytest.approx([1.0, 2.0])
    assert seconds_of(steps(0.5).times, [100, 200]) == [0.5, 0.5]


def test_more_workers_than_cores_share_them() -> None:
    two = rate(2, batch_s=0.1)
    eight = more_workers([two], 8, cores=2)
    assert eight is not None
    assert eight.samples_per_s == pytest.approx(two.samples_per_s)
    assert eight.seconds_per_frame == pytest.approx(4 * two.seconds_per_frame)
    on_eight = more_workers([two], 8, cores=8)
    assert on_eight is not None
    assert on_eight.samples_per_s == pytest.approx(4 * two.samples_per_s)
    assert more_workers([], 8, cores=2) is None


def test_a_build_takes_the_cores_that_there_are() -> None:
    assert build_seconds(rows=1000, cpu_ms=9.0, read_ms=1.0, workers=8, cores=2) == pytest.approx(5.0)


def test_a_build_waits_for_its_processes_to_start() -> None:
    """The command first, then eight workers on two cores."""
    cost: dict[str, Any] = {"rows": 1000, "cpu_ms": 9.0, "read_ms": 1.0}
    assert build_seconds(**cost, workers=8, cores=2, start_s=3.0) == pytest.approx(5.0 + 3.0 + 12.0)
    assert build_seconds(**cost, workers=1, cores=2, start_s=3.0) == pytest.approx(10.0 + 3.0 + 3.0)


def test_a_run_without_a_cache_waits_and_one_with_a_cache_does_not() -> None:
    found = measured()
    now, then = found.predicted(is_cached=False), found.predicted(is_cached=True)
    assert now is not None
    assert then is not None
    assert now.idle == pytest.approx(1 - 0.05 / 0.07, abs=0.02)  # two hands, 0.14 s a batch
    assert then.idle is not None
    assert then.idle < 0.01
    assert now.epoch_s == pytest.approx(7.0, rel=0.05)
    assert {each.name for each in found.predictions} == {
        "uncached, loader, 2 threads",
        "uncached, DataLoader, 0 workers",
        "uncached, DataLoader, 2 workers",
        "uncached, DataLoader, 8 workers",
        "cached, loader, 0 threads",
        "cached, loader, 2 threads",
    }
    assert found.now == now
    assert sealed().now == dataclasses.replace(then, sure="measured")


def test_nothing_is_said_of_idle_where_nobody_knows_the_step() -> None:
    found = measured(steps=None)
    assert [each.idle for each in found.predictions] == [None] * len(found.predictions)
    assert found.step is None


def test_the_bottleneck_is_the_longest_stage_where_the_device_waits_and_the_step_where_it_does_not() -> None:
    assert measured().bottleneck.name == "decode"  # type: ignore[union-attr]
    assert measured(steps=steps(5.0)).bottleneck.name == "step"  # type: ignore[union-attr]
    assert measured(steps=None).bottleneck.name == "decode"  # type: ignore[union-attr]
    assert sealed(steps=None).bottleneck.name == "collate"  # type: ignore[union-attr]
    assert sealed().bottleneck.name == "step"  # type: ignore[union-attr]


def test_the_step_counts_a_sample_of_a_batch() -> None:
    found = measured(steps=steps(0.5), plan=plan()).step
    assert found is not None
    assert found.ms == pytest.approx(50.0)
