"""The last, incomplete step of an epoch under `plan.tail = "split"`: its samples are dealt over all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import PackConfig
from forebay.config.plan import LengthsConfig
from forebay.errors import ResumeError
from forebay.plan.cursor import Cursor, CursorStep, dealt, mixed_steps, num_fillers
from forebay.plan.interface import Plan
from forebay.plan.make import make_plan
from forebay.plan.names import state_key
from tests.plan.kinds import RATE, samples_of
from tests.plan.test_kinds import EVERY_KIND
from tests.strategies import durations


@pytest.mark.parametrize(
    ("sizes", "ranks", "parts"),
    [
        ([8], 3, [(0, 0, 2), (0, 2, 5), (0, 5, 8)]),
        ([8, 1], 3, [(0, 0, 4), (0, 4, 8), (1, 0, 1)]),
        ([3, 3], 4, [(0, 0, 1), (0, 1, 3), (1, 0, 1), (1, 1, 3)]),
        ([1, 2], 8, [(0, 0, 1), (1, 0, 1), (1, 1, 2)]),
    ],
)
def test_the_largest_parts_are_cut_and_none_is_of_two_batches(
    sizes: list[int], ranks: int, parts: list[tuple[int, int, int]]
) -> None:
    assert [(number, part.start, part.stop) for number, part in dealt(sizes, ranks)] == parts


def walks(plan: Plan, world: int, *, start: int = 0) -> list[list[CursorStep]]:
    """The rest of an epoch from a position on, of each rank."""
    cursors = [Cursor(plan, "key", seed=3, rank=rank, world=world) for rank in range(world)]
    for cursor in cursors:
        cursor.load_state_dict({**cursor.state_dict(), "position": start})
    return [list(cursor.walk()) for cursor in cursors]


@given(
    lengths=durations(sample_rate_hz=RATE), kind=st.sampled_from([*EVERY_KIND, PackConfig(seq_len=120)]), data=st.data()
)
def test_every_sample_counts_once_on_any_number_of_ranks_from_anywhere(
    lengths: np.ndarray, kind: LengthsConfig | PackConfig, data: st.DataObject
) -> None:
    plan = make_plan(samples_of(lengths), kind)
    world, start = data.draw(st.integers(1, 20)), data.draw(st.integers(0, plan.num_batches - 1))
    order = plan.order(3, 0)
    whole = [set(batch.tolist()) for batch in order.batches(range(plan.num_batches))]
    ranks = walks(plan, world, start=start)
    assert len({len(steps) for steps in ranks}) == 1
    learnt = Counter(s for steps in ranks for step in steps if step.turn.weight for s in step.samples.tolist())
    assert learnt == Counter(s for batch in whole[start:] for s in batch)
    for step in (step for steps in ranks for step in steps):
        assert set(step.samples.tolist()) <= whole[step.turn.position]  # room, source and shape are those of a batch
        assert len(step.samples) > 0
    last = [steps[-1] for steps in ranks]
    taken = sum(len(step.samples) for step in last if step.turn.weight)
    fillers = sum(not step.turn.weight for step in last)
    assert fillers == (max(world - taken, 0) if (plan.num_batches - start) % world else 0)
    if not start:
        assert num_fillers(order, world, tail="split") == fillers
    if fillers:
        assert all(len(step.samples) == 1 for step in last)


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_steps_that_mix_shapes_are_those_of_the_ranks(settings: LengthsConfig) -> None:
    plan = make_plan(samples_of(np.random.default_rng(5).integers(500, 32_000, 300)), settings)
    order = plan.order(3, 0)
    for world in (1, 3, 7, 8):
        steps = zip(*walks(plan, world), strict=True)
        mixed = sum(len({order.bucket(each.turn.position) for each in step}) > 1 for step in steps)
        assert mixed_steps(order.buckets(range(len(order))), world, tail="split") == mixed


def test_a_state_of_the_older_default_is_refused_and_short_goes_on_with_it() -> None:
    split, short = PackConfig(seq_len=90), PackConfig(seq_len=90, tail="short")
    plan, older = (make_plan(samples_of(np.arange(40) % 9 * 1000), each) for each in (split, short))
    content: dict[str, Any] = {"recipe": "r", "sample_ids": "i", "content": {}}
    state = Cursor(older, state_key(short, **content), seed=3).state_dict()
    with pytest.raises(ResumeError, match=r'older than the default plan\.tail = "split": set plan\.tail = "short"'):
        Cursor(plan, state_key(split, **content), seed=3).load_state_dict(state)
    Cursor(older, state_key(short, **content), seed=3).load_state_dict(state)
    other = state_key(split, **{**content, "recipe": "other"})
    with pytest.raises(ResumeError, match="the recipe") as caught:
        Cursor(plan, other, seed=3).load_state_dict(Cursor(plan, state_key(split, **content), seed=3).state_dict())
    assert "older" not in str(caught.value)
