from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan, Order
from forebay.plan.make_buckets import bucket_plan
from tests.plan.bucket.test_plan import RATE, made
from tests.strategies import durations, plan_settings


def epoch(order: Order) -> list[list[int]]:
    return [batch.tolist() for batch in order.batches(np.arange(len(order)))]


def some_plan(**settings: Any) -> BucketPlan:
    lengths = np.random.default_rng(5).integers(500, 32_000, 3000)
    return bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(**{"batch_seconds": 60.0, **settings}))


@given(durations(sample_rate_hz=RATE), plan_settings(), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_an_epoch_uses_every_sample_once(
    lengths: np.ndarray[Any, Any], settings: BucketConfig, seed: int, number: int
) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    order = Order(plan, seed=seed, epoch=number)
    batches = epoch(order)
    assert len(batches) == len(order) == plan.num_batches
    used = Counter(sample for batch in batches for sample in batch)
    assert sum(used.values()) == len(lengths) - plan.dropped.sum() + plan.repeated.sum()
    if settings.tail == "short":
        assert used == Counter(range(len(lengths)))
    elif settings.tail == "drop":
        assert max(used.values()) == 1
    else:
        assert set(used) == set(range(len(lengths)))


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_a_batch_is_of_one_bucket_and_of_its_size(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    order = Order(plan, seed=1, epoch=2)
    bucket_of = np.empty(len(lengths), dtype=int)
    bucket_of[plan.members] = np.repeat(np.arange(len(plan.batch_sizes)), plan.bucket_sizes)
    buckets = order.buckets(np.arange(len(order)))
    short: Counter[int] = Counter()
    for bucket, batch in zip(buckets.tolist(), epoch(order), strict=True):
        assert set(bucket_of[batch]) == {bucket}
        short[bucket] += len(batch) != plan.batch_sizes[bucket]
    assert max(short.values()) <= (settings.tail == "short")


@given(durations(sample_rate_hz=RATE), plan_settings(), st.data())
def test_seeking_equals_iterating(lengths: np.ndarray[Any, Any], settings: BucketConfig, data: st.DataObject) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    order = Order(plan, seed=3, epoch=1)
    batches, buckets = epoch(order), order.buckets(range(len(order))).tolist()
    fresh = Order(plan, seed=3, epoch=1)
    for position in data.draw(st.lists(st.integers(0, len(order) - 1), max_size=5)):
        assert fresh.batch(position).tolist() == batches[position]
        assert fresh.bucket(position) == buckets[position]


@given(durations(sample_rate_hz=RATE), plan_settings())
def test_micro_batches_come_in_lockstep_groups(lengths: np.ndarray[Any, Any], settings: BucketConfig) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    order = Order(plan, seed=0, epoch=0)
    buckets, size = order.buckets(np.arange(len(order))), settings.lockstep
    full = int((plan.batch_counts // size).sum())
    groups = buckets[: full * size].reshape(full, size)
    assert (groups == groups[:, :1]).all()
    behind = buckets[full * size :]
    assert np.count_nonzero(np.diff(behind)) + (len(behind) > 0) == np.count_nonzero(plan.batch_counts % size)
    assert Counter(behind.tolist()) == Counter(np.repeat(np.arange(len(plan.batch_sizes)), plan.batch_counts % size))


def test_buckets_are_drawn_in_proportion_to_what_they_still_have() -> None:
    lengths = np.repeat([1000, 4000, 6000], [40_000, 20_000, 4_000])
    plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(batch_size=4, lockstep=4))
    shares = plan.batch_counts[:3] / plan.num_batches
    order = Order(plan, seed=9, epoch=0)
    for start in range(0, len(order), 4000):
        seen = np.bincount(order.buckets(np.arange(start, min(start + 4000, len(order)))), minlength=7)[:3]
        deviation = np.abs(seen / seen.sum() - shares)
        assert (deviation < 5 * np.sqrt(shares * (1 - shares) / 1000)).all()


def test_seeds_and_epochs_differ() -> None:
    plan = some_plan()
    orders = [epoch(Order(plan, seed=seed, epoch=number)) for seed in (0, 1) for number in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert epoch(Order(plan, seed=1, epoch=1)) == orders[3]


def test_samples_meet_other_samples_in_the_next_epoch() -> None:
    plan = some_plan(edges_s=(40.0,), batch_seconds=None, batch_size=10)
    first, second = ({frozenset(batch) for batch in epoch(Order(plan, seed=0, epoch=n))} for n in (0, 1))
    assert not first & second


def test_dropped_samples_change_from_epoch_to_epoch() -> None:
    plan = bucket_plan(np.full(15, 500), sample_rate_hz=RATE, settings=BucketConfig(batch_size=8, tail="drop"))
    used = [{s for batch in epoch(Order(plan, seed=0, epoch=n)) for s in batch} for n in range(40)]
    assert all(len(samples) == 8 for samples in used)
    assert set.union(*used) == set(range(15))


def test_places_in_the_epoch_are_equally_likely() -> None:
    """Chi-square of where sample 0 stands over 1,600 epochs; far below 2 when uniform."""
    plan = bucket_plan(np.full(40, 500), sample_rate_hz=RATE, settings=BucketConfig(batch_size=1, lockstep=2))
    where = np.zeros(40)
    for number in range(1600):
        order = np.concatenate(Order(plan, seed=4, epoch=number).batches(np.arange(40)))
        where[np.flatnonzero(order == 0)[0]] += 1
    assert ((where - 40) ** 2 / 40).sum() / 39 < 2


def test_the_order_is_the_recorded_one() -> None:
    """A change here breaks every saved state: bump ORDER_VERSION with it."""
    plan = bucket_plan(
        np.arange(20) * 400, sample_rate_hz=RATE, settings=BucketConfig(edges_s=(3, 5), batch_size=3, lockstep=2)
    )
    assert epoch(Order(plan, seed=17, epoch=0)) == [
        [0, 3, 7],
        [4, 5, 1],
        [19, 17, 13],
        [8, 10, 18],
        [12, 11, 15],
        [14, 16, 9],
        [2, 6],
    ]


@pytest.mark.parametrize("position", [-1, 10**12])
def test_positions_outside_of_the_epoch_are_refused(position: int) -> None:
    order = Order(some_plan(), seed=0, epoch=0)
    with pytest.raises(IndexError, match=f"position {position} is outside of the epoch's {len(order)} micro-batches"):
        order.batch(position)


def test_no_position_is_no_batch() -> None:
    assert Order(some_plan(), seed=0, epoch=0).batches([]) == []


def test_epochs_start_at_0() -> None:
    with pytest.raises(PlanError, match="epoch is -1, wanted 0 or more"):
        Order(some_plan(), seed=0, epoch=-1)
