from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PlanError
from forebay.plan.mixture.draw import ClassSplit
from forebay.plan.mixture.sources import PERIOD, quantise, tempered
from tests.strategies import class_sizes, source_weights


@given(source_weights())
def test_quantised_weights_sum_to_the_period_and_are_within_one_of_their_share(weights: list[float]) -> None:
    quantised = quantise(weights)
    assert quantised.dtype == np.int64
    assert quantised.sum() == PERIOD
    total = sum(Fraction(weight) for weight in weights)
    off = [int(got) - Fraction(weight) * PERIOD / total for got, weight in zip(quantised, weights, strict=True)]
    assert max(abs(value) for value in off) < 1
    # The largest remainders are rounded up: none that is rounded down was larger.
    up, down = [1 - value for value in off if value > 0], [-value for value in off if value < 0]
    assert min(up, default=Fraction(1)) >= max(down, default=Fraction(0))


@given(source_weights())
def test_weights_are_free_of_scale(weights: list[float]) -> None:
    exponent = 1 if max(weights) < 1e200 else -1
    assert quantise(weights).tolist() == quantise([math.ldexp(weight, exponent) for weight in weights]).tolist()


def test_equal_remainders_go_to_the_first() -> None:
    assert quantise([1, 1, 1]).tolist() == [21846, 21845, 21845]
    assert quantise([1] * PERIOD).tolist() == [1] * PERIOD
    assert quantise([1.0, 1e-9]).tolist() == [PERIOD, 0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], r"has 0 sources, wanted 1 to 65536"),
        ([1.0] * (PERIOD + 1), r"has 65537 sources"),
        ([0.5, -0.1], r"weight 1 of the mixture is -0.1"),
        ([math.inf], r"weight 0 of the mixture is inf"),
        ([1.0, math.nan], r"weight 1 of the mixture is nan"),
        ([0.0, 0.0], r"all 2 weights of the mixture are 0"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        quantise(weights)


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=9), st.floats(0, 1))
def test_a_temperature_below_one_lifts_the_small(hours: list[float], temperature: float) -> None:
    proportional = np.array(tempered(hours, 1.0))
    assert np.allclose(proportional, np.array(hours) / max(hours))
    lifted = np.array(tempered(hours, temperature))
    assert (lifted >= proportional).all()
    assert lifted.max() == 1
    assert tempered(hours, 0.0) == [1.0] * len(hours)


def test_no_hours_give_no_weight() -> None:
    assert tempered([0.0, 2.0], 0.0) == [0.0, 1.0]
    with pytest.raises(PlanError, match=r"no source of the mixture has any audio"):
        tempered([0.0, 0.0], 1.0)
    with pytest.raises(PlanError, match=r"temperature of the mixture is -1"):
        tempered([1.0], -1)


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
