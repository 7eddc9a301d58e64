from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import WindowConfig
from forebay.errors import PlanError
from forebay.plan.window import WindowPlan, even_cut, greedy_cut, window_plan
from tests.strategies import durations

RATE = 1000
Array = np.ndarray[Any, Any]


def windowed(lengths: Array, **settings: Any) -> WindowPlan:
    return window_plan(lengths, sample_rate_hz=RATE, settings=WindowConfig(**settings))


def windows_of(plan: WindowPlan, *, seed: int = 0, epoch: int = 0) -> list[list[Array]]:
    """The batches of every whole window, from the shortest samples to the longest."""
    order = plan.order(seed, epoch)
    batches, places = order.batches(np.arange(len(order))), order.buckets(np.arange(len(order)))
    group = plan.lockstep * plan.batches_per_window
    windows: list[list[Array]] = []
    for start in range(0, plan.num_windows * plan.batches_per_window, group):
        stop = min(start + group, plan.num_windows * plan.batches_per_window)
        count = (stop - start) // plan.batches_per_window
        for window in range(count):
            own = sorted(range(start + window, stop, count), key=lambda position: int(places[position]))
            windows.append([batches[position] for position in own])
    return windows


@given(durations(sample_rate_hz=RATE), st.integers(1, 6), st.floats(0.5, 60), st.integers(0, 3))
def test_a_window_is_sorted_by_length(lengths: Array, window: int, budget: float, epoch: int) -> None:
    plan = windowed(lengths, window=window, batch_seconds=budget, lockstep=3)
    found = windows_of(plan, epoch=epoch)
    assert len(found) == plan.num_windows
    for batches in found:
        assert len(batches) == plan.batches_per_window <= window
        line = lengths[np.concatenate(batches)]
        assert (np.diff(line) >= 0).all()


@given(durations(sample_rate_hz=RATE), st.integers(1, 6), st.integers(1, 5), st.sampled_from(["short", "drop", "pad"]))
def test_a_counted_window_has_full_batches(lengths: Array, window: int, size: int, tail: str) -> None:
    if tail == "drop" and len(lengths) < size:
        return
    plan = windowed(lengths, window=window, batch_size=size, tail=tail)
    order = plan.order(0, 0)
    sizes = sorted(len(batch) for batch in order.batches(np.arange(len(order))))
    assert sizes[1:] == [size] * (len(sizes) - 1)
    assert sizes[0] == (len(lengths) % size or size if tail == "short" else size)
    for batches in windows_of(plan):
        assert len(batches) == window


@given(st.lists(st.integers(0, 30), min_size=1, max_size=14).map(sorted), st.integers(1, 60))
def test_the_greedy_cut_has_the_fewest_batches(lengths: list[int], budget: int) -> None:
    bounds = greedy_cut(lengths.__getitem__, len(lengths), budget=budget, limit=99)
    fewest = [0]
    for end in range(1, len(lengths) + 1):
        starts = [s for s in range(end) if end - s == 1 or (end - s) * max(lengths[end - 1], 1) <= budget]
        fewest.append(1 + min(fewest[start] for start in starts))
    assert len(bounds) - 1 == fewest[-1]
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert all(b - a == 1 or (b - a) * max(lengths[b - 1], 1) <= budget for a, b in itertools.pairwise(bounds))


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12).map(sorted), st.integers(1, 12))
def test_the_even_cut_has_the_cheapest_costliest_batch(lengths: list[int], wanted: int) -> None:
    wanted = min(wanted, len(lengths))
    cheapest: list[dict[int, int]] = [{0: 0}]
    for end in range(1, len(lengths) + 1):
        found: dict[int, int] = {}
        for start in range(end):
            for count, worst in cheapest[start].items():
                cost = max(worst, (end - start) * lengths[end - 1])
                found[count + 1] = min(cost, found.get(count + 1, cost))
        cheapest.append(found)
    best = min(cost for count, cost in cheapest[-1].items() if count <= wanted)
    budget = max(best, 1) * 3
    bounds = even_cut(lengths, num_batches=wanted, budget=budget)
    assert len(bounds) == wanted + 1
    assert bounds == sorted(set(bounds))
    worst = max((b - a) * lengths[b - 1] for a, b in itertools.pairwise(bounds))
    assert worst <= best * (1 + 1 / 256) + 1


