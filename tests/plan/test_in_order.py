"""Plans without their shuffle: every sample once, in the order of the cache, whatever the kind of plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.plan import BucketConfig, PackConfig, WindowConfig
from forebay.errors import PlanError, ResumeError
from forebay.plan.cursor import Cursor
from forebay.plan.in_order import InOrderPlan, in_order
from forebay.plan.make import Planned
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.mixture_plan import mixture_plan
from forebay.plan.pack.pack_plan import pack_plan
from forebay.plan.window import window_plan

RATE = 16_000
KEY = "0123456789abcdef" * 4
LENGTHS = st.lists(st.integers(1_000, 60_000), min_size=1, max_size=60).map(np.array)


def ordered(plan: object, **kwargs: object) -> InOrderPlan:
    found = in_order(Planned(plan=plan, key=KEY), **kwargs).plan  # type: ignore[arg-type]
    assert isinstance(found, InOrderPlan)
    return found


def batches_of(plan: InOrderPlan, *, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    order = plan.order(seed, epoch)
    return [batch.tolist() for batch in order.batches(range(len(order)))]


def assert_in_order(plan: InOrderPlan, samples: list[int]) -> list[list[int]]:
    batches = batches_of(plan)
    assert sorted(sample for batch in batches for sample in batch) == samples
    firsts = [min(batch) for batch in batches]
    assert firsts == sorted(firsts)
    assert batches_of(plan, seed=9, epoch=4) == batches
    return batches


@pytest.mark.parametrize("tail", ["short", "drop", "pad"])
@given(lengths=LENGTHS, size=st.integers(1, 5))
def test_buckets_in_the_order_of_the_cache(lengths: np.ndarray, size: int, tail: str) -> None:
    edges = (1.0, 2.0, 60.0)
    settings = BucketConfig(edges_s=edges, batch_size=size, lockstep=1, tail=tail)  # type: ignore[arg-type]
    try:
        plan = bucket_plan(lengths, sample_rate_hz=RATE, settings=settings)
    except PlanError:  # `drop` can leave nothing to shuffle
        return
    found = ordered(plan)
    batches = assert_in_order(found, list(range(len(lengths))))
    classes = found.order(0, 0).buckets(range(len(batches))).tolist()
    # The oracle: a list a bucket, in the order of the cache, cut every `size` samples.
    wanted: list[tuple[list[int], int]] = []
    for bucket in range(len(edges)):
        low = edges[bucket - 1] * RATE if bucket else 0
        own = [index for index, length in enumerate(lengths) if low <= length < edges[bucket] * RATE]
        wanted += [(own[start : start + size], bucket) for start in range(0, len(own), size)]
    assert list(zip(batches, classes, strict=True)) == sorted(wanted)


@given(lengths=LENGTHS, size=st.integers(1, 4))
def test_no_batch_is_of_two_parts(lengths: np.ndarray, size: int) -> None:
    parts = np.arange(len(lengths)) % 3
    settings = BucketConfig(edges_s=(2.0, 60.0), batch_size=size, lockstep=1)
    found = ordered(bucket_plan(lengths, sample_rate_hz=RATE, settings=settings), parts=parts)
    for batch in assert_in_order(found, list(range(len(lengths)))):
        assert len({parts[sample] for sample in batch}) == 1


@pytest.mark.parametrize("by", [{"batch_size": 3}, {"batch_seconds": 6.0}])
@given(lengths=LENGTHS)
def test_windows_of_neighbours_in_the_cache(lengths: np.ndarray, by: dict[str, float]) -> None:
    settings = WindowConfig(window=2, lockstep=1, **by)  # type: ignore[arg-type]
    found = ordered(window_plan(lengths, sample_rate_hz=RATE, settings=settings))
    for batch in assert_in_order(found, list(range(len(lengths)))):
        seconds = max(lengths[sample] for sample in batch) * len(batch) / RATE
        assert len(batch) == 1 or seconds <= 6.0 or "batch_size" in by
        assert len(batch) <= by.get("batch_size", len(batch))


def test_packs_stay_what_they_are() -> None:
    tokens = np.random.default_rng(3).integers(1, 60, 80)
    tokens[5] = 400
    plan = pack_plan(tokens, settings=PackConfig(seq_len=100))
    batches = assert_in_order(ordered(plan), [index for index in range(80) if index != 5])
    packs = [plan.members[start:end].tolist() for start, end in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)]
    assert sorted(batches) == sorted(packs)


@pytest.mark.parametrize(("whole", "last"), [(False, [([8], 1), ([9], 1)]), (True, [([8, 9], 1), ([0, 1], 0)])])
def test_two_ranks_share_the_batches_and_the_samples_of_the_last_unless_it_stays_whole(
    *, whole: bool, last: list[tuple[list[int], int]]
) -> None:
    settings = BucketConfig(edges_s=(9.0,), batch_size=2, lockstep=4, tail="drop")
    planned = Planned(plan=bucket_plan(np.full(10, RATE), sample_rate_hz=RATE, settings=settings), key=KEY)
    plan = in_order(planned, whole=whole).plan
    steps = [list(Cursor(plan, KEY, seed=0, rank=rank, world=2).walk()) for rank in range(2)]
    assert [len(own) for own in steps] == [3, 3]
    taken = [(step.samples.tolist(), step.turn.weight) for pair in zip(*steps, strict=True) for step in pair]
    assert taken == [([0, 1], 1), ([2, 3], 1), ([4, 5], 1), ([6, 7], 1), *last]
    assert plan.described() == "5 batches in the order of the cache"
    assert plan.lockstep == 1


def test_a_shuffled_state_is_refused_by_name_and_a_state_of_its_own_goes_on() -> None:
    settings = BucketConfig(edges_s=(9.0,), batch_size=2, lockstep=1)
    planned = Planned(plan=bucket_plan(np.full(10, RATE), sample_rate_hz=RATE, settings=settings), key=KEY)
    found = in_order(planned)
    shuffled, cursor = (Cursor(each.plan, each.key, seed=0) for each in (planned, found))
    with pytest.raises(ResumeError, match=r"plan_key is .* or one of the two was made with shuffle = False"):
        cursor.load_state_dict(shuffled.state_dict())
    walk = cursor.walk()
    cursor.hand_out(next(walk))
    again = Cursor(found.plan, found.key, seed=5)
    again.load_state_dict(cursor.state_dict())
    assert next(again.walk()).samples.tolist() == next(walk).samples.tolist() == [2, 3]
    apart = in_order(planned, parts=np.zeros(10, int))
    assert len({planned.key, found.key, apart.key}) == 3


def test_a_plan_that_is_only_a_shuffle_has_no_other_order() -> None:
    settings = BucketConfig(edges_s=(9.0,), batch_size=2, lockstep=1)
    plan = bucket_plan(np.full(10, RATE), sample_rate_hz=RATE, settings=settings)
    mixture = mixture_plan(plan, np.arange(10) % 2, names=("a", "b"), weights=(1, 1))
    with pytest.raises(PlanError, match="a MixturePlan has no order without its shuffle"):
        ordered(mixture)
