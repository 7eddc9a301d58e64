from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import Order
from forebay.plan.cursor import mixed_steps, next_position, num_steps, turn
from forebay.plan.interface import Tail
from forebay.plan.make_buckets import bucket_plan
from tests.plan.bucket.test_plan import RATE, made
from tests.strategies import durations, plan_settings

WORLDS = st.integers(1, 20)
TAILS = st.sampled_from(["short", "drop", "pad"])


def taken(num_batches: int, world: int, *, tail: Tail, start: int = 0, steps: int | None = None) -> list[Any]:
    """The turns of all ranks, step by step and rank by rank."""
    if steps is None:
        steps = num_steps(num_batches, world, tail=tail, start=start)
    return [
        turn(num_batches, step, dp_rank=rank, dp_world_size=world, tail=tail, start=start)
        for step in range(steps)
        for rank in range(world)
    ]


@given(st.integers(1, 300), WORLDS, TAILS)
def test_the_sequence_is_the_same_for_every_world_size(num_batches: int, world: int, tail: Tail) -> None:
    turns = taken(num_batches, world, tail=tail)
    own = [t.position for t in turns if not t.repeated]
    assert own == list(range(len(own)))
    if tail == "drop":
        assert num_batches - len(own) < world
        assert len(own) == len(turns)
    else:
        assert len(own) == num_batches
        assert len(turns) - num_batches < world
    assert all(t.weight == (0 if t.repeated and tail == "short" else 1) for t in turns)


@given(durations(sample_rate_hz=RATE), plan_settings(), WORLDS, WORLDS, st.data())
def test_a_run_goes_on_with_another_world_size(
    lengths: np.ndarray[Any, Any], settings: BucketConfig, before: int, after: int, data: st.DataObject
) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    count, tail = plan.num_batches, settings.tail
    stop = data.draw(st.integers(0, num_steps(count, before, tail=tail)))
    state = next_position(count, stop, dp_world_size=before)
    turns = taken(count, before, tail=tail, steps=stop) + taken(count, after, tail=tail, start=state)
    positions = [t.position for t in turns if not t.repeated]
    assert positions == list(range(len(positions)))
    assert count - len(positions) < (after if tail == "drop" else 1)
    if tail == "short":
        order = Order(plan, seed=0, epoch=0)
        learnt = Counter(s for t in turns if t.weight for s in order.batch(t.position).tolist())
        assert learnt == Counter(range(len(lengths)))


@given(durations(sample_rate_hz=RATE), plan_settings(), WORLDS)
def test_mixed_steps_are_those_with_several_buckets(
    lengths: np.ndarray[Any, Any], settings: BucketConfig, world: int
) -> None:
    plan = made(lengths, settings)
    if plan is None:
        return
    order = Order(plan, seed=0, epoch=0)
    turns = taken(len(order), world, tail=settings.tail)
    steps = [turns[i : i + world] for i in range(0, len(turns), world)]
    counted = sum(len({order.bucket(t.position) for t in step}) > 1 for step in steps)
    assert mixed_steps(order.buckets(np.arange(len(order))), world, tail=settings.tail) == counted


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_world_sizes_that_divide_lockstep_mix_only_behind_the_full_groups(world: int) -> None:
    lengths = np.random.default_rng(1).integers(500, 32_000, 20_000)
    plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=BucketConfig(batch_seconds=60))
    buckets = Order(plan, seed=0, epoch=0).buckets(np.arange(plan.num_batches))
    full = int((plan.batch_counts // 8).sum()) * 8
    assert mixed_steps(buckets[:full], world, tail="short") == 0
    incomplete = int(np.count_nonzero(plan.batch_counts % 8))
    assert mixed_steps(buckets, world, tail="short") <= incomplete
    assert mixed_steps(buckets, 3, tail="short") > 10 * incomplete


def test_more_ranks_than_batches() -> None:
    assert num_steps(3, 8, tail="drop") == 0
    turns = taken(3, 8, tail="short")
    assert [t.position for t in turns] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [t.weight for t in turns] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert sum(t.weight for t in taken(3, 8, tail="pad")) == 8


def test_turns_outside_are_refused() -> None:
    with pytest.raises(PlanError, match=r"dp_rank is 2, wanted 0 to 1 \(dp_world_size is 2\)"):
        turn(10, 0, dp_rank=2, dp_world_size=2, tail="short")
    with pytest.raises(PlanError, match="dp_world_size is 0, wanted 1 or more"):
        num_steps(10, 0, tail="short")
    with pytest.raises(PlanError, match="position 11 is outside of the epoch's 10"):
        num_steps(10, 2, tail="short", start=11)
    with pytest.raises(IndexError, match="step 3 is outside of the 3 steps left from position 4 of 10"):
        turn(10, 3, dp_rank=0, dp_world_size=2, tail="short", start=4)
