from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make_buckets import bucket_plan
from tests.strategies import durations, plan_settings

RATE = 1000


def made(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> BucketPlan | None:
    """The plan, or None where `drop` leaves nothing to plan."""
    try:
        return bucket_plan(lengths, sample_rate_hz=RATE, settings=settings)
    except PlanError:
        if settings.tail != "drop":
            raise
        return None


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_every_sample_is_in_the_one_bucket_of_its_length(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    assert np.array_equal(np.sort(plan.members), np.arange(len(lengths)))
    lows = [Fraction(0), *(Fraction(repr(edge)) for edge in settings.edges_s)]
    for bucket, (start, stop) in enumerate(zip(plan.offsets[:-1], plan.offsets[1:], strict=True)):
        last = bucket == len(settings.edges_s) - 1
        for sample in plan.members[start:stop]:
            duration_s = Fraction(int(lengths[sample]), RATE)
            assert lows[bucket] <= duration_s
            assert last or duration_s < lows[bucket + 1]


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_no_batch_exceeds_the_budget_unless_one_sample_does(
    lengths: np.ndarray[Any, Any], settings: BucketConfig
) -> None:
    plan = made(lengths, settings)
    if plan is None or settings.batch_seconds is None:
        return
    for bucket, size in enumerate(plan.batch_sizes):
        longest = int(lengths[plan.members[plan.offsets[bucket] : plan.offsets[bucket + 1]]].max(initial=0))
        assert size == 1 or size * longest <= settings.batch_seconds * RATE


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_counts_add_up(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    places = plan.batch_counts * plan.batch_sizes
    if settings.tail == "short":
        assert not plan.dropped.any()
        assert not plan.repeated.any()
        assert (plan.batch_counts == -(-plan.bucket_sizes // plan.batch_sizes)).all()
    else:
        assert np.array_equal(places, plan.bucket_sizes - plan.dropped + plan.repeated)


@pytest.mark.parametrize("sample_rate_hz", [8_000, 16_000, 22_050, 44_100])
@pytest.mark.parametrize("edges_s", [(3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0), (0.1, 0.3, 0.7, 1.1, 2.3)])
def test_clips_exactly_on_an_edge_open_the_next_bucket(sample_rate_hz: int, edges_s: tuple[float, ...]) -> None:
    on_edge = [round(edge * sample_rate_hz) for edge in edges_s]
    lengths = np.array([length + step for length in on_edge for step in (-1, 0, 1)])
    plan = bucket_plan(lengths, sample_rate_hz=sample_rate_hz, settings=BucketConfig(edges_s=edges_s, batch_size=1))
    last = len(edges_s) - 1
    bucket_of = np.empty(len(lengths), dtype=int)
    bucket_of[plan.members] = np.repeat(np.arange(last + 1), plan.bucket_sizes)
    assert bucket_of.tolist() == [min(b + (step >= 0), last) for b in range(last + 1) for step in (-1, 0, 1)]


def test_batch_sizes_follow_the_budget_and_the_longest_kept_clip() -> None:
    lengths = np.array([1, 4, 9, 12, 25, 40]) * RATE
    settings = BucketConfig(edges_s=(3, 5, 7, 10, 15, 20, 30), batch_seconds=120)
    plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=settings)
    assert plan.batch_sizes.tolist() == [40, 24, 17, 12, 8, 6, 3]  # the last: 120 s / 40 s, not / 30 s
    assert plan.bucket_sizes.tolist() == [1, 1, 0, 1, 1, 0, 2]
    assert plan.members.dtype == np.int32


def test_a_clip_over_the_budget_is_a_batch_of_its_own() -> None:
    plan = bucket_plan(np.array([500_000]), sample_rate_hz=RATE, settings=BucketConfig(batch_seconds=120))
    assert plan.batch_sizes[-1] == 1
    assert plan.num_batches == 1


def test_given_batch_sizes_are_taken() -> None:
    plan = bucket_plan(np.arange(1, 9), sample_rate_hz=1, settings=BucketConfig(edges_s=(3, 6), batch_size=(3, 2)))
    assert plan.batch_sizes.tolist() == [3, 2]
    assert plan.batch_counts.tolist() == [1, 3]


@given(st.integers(1, 400))
@example(300)
def test_many_edges_have_many_buckets(count: int) -> None:
    settings = BucketConfig(edges_s=tuple(float(i + 1) for i in range(count)), batch_size=1)
    plan = bucket_plan(np.arange(count), sample_rate_hz=1, settings=settings)
    assert plan.bucket_sizes.tolist() == [1] * count
    assert plan.members.tolist() == list(range(count))


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([], {}, "no samples to plan"),
        ([5, -3, 4], {}, "duration of sample 1 is -3, wanted 0 or more"),
        ([5.0], {}, r"durations are float64 \[1\], wanted integers"),
        ([[5]], {}, r"durations are int64 \[1, 1\], wanted integers"),
        ([5], {"edges_s": (3.0, float("inf"))}, "edges_s must be finite"),
        ([5], {"batch_size": None, "batch_seconds": float("inf")}, "batch_seconds must be finite, got inf"),
        ([5], {"tail": "drop"}, '"drop" leaves none of 1 samples.*set plan.tail = "split"'),
        ([5], {"edges_s": tuple(range(1, 65_538))}, "65537 edges, at most 65536"),
    ],
)
def test_impossible_plans_are_refused(lengths: list[Any], settings: dict[str, Any], message: str) -> None:
    array = np.array(lengths) if lengths else np.array([], dtype=np.int64)
    with pytest.raises(PlanError, match=message):
        bucket_plan(array, sample_rate_hz=RATE, settings=BucketConfig(**{"batch_size": 4, **settings}))


def test_pieces_do_not_change_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(8).integers(0, 40_000, 1000)
    settings = BucketConfig(batch_seconds=60)
    whole = bucket_plan(lengths, sample_rate_hz=RATE, settings=settings)
    monkeypatch.setattr("forebay.plan.make_buckets.PIECE", 7)
    pieces = bucket_plan(lengths, sample_rate_hz=RATE, settings=settings)
    assert np.array_equal(pieces.members, whole.members)
    assert np.array_equal(pieces.offsets, whole.offsets)
