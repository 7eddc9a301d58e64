"""Properties of the order of every kind of plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig, WindowConfig
from forebay.config.plan import LengthsConfig
from forebay.errors import PlanError
from forebay.plan.cursor import next_position, num_steps, turn
from forebay.plan.statistics import batch_statistics
from tests.plan.kinds import RATE, plan_of_any_kind, shards_of, tokens_of
from tests.strategies import durations, plan_settings_of_any_kind

Array = np.ndarray[Any, Any]
LENGTHS = durations(sample_rate_hz=RATE)
KINDS = plan_settings_of_any_kind()


EVERY_KIND: list[LengthsConfig] = [
    BucketConfig(batch_seconds=60),
    BucketConfig(k=5, batch_seconds=60),
    BucketConfig(k=5, batch_tokens=300),
    BucketConfig(batch_size=4, locality="shards:4"),
    WindowConfig(batch_seconds=60, window=8),
    WindowConfig(batch_size=4, window=8),
]


def some_lengths(count: int = 600) -> Array:
    return np.random.default_rng(5).integers(500, 32_000, count)


@given(LENGTHS, KINDS, st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_an_epoch_uses_every_sample_once(lengths: Array, settings: LengthsConfig, seed: int, epoch: int) -> None:
    plan = plan_of_any_kind(lengths, settings)
    if plan is None:
        return
    order = plan.order(seed, epoch)
    batches = order.batches(np.arange(len(order)))
    assert len(batches) == len(order) == plan.num_batches
    assert all(len(batch) > 0 for batch in batches)
    used = Counter(sample for batch in batches for sample in batch.tolist())
    assert sum(used.values()) == len(lengths) - np.sum(plan.dropped) + np.sum(plan.repeated)
    if settings.tail == "drop":
        assert max(used.values()) == 1
    else:
        assert set(used) == set(range(len(lengths)))
        assert sum(used.values()) - len(used) == np.sum(plan.repeated)


@given(LENGTHS, KINDS, st.data())
def test_seeking_equals_iterating(lengths: Array, settings: LengthsConfig, data: st.DataObject) -> None:
    plan = plan_of_any_kind(lengths, settings)
    if plan is None:
        return
    order = plan.order(3, 1)
    batches = [batch.tolist() for batch in order.batches(np.arange(len(order)))]
    buckets = order.buckets(range(len(order))).tolist()
    fresh = plan.order(3, 1)
    for position in data.draw(st.lists(st.integers(0, len(order) - 1), max_size=5)):
        assert fresh.batch(position).tolist() == batches[position]
        assert fresh.bucket(position) == buckets[position]


@given(LENGTHS, KINDS)
def test_no_batch_exceeds_a_budget_unless_one_sample_does(lengths: Array, settings: LengthsConfig) -> None:
    plan = plan_of_any_kind(lengths, settings)
    if plan is None:
        return
    order = plan.order(0, 0)
    for batch in order.batches(np.arange(len(order))):
        if len(batch) > 1 and settings.batch_seconds is not None:
            assert len(batch) * lengths[batch].max() <= settings.batch_seconds * RATE
        if len(batch) > 1 and isinstance(settings, BucketConfig) and settings.batch_tokens is not None:
            assert len(batch) * tokens_of(lengths)[batch].max() <= settings.batch_tokens


@given(LENGTHS, KINDS)
def test_micro_batches_come_in_lockstep_groups(lengths: Array, settings: LengthsConfig) -> None:
    plan = plan_of_any_kind(lengths, settings)
    if plan is None:
        return
    buckets = plan.order(0, 0).buckets(np.arange(plan.num_batches))
    size = settings.lockstep
    if settings.kind == "window":
        full = plan.num_windows // size * plan.batches_per_window  # type: ignore[union-attr]
    else:
        full = int((plan.batch_counts // size).sum())  # type: ignore[union-attr]
    groups = buckets[: full * size].reshape(full, size)
    assert (groups == groups[:, :1]).all()


@given(LENGTHS, KINDS, st.integers(1, 20), st.integers(1, 20), st.data())
def test_a_run_goes_on_with_another_world_size(
    lengths: Array, settings: LengthsConfig, before: int, after: int, data: st.DataObject
) -> None:
    plan = plan_of_any_kind(lengths, settings)
    if plan is None:
        return
    count, tail = plan.num_batches, plan.tail
    stop = data.draw(st.integers(0, num_steps(count, before, tail=tail)))
    state = next_position(count, stop, dp_world_size=before)
    turns = [
        turn(count, step, dp_rank=rank, dp_world_size=before, tail=tail)
        for step in range(stop)
        for rank in range(before)
    ]
    turns += [
        turn(count, step, dp_rank=rank, dp_world_size=after, tail=tail, start=state)
        for step in range(num_steps(count, after, tail=tail, start=state))
        for rank in range(after)
    ]
    own = [place.position for place in turns if not place.repeated]
    assert own == list(range(len(own)))
    assert count - len(own) < (after if tail == "drop" else 1)
    if tail == "short":
        order = plan.order(0, 0)
        learnt = Counter(s for place in turns if place.weight for s in order.batch(place.position).tolist())
        assert learnt == Counter(range(len(lengths)))


@given(LENGTHS, KINDS)
def test_statistics_are_those_of_the_epoch(lengths: Array, settings: LengthsConfig) -> None:
    plan = plan_of_any_kind(lengths, settings)
    if plan is None:
        return
    found = batch_statistics(plan, lengths, shards=shards_of(lengths), seed=5)
    order = plan.order(5, 0)
    batches = order.batches(np.arange(len(order)))
    padded = np.array([lengths[batch].max() * len(batch) for batch in batches], dtype=float)
    line = np.concatenate(batches)
    assert found["padding"] == pytest.approx(1 - lengths[line].sum() / padded.sum() if padded.sum() else 0, abs=1e-6)
    assert found["cv"] == pytest.approx(padded.std() / padded.mean() if padded.sum() else 0, abs=1e-3)
    moved = np.abs(np.arange(len(line)) - line).mean() / len(lengths)
    assert found["mean_displacement"] == pytest.approx(moved, abs=1e-4)
    where = np.arange(len(line)) / len(lengths)
    shards = shards_of(lengths)[line]
    means = np.array(
        [where[shards == shard].mean() if (shards == shard).any() else 0 for shard in range(shards.max() + 1)]
    )
    assert found["shard_spread"] == pytest.approx(np.sqrt(((where - means[shards]) ** 2).mean()), abs=1e-4)


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_seeds_and_epochs_differ(settings: LengthsConfig) -> None:
    plan = plan_of_any_kind(some_lengths(), settings)
    assert plan is not None
    orders = [plan.order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    lines = [[batch.tolist() for batch in order.batches(np.arange(len(order)))] for order in orders]
    assert all(a != b for i, a in enumerate(lines) for b in lines[:i])


@pytest.mark.parametrize("settings", EVERY_KIND)
@pytest.mark.parametrize("position", [-1, 10**12])
def test_positions_outside_of_the_epoch_are_refused(settings: LengthsConfig, position: int) -> None:
    plan = plan_of_any_kind(some_lengths(), settings)
    assert plan is not None
    order = plan.order(0, 0)
    with pytest.raises(IndexError, match=f"position {position} is outside of the epoch's {len(order)} micro-batches"):
        order.batch(position)
    assert order.batches([]) == []
    with pytest.raises(PlanError, match="epoch is -1, wanted 0 or more"):
        plan.order(0, -1)


@pytest.mark.parametrize("settings", EVERY_KIND)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.few
def test_world_sizes_that_divide_lockstep_mix_only_behind_the_full_groups(settings: LengthsConfig, world: int) -> None:
    plan = plan_of_any_kind(some_lengths(6000), settings)
    assert plan is not None
    mixed = batch_statistics(plan, some_lengths(6000))["worlds"][str(world)]["mixed_steps"]
    assert mixed <= 16
