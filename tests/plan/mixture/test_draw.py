from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PlanError
from forebay.plan.mixture.draw import ClassSplit
from tests.strategies import class_sizes

Array = np.ndarray[Any, Any]


@given(class_sizes(), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_every_pass_takes_every_sample_of_every_class_once(sizes: Array, key: int, number: int) -> None:
    split = ClassSplit(sizes, key)
    for source, own in enumerate(sizes):
        turns = number * int(own.sum()) + np.arange(own.sum())
        classes, ordinals = split.locate(np.full_like(turns, source), turns)
        for label, size in enumerate(own.tolist()):
            assert ordinals[classes == label].tolist() == list(range(number * size, (number + 1) * size))


@given(class_sizes(), st.integers(0, 2**64 - 1))
def test_a_class_is_within_a_sample_a_level_of_its_share_at_every_turn(sizes: Array, key: int) -> None:
    split = ClassSplit(sizes, key)
    assert 2**split.depth >= sizes.shape[1]
    for source, own in enumerate(sizes):
        turns = np.arange(2 * own.sum() + 1)
        off = split.counts(np.full_like(turns, source), turns) - turns[:, None] * own / own.sum()
        assert np.abs(off).max() < max(split.depth, 1e-9)


@given(class_sizes(), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_counts_count_what_is_located_and_turns_go_back(sizes: Array, key: int, start: int) -> None:
    split = ClassSplit(sizes, key)
    sources = np.repeat(np.arange(len(sizes)), 30)
    turns = start + np.tile(np.arange(30), len(sizes))
    classes, ordinals = split.locate(sources, turns)
    before, after = split.counts(sources, turns), split.counts(sources, turns + 1)
    assert np.array_equal(before.sum(-1), turns)
    assert np.array_equal(after - before, np.eye(sizes.shape[1], dtype=int)[classes])
    assert np.array_equal(before[np.arange(len(turns)), classes], ordinals)
    assert np.array_equal(split.turns(sources, classes, ordinals), turns)
    for label in range(sizes.shape[1]):
        assert np.array_equal(split.counts_of(sources, np.full_like(turns, label), turns), before[:, label])


def test_large_sources_do_not_overflow() -> None:
    sizes = np.array([[2**30, 2**30 - 2, 1]])
    split = ClassSplit(sizes, 7)
    turns = np.array([0, 2**31 - 3, 2**31 - 2, 2**31 - 1, 2**45])
    assert split.counts(np.zeros_like(turns), turns).sum(-1).tolist() == turns.tolist()
    assert split.counts(np.array([0]), np.array([2**31 - 1]))[0].tolist() == sizes[0].tolist()
    with pytest.raises(PlanError, match=r"a source of the mixture has 2147483648 samples, at most 2147483647"):
        ClassSplit(np.array([[2**30, 2**30]]), 7)
