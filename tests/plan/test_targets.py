"""The figures that plans are made for, on the usual duration histogram at a budget of 240 s."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.plan import SAMPLE_RATE_HZ, usual_durations
from forebay.config import BucketConfig, WindowConfig
from forebay.config.plan import LengthsConfig
from forebay.plan.make import Samples, make_plan
from forebay.plan.statistics import batch_statistics
from tests.plan.kinds import of_lengths

COUNT = 300_000


def figures(settings: LengthsConfig) -> dict[str, Any]:
    durations = usual_durations(COUNT)
    samples = Samples(durations=durations, sample_rate_hz=SAMPLE_RATE_HZ, shards=lambda: np.arange(COUNT) // 512)
    return batch_statistics(of_lengths(make_plan(samples, settings)), durations)


def test_the_histogram_is_the_usual_one() -> None:
    found = np.histogram(usual_durations(COUNT) / SAMPLE_RATE_HZ, [1, 3, 5, 7, 10, 15, 20, 30])[0] / COUNT
    assert found == pytest.approx([0.126, 0.248, 0.137, 0.353, 0.131, 0.005, 0.0001], abs=0.003)


@pytest.mark.parametrize(
    ("settings", "padding", "cv"),
    [
        (BucketConfig(batch_seconds=240.0, k=64), 0.02, 0.05),
        (WindowConfig(batch_seconds=240.0), 0.05, 0.05),
        (BucketConfig(batch_seconds=240.0, k=64, locality="shards:64"), 0.02, 0.05),
        (BucketConfig(batch_seconds=240.0), 0.16, 0.05),
    ],
)
def test_padding_and_spread_are_below_their_targets(settings: LengthsConfig, padding: float, cv: float) -> None:
    found = figures(settings)
    assert found["padding"] <= padding
    assert found["cv"] <= cv
    assert found["padding_random_order"] > 0.5
