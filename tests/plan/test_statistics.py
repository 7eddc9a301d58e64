from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from forebay.config import BucketConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import Order
from forebay.plan.cursor import mixed_steps
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.statistics import batch_statistics
from tests.plan.bucket.test_plan import RATE, made
from tests.strategies import durations, plan_settings


def padding(batches: list[Any], lengths: np.ndarray[Any, Any]) -> float:
    held = sum(int(lengths[batch].sum()) for batch in batches)
    padded_to = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    return 1 - held / padded_to if padded_to else 0.0


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_padding_is_that_of_the_epoch_that_is_trained_on(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    frames = lengths // 7 + 1
    found = batch_statistics(plan, lengths, frames=frames, seed=5)
    order = Order(plan, seed=5, epoch=0)
    batches, buckets = order.batches(np.arange(len(order))), order.buckets(np.arange(len(order)))
    assert found["padding"] == pytest.approx(padding(batches, frames), abs=1e-6)
    for bucket in found["buckets"]:
        own = [batch for batch, number in zip(batches, buckets, strict=True) if number == bucket["bucket_id"]]
        assert bucket["padding"] == pytest.approx(padding(own, frames), abs=1e-6)
        assert bucket["batches"] == len(own)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_totals_are_sums(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    found = batch_statistics(plan, lengths)
    for total, part in (("total_samples", "samples"), ("total_batches", "batches"), ("dropped", "dropped")):
        assert found[total] == sum(bucket[part] for bucket in found["buckets"])
    assert found["repeated"] == sum(bucket["repeated"] for bucket in found["buckets"])
    assert found["total_hours"] == pytest.approx(lengths.sum() / RATE / 3600, abs=1e-6)
    assert sum(bucket["pct_samples"] for bucket in found["buckets"]) == pytest.approx(100, abs=0.01)
    assert max(bucket["max_duration"] for bucket in found["buckets"]) == lengths.max() / RATE


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_worlds_account_for_every_micro_batch(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    order = Order(plan, seed=0, epoch=0)
    for world, found in batch_statistics(plan, lengths)["worlds"].items():
        extra = found["repeated_batches"] + found["weightless_batches"] - found["dropped_batches"]
        assert found["steps"] * int(world) == len(order) + extra
        buckets = order.buckets(np.arange(len(order)))
        assert found["mixed_steps"] == mixed_steps(buckets, int(world), tail=settings.tail)


def test_a_small_plan_by_hand() -> None:
    lengths = np.array([1, 2, 4, 6, 8, 40]) * RATE
    plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(edges_s=(3, 7), batch_size=2))
    found = batch_statistics(plan, lengths)
    assert found["buckets"][0] == {
        "bucket_id": 0,
        "range": "0.0-3.0s",
        "samples": 2,
        "hours": 0.000833,
        "pct_samples": 33.3333,
        "pct_hours": 4.918,
        "mean_duration": 1.5,
        "max_duration": 2.0,
        "batch_size": 2,
        "batches": 1,
        "padding": 0.25,
        "dropped": 0,
        "repeated": 0,
    }
    assert found["buckets"][1]["range"] == "3.0-7.0s"
    assert found["buckets"][1]["max_duration"] == 40.0
    assert found["mean_batch_size"] == 2


def test_chunks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(3).integers(500, 32_000, 5000)
    plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(batch_seconds=60, tail="pad"))
    whole = batch_statistics(plan, lengths, seed=2)
    monkeypatch.setattr("forebay.plan.statistics.CHUNK", 50)
    assert batch_statistics(plan, lengths, seed=2) == whole


def test_buckets_pad_less_than_a_shuffle() -> None:
    lengths = np.random.default_rng(3).integers(500, 32_000, 20_000)
    plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(batch_seconds=240))
    found = batch_statistics(plan, lengths)
    assert found["padding"] < 0.2 < 0.4 < found["padding_random_order"]


@pytest.mark.parametrize("name", ["durations", "frames"])
def test_lengths_of_another_cache_are_refused(name: str) -> None:
    lengths = np.arange(1, 11)
    plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(batch_size=2))
    given_lengths = {"durations": lengths, "frames": lengths, name: lengths[:9]}
    with pytest.raises(PlanError, match=f"{name} holds 9 samples, the plan 10"):
        batch_statistics(plan, given_lengths["durations"], frames=given_lengths["frames"])
