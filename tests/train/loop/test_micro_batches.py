"""Groups of micro-batches: every batch once an epoch, none across its end, counted over all ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.errors import PlanError
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.names import plan_key
from forebay.train.loader import Loader
from forebay.train.loop.schedule import Group, host_sum, micro_batch_groups
from tests.train.fake_source import FakeSource
from tests.train.loaders import loader_of
from tests.train.tiny import num_labels


class Numbered:
    """Yields `count` batches an epoch; batch i has i + 1 samples, all of whose i labels but the first are targets."""

    def __init__(self, count: int, *, weights: dict[int, int] | None = None) -> None:
        self.count, self.weights = count, weights or {}
        self.weight = 1
        self.num_open = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.num_open += 1
        try:
            for index in range(self.count):
                self.weight = self.weights.get(index, 1)
                yield {"labels": torch.full((index + 1, 2), index)}
        finally:
            self.num_open -= 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any, /) -> None:
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        return {}


def groups_of(loader: Numbered, *, size: int) -> Generator[Group, None, None]:
    return micro_batch_groups(loader, size=size, count_targets=num_labels, sum_over_ranks=host_sum(1))


def indices(group: Group) -> list[int]:
    return [int(batch["labels"][0, 0]) for batch, _ in group.batches]


@given(count=st.integers(1, 9), size=st.integers(1, 5), num_epochs=st.integers(1, 3))
def test_groups_cover_each_epoch_once_and_never_span_two(count: int, size: int, num_epochs: int) -> None:
    steps_per_epoch = -(-count // size)
    groups = list(itertools.islice(groups_of(Numbered(count), size=size), steps_per_epoch * num_epochs))
    expected = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    assert [indices(group) for group in groups] == expected * num_epochs
    for group in groups:
        assert group.num_samples == sum(index + 1 for index in indices(group))
        assert group.num_targets == 2 * group.num_samples
        assert group.wait_s >= 0


def test_fillers_are_handed_on_but_not_counted() -> None:
    first, second = itertools.islice(groups_of(Numbered(3, weights={1: 0, 2: 0}), size=2), 2)
    assert [weight for _, weight in first.batches] == [1, 0]
    assert (first.num_samples, first.num_targets) == (1, 2)
    assert [weight for _, weight in second.batches] == [0]
    assert (second.num_samples, second.num_targets) == (0, 1)


def test_closing_closes_the_epoch_that_is_open() -> None:
    loader = Numbered(4)
    groups = groups_of(loader, size=1)
    next(groups)
    assert loader.num_open == 1
    groups.close()
    assert loader.num_open == 0


def test_one_empty_epoch_is_the_end_of_a_resumed_one_and_two_are_an_error() -> None:
    loader = Numbered(0)

    class Late(Numbered):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            yield from super().__iter__()
            self.count = 2

    assert indices(next(groups_of(Late(0), size=2))) == [0, 1]
    with pytest.raises(PlanError, match="no batch in a whole epoch"):
        next(groups_of(loader, size=2))


def test_ranks_that_end_apart_are_an_error_and_not_a_hang() -> None:
    def one_of_two(values: Any) -> list[int]:
        return [int(value) for value in values]  # the other rank adds nothing: it is at its end

    groups = micro_batch_groups(Numbered(1), size=1, count_targets=num_labels, sum_over_ranks=one_of_two, num_ranks=2)
    with pytest.raises(PlanError, match="1 of 2 ranks are at the end of their epoch"):
        next(groups)


SIZES = {"0": {"batch_size": 3, "grad_acc": 1}, "1": {"batch_size": 2, "grad_acc": 3}}


@pytest.fixture
def settings(tmp_path: Path) -> BucketConfig:
    (tmp_path / "calibration.json").write_text(json.dumps(SIZES))
    return BucketConfig(edges_s=(2.0, 4.0), calibration=str(tmp_path / "calibration.json"), lockstep=6, tail="drop")


def make_loader(settings: BucketConfig, *, dp_rank: int = 0, dp_world_size: int = 1) -> Loader:
    lengths = np.random.default_rng(5).integers(10, 400, 80).tolist()
    source = FakeSource(lengths, features="qwen3_asr", prompt="qwen3_asr", dtype="float16")
    plan = bucket_plan(source.lengths["num_audio_samples"], sample_rate_hz=16_000, settings=settings)
    key = plan_key(source.key, settings)
    return loader_of(source, plan, plan_key=key, seed=7, dp_rank=dp_rank, dp_world_size=dp_world_size, num_threads=0)


def steps_of(loader: Loader) -> list[tuple[int, int]]:
    """Micro-batches, and samples of the first, of every step of an epoch."""

    def size() -> int:
        wanted = loader.grad_acc
        assert wanted is not None
        return wanted

    groups = micro_batch_groups(loader, size=size, count_targets=num_labels, sum_over_ranks=host_sum(1))
    found: list[tuple[int, int]] = []
    while sum(count for count, _ in found) < len(loader):
        group = next(groups)
        found.append((len(group.batches), len(group.batches[0][0]["labels"])))
    groups.close()
    return found


def test_every_step_accumulates_what_its_bucket_says(settings: BucketConfig) -> None:
    steps = steps_of(make_loader(settings))
    wanted = {SIZES[name]["batch_size"]: SIZES[name]["grad_acc"] for name in SIZES}
    assert {size for _, size in steps} == {2, 3}
    # The last step of the epoch takes what is left.
    assert all(count == wanted[size] for count, size in steps[:-1])
    assert steps[-1][0] <= wanted[steps[-1][1]]


def test_all_ranks_accumulate_alike(settings: BucketConfig) -> None:
    loaders = [make_loader(settings, dp_rank=rank, dp_world_size=3) for rank in range(3)]
    told: list[list[int | None]] = []
    for loader in loaders:
        own = [loader.grad_acc]
        for _ in itertools.islice(loader, len(loader) - 1):
            own.append(loader.grad_acc)
        told.append(own)
    assert told[0] == told[1] == told[2]
    assert set(told[0]) == {1, 3}


def test_a_resumed_loader_says_the_same(settings: BucketConfig) -> None:
    loader, other = make_loader(settings), make_loader(settings)
    batches = iter(loader)
    for _ in range(9):
        next(batches)
        other.load_state_dict(loader.state_dict())
        assert other.grad_acc == loader.grad_acc


def test_without_a_calibration_nothing_is_said() -> None:
    assert make_loader(BucketConfig(edges_s=(2.0, 4.0), batch_size=2)).grad_acc is None
