"""The sampler under others' loaders: its state is a loader's, whatever was fetched ahead, at any world size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from forebay.config import BucketConfig
from forebay.errors import ResumeError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.make import Planned
from forebay.plan.make_buckets import bucket_plan
from forebay.train.collate.collator import Collator
from forebay.train.dataset import PlanSampler, SampleDataset
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of
from tests.train.test_loader import assert_equal, copies, make_loader, make_plan, make_source


def make_sampler(plan: BucketPlan, *, plan_key: str = "p", **changes: Any) -> PlanSampler:
    return PlanSampler(Planned(plan=plan, key=plan_key), **{"seed": 7, **changes})


SOURCE = FakeSource([100 + 37 * i for i in range(61)], features="waveform", prompt=None, dtype="int16")


def plan_of(**changes: Any) -> BucketPlan:
    settings = BucketConfig(**{"edges_s": (0.05, 0.1, 0.2), "batch_size": 2, "lockstep": 3, **changes})
    return bucket_plan(SOURCE.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)


def sequence(plan: BucketPlan, *, epoch: int) -> list[list[int]]:
    order = plan.order(7, epoch)
    return [batch.tolist() for batch in order.batches(range(len(order)))]


@given(stop=st.integers(0, 40), worlds=st.tuples(st.integers(1, 9), st.integers(1, 9)), lockstep=st.integers(1, 4))
def test_another_world_size_goes_on_where_the_first_stopped(stop: int, worlds: tuple[int, int], lockstep: int) -> None:
    plan = plan_of(tail="short", lockstep=lockstep)
    expected = sequence(plan, epoch=0)
    first = [make_sampler(plan, dp_rank=rank, dp_world_size=worlds[0]) for rank in range(worlds[0])]
    steps = list(zip(*first, strict=False)) if stop >= len(first[0]) else None
    if steps is None:
        iterators = [iter(sampler) for sampler in first]
        steps = [tuple(next(iterator) for iterator in iterators) for _ in range(stop)]
    taken = [batch for step in steps for batch in step][: len(expected)]
    state = first[0].state_dict()
    assert all(sampler.state_dict() == state for sampler in first)
    second = [make_sampler(plan, dp_rank=rank, dp_world_size=worlds[1]) for rank in range(worlds[1])]
    for sampler in second:
        sampler.load_state_dict(copy.deepcopy(state))
    rest = [batch for step in zip(*second, strict=True) for batch in step]
    if state["epoch"] == 1:
        assert taken == expected
        expected, taken = sequence(plan, epoch=1), []
    left = len(expected) - len(taken)
    assert taken + rest[:left] == expected
    assert len(rest) - left == -left % worlds[1]  # fillers of weight 0


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.few("0", "1")
def test_dataloader_gives_epoch_after_epoch_with_any_number_of_workers(num_workers: int) -> None:
    source = make_source()
    peer = DataLoader(
        SampleDataset(source),
        batch_sampler=make_sampler(make_plan(source)),
        collate_fn=Collator(source),
        num_workers=num_workers,
    )
    loader = make_loader(source)
    for _ in range(2):
        assert_equal(copies(peer), copies(loader))  # type: ignore[arg-type]


def test_a_loader_and_a_sampler_take_each_others_states() -> None:
    plan = plan_of()
    loader = loader_of(SOURCE, plan, plan_key="p", seed=7, num_threads=0)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    sampler = make_sampler(plan, seed=0)  # the state brings its seed
    sampler.load_state_dict(loader.state_dict())
    assert next(iter(sampler)) == sequence(plan, epoch=0)[5]
    assert sampler.state_dict()["position"] == 6
    loader.load_state_dict(sampler.state_dict())
    assert loader.state == loader.state.at(6)


def test_set_epoch_begins_another_epoch_and_keeps_a_place_in_this_one() -> None:
    plan = plan_of()
    sampler = make_sampler(plan)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "position": 4})
    sampler.set_epoch(2)
    assert list(sampler) == sequence(plan, epoch=2)[4:]
    assert list(sampler) == sequence(plan, epoch=3)
    sampler.set_epoch(1)
    assert list(sampler) == sequence(plan, epoch=1)
    first = next(iter(sampler))
    sampler.sampler.set_epoch(1)  # as Lightning, where it left an epoch early
    assert [first, *sampler] == sequence(plan, epoch=2)


def test_a_state_of_another_plan_is_refused() -> None:
    plan = plan_of()
    state = make_sampler(plan, plan_key="q").state_dict()
    with pytest.raises(ResumeError, match="plan_key is q, the plan here has p"):
        make_sampler(plan).load_state_dict(state)


# Elastic


@given(
    stop=st.integers(0, 9),
    world_size=st.sampled_from([4, 6, 16, 1, 5]),
    tail=st.sampled_from(["split", "short", "drop", "pad"]),
    lockstep=st.integers(1, 8),
)
def test_eight_ranks_stopped_anywhere_go_on_with_another_number(
    stop: int, world_size: int, tail: str, lockstep: int
) -> None:
    """Real loaders lose no sample of the epoch and give none twice, but those that the tail's rule names."""
    plan = plan_of(tail=tail, batch_size=1, lockstep=lockstep)  # 61 micro-batches

    def run(ranks: int, state: dict[str, Any] | None, steps: int | None) -> tuple[list[int], dict[str, Any]]:
        given: list[int] = []
        loaders = [
            loader_of(SOURCE, plan, plan_key="p", seed=7, dp_rank=rank, dp_world_size=ranks, num_threads=0, prefetch=1)
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        while steps is None or steps > 0:
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                break
            for loader, batch in zip(loaders, batches, strict=True):
                assert batch is not None
                if loader.weight:
                    given.append(LENGTH_TO_SAMPLE[int(batch["attention_mask"].sum())])
            steps = None if steps is None else steps - 1
        assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
        return given, loaders[0].state_dict()

    before, state = run(8, None, stop)
    if state["epoch"] == 1:  # the eight were through
        assert stop >= (7 if tail == "drop" else 8)
        return
    after, end = run(world_size, state, None)
    left = 61 - 8 * stop
    if tail == "drop" and left < world_size:  # no step is left: the next epoch begins
        assert sorted(after) == sorted(set(after))
        assert end["epoch"] == 2
        return
    assert end == {**state, "epoch": 1, "position": 0}
    together = before + after
    dropped = left % world_size if tail == "drop" else 0
    repeated = -left % world_size if tail == "pad" else 0
    assert len(together) == 61 - dropped + repeated
    assert len(set(together)) == 61 - dropped


LENGTH_TO_SAMPLE = {int(length): index for index, length in enumerate(SOURCE.lengths["num_audio_samples"])}
