from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.statistics import batch_statistics
from tests.plan.kinds import RATE
from tests.strategies import durations

Array = np.ndarray[Any, Any]


def local_plan(lengths: Array, shards: Array | None, *, window: int = 4, **settings: Any) -> BucketPlan:
    changes = {"batch_size": 4, "lockstep": 2, **settings}
    return bucket_plan(
        lengths,
        sample_rate_hz=RATE,
        settings=BucketConfig(locality=f"shards:{window}", **changes),
        shards=shards,
    )


@given(durations(sample_rate_hz=RATE), st.data())
def test_any_numbering_of_shards_uses_every_sample_once(lengths: Array, data: st.DataObject) -> None:
    shards = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))))
    plan = local_plan(lengths, shards, window=data.draw(st.integers(1, 12)))
    order = plan.order(1, 2)
    line = np.concatenate(order.batches(np.arange(len(order))))
    assert np.array_equal(np.sort(line), np.arange(len(lengths)))
    assert plan.shard_counts is not None
    assert plan.shard_counts.sum(axis=1).tolist() == np.bincount(shards, minlength=len(plan.shard_counts)).tolist()


def test_the_samples_at_any_place_lie_in_few_shards() -> None:
    lengths = np.random.default_rng(3).integers(1000, 30_000, 20_000)
    shards = np.arange(20_000) // 100
    for window in (4, 8, 32):
        plan = local_plan(lengths, shards, window=window, edges_s=(10.0, 20.0, 30.0))
        order = plan.order(0, 0)
        full = int((plan.batch_counts // 2).sum()) * 2
        for start in range(0, full, 50):
            group = np.concatenate(order.batches(np.arange(start // 2 * 2, start // 2 * 2 + 2)))
            assert len(np.unique(shards[group])) <= window
        stretch = np.concatenate(order.batches(np.arange(full // 2, full // 2 + 20)))
        assert len(np.unique(shards[stretch])) <= 1.5 * window


def test_a_block_is_shuffled_through() -> None:
    """The samples of one block of shards stand in any order, not shard by shard."""
    lengths, shards = np.full(4000, 5000), np.arange(4000) // 100
    order = local_plan(lengths, shards, window=16, edges_s=(10.0,)).order(0, 0)
    line = np.concatenate(order.batches(np.arange(len(order))))
    first = line[:800]  # eight shards, half the window
    assert len(np.unique(shards[first])) == 8
    assert np.abs(np.bincount(shards[first[:400]], minlength=40)[np.unique(shards[first])] - 50).max() < 25
    places = np.argsort(first, kind="stable")
    assert abs(np.corrcoef(np.arange(800), places)[0, 1]) < 0.1


def test_shards_come_in_another_order_each_epoch() -> None:
    lengths, shards = np.full(4000, 5000), np.arange(4000) // 100
    plan = local_plan(lengths, shards, window=2)
    firsts = []
    for epoch in range(4):
        order = plan.order(0, epoch)
        firsts.append(int(shards[order.batch(0)[0]]))
    assert len(set(firsts)) > 1


def test_locality_and_randomness_are_reported() -> None:
    lengths = np.random.default_rng(3).integers(1000, 30_000, 20_000)
    shards = np.arange(20_000) // 100
    found = {
        window: batch_statistics(local_plan(lengths, shards, window=window), lengths, shards=shards)
        for window in (2, 20, 400)
    }
    spreads = [found[window]["shard_spread"] for window in (2, 20, 400)]
    assert spreads == sorted(spreads)
    assert spreads[1] < 0.1
    for locality in (
        found[400],
        batch_statistics(
            bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(batch_size=4)), lengths, shards=shards
        ),
    ):
        assert locality["shard_spread"] == pytest.approx(1 / 12**0.5, abs=0.01)
        assert locality["mean_displacement"] == pytest.approx(1 / 3, abs=0.01)


def test_what_has_no_shards_has_no_locality() -> None:
    with pytest.raises(PlanError, match=r'plan\.locality needs a cache.*set plan\.locality = "global"'):
        local_plan(np.arange(9), None)
    with pytest.raises(PlanError, match="shards holds 8 samples, durations 9"):
        local_plan(np.arange(9), np.arange(8))


RECORDED = [[2, 3, 1], [0, 7, 6], [19, 18, 17], [16, 8, 9], [10, 11, 13], [14, 12, 15], [5, 4]]


def test_the_order_is_the_recorded_one() -> None:
    """A change here breaks every saved state: bump ORDER_VERSION with it."""
    plan = local_plan(np.arange(20) * 400, np.arange(20) // 4, window=2, edges_s=(3, 5), batch_size=3)
    assert [batch.tolist() for batch in plan.order(17, 0).batches(np.arange(plan.num_batches))] == RECORDED
