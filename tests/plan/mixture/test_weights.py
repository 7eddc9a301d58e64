from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PlanError
from forebay.plan.mixture.sources import PERIOD, quantise, tempered
from tests.strategies import source_weights


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