def test_lengths_by_rank() -> None:
    plan = windowed(np.array([7, 3, 0, 7, 3, 7]), batch_size=2)
    assert plan.lengths_at(np.arange(6)).tolist() == [0, 3, 3, 7, 7, 7]


def test_samples_meet_other_samples_in_the_next_epoch() -> None:
    lengths = np.random.default_rng(1).integers(500, 30_000, 3000)
    for sizes in ({"batch_seconds": 120.0}, {"batch_size": 8}):
        plan = windowed(lengths, **sizes)
        orders = [plan.order(0, epoch) for epoch in (0, 1)]
        first, second = ({frozenset(b.tolist()) for b in o.batches(np.arange(len(o)))} for o in orders)
        assert len(first & second) <= 1


def test_a_window_holds_the_whole_range_of_lengths() -> None:
    lengths = np.random.default_rng(1).integers(500, 30_000, 20_000)
    plan = windowed(lengths, batch_seconds=120.0)
    for batches in windows_of(plan):
        own = lengths[np.concatenate(batches)]
        assert own.mean() == pytest.approx(lengths.mean(), rel=0.02)
        assert own.min() < 800
        assert own.max() > 29_700


def test_windows_pad_little_and_evenly() -> None:
    lengths = np.random.default_rng(1).integers(500, 30_000, 20_000)
    plan = windowed(lengths, batch_seconds=240.0)
    order = plan.order(0, 0)
    padded = np.array([lengths[batch].max() * len(batch) for batch in order.batches(np.arange(len(order)))])
    assert plan.batches_per_window == 32
    assert 1 - lengths.sum() / padded.sum() < 0.05
    assert padded.std() / padded.mean() < 0.05
    assert 0.93 * 240 * RATE < padded.mean() < padded.max() <= 240 * RATE


def test_clips_over_the_budget_are_batches_of_their_own() -> None:
    lengths = np.array([500_000] * 7 + [10] * 5)
    plan = windowed(lengths, batch_seconds=120, window=4)
    order = plan.order(0, 0)
    batches = order.batches(np.arange(len(order)))
    assert sorted(s for batch in batches for s in batch.tolist()) == list(range(12))
    assert all(len(batch) == 1 for batch in batches if lengths[batch].max() == 500_000)


RECORDED_COUNT = [[15, 16, 19], [9, 10, 17], [2, 3, 8], [0, 1, 5], [4, 6, 11], [12, 13, 18], [7, 14]]
RECORDED_BUDGET = [[14, 17], [19], [6, 9, 11], [12, 15], [1, 2], [0, 3, 7, 8], [4, 5, 10], [18], [13, 16]]


def test_the_order_is_the_recorded_one() -> None:
    """A change here breaks every saved state: bump WINDOW_VERSION with it."""
    plan = windowed(np.arange(20) * 400, batch_size=3, window=2, lockstep=2)
    assert [batch.tolist() for batch in plan.order(17, 0).batches(np.arange(plan.num_batches))] == RECORDED_COUNT
    plan = windowed(np.arange(20) * 400, batch_seconds=16.0, window=3, lockstep=2)
    assert [batch.tolist() for batch in plan.order(17, 0).batches(np.arange(plan.num_batches))] == RECORDED_BUDGET


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([], {}, "no samples to plan"),
        ([5, -3, 4], {}, "duration of sample 1 is -3, wanted 0 or more"),
        ([5, 6], {"tail": "drop"}, 'leaves none of 2 samples: they fill no batch of 4; set plan.tail = "split"'),
        ([5], {"batch_size": None, "batch_seconds": float("inf")}, "batch_seconds must be finite, got inf"),
    ],
)
def test_impossible_plans_are_refused(lengths: list[int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        windowed(np.array(lengths, dtype=np.int64), **{"batch_size": 4, **settings})
