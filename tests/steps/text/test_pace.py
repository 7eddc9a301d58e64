"""How fast texts are spoken, against the same in plain loops."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.text.pace import middle_and_spread, pace_scores

RATES = st.lists(st.tuples(st.floats(0.1, 60), st.integers(0, 2), st.booleans()), min_size=1, max_size=90)


@given(samples=RATES)
def test_scores_are_of_the_language_or_of_all_small_ones(samples: list[tuple[float, int, bool]]) -> None:
    rate = np.array([r if known else np.nan for r, _, known in samples])
    language = np.array([code for _, code, _ in samples])
    found = pace_scores(rate, language, num_languages=3)
    logs: dict[int, list[float]] = {code: [] for code in range(3)}
    for value, code, known in samples:
        if known:
            logs[code].append(math.log(value))
    few = [value for values in logs.values() if len(values) < 20 for value in values]
    for score, (value, code, known) in zip(found.tolist(), samples, strict=True):
        if not known:
            assert math.isnan(score)
            continue
        own = logs[code] if len(logs[code]) >= 20 else few
        middle = statistics.median(own)
        spread = max(statistics.median(abs(each - middle) for each in own) / 0.6745, 0.05)
        assert score == pytest.approx((math.log(value) - middle) / spread, abs=1e-6)


def test_equal_values_have_the_least_spread() -> None:
    assert middle_and_spread(np.full(9, 2.0), least=0.1) == (2.0, 0.1)
