"""How fast texts are spoken, against the same in plain loops."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.inspect.checks.limits import Pace, middle_and_spread, misfits

RATES = st.lists(st.tuples(st.floats(0.1, 60), st.integers(0, 2), st.booleans()), min_size=1, max_size=90)


@given(samples=RATES)
def test_scores_are_of_the_language_where_it_has_enough(samples: list[tuple[float, int, bool]]) -> None:
    rate = np.array([r if known else 0.0 for r, _, known in samples])
    language = np.array([code for _, code, _ in samples])
    found = misfits(rate * 2.0, np.full(len(rate), 2.0), language, pace=Pace(min_clips=20))
    logs: dict[int, list[float]] = {code: [] for code in range(3)}
    for value, code, known in samples:
        if known and 0.5 <= value <= 40:
            logs[code].append(math.log(value))
    for row, (value, code, known) in enumerate(samples):
        assert found.too_many[row] == (known and value > 40)
        assert found.too_few[row] == (known and value < 0.5)
        if not known or len(logs[code]) < 20:
            assert math.isnan(found.scores[row])
            continue
        middle = statistics.median(logs[code])
        spread = max(statistics.median(abs(each - middle) for each in logs[code]) / 0.6745, 0.1)
        assert found.scores[row] == pytest.approx((math.log(value) - middle) / spread, abs=1e-6)


def test_equal_values_have_the_least_spread() -> None:
    assert middle_and_spread(np.full(9, 2.0), least=0.1) == (2.0, 0.1)
