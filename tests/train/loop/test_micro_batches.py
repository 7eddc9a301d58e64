"""Groups of micro-batches: every batch once an epoch, none across its end, counted over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PlanError
from forebay.train.loop.schedule import Group, host_sum, micro_batch_groups
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
