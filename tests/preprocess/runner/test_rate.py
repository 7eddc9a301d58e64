"""Rates of runs, what is left, and numbers written short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.preprocess.runner.parts import Point, compressed, rate_of, seconds_left
from tests.preprocess.runner.fake_sbatch import numbers

NOW = 1_000_000.0


@st.composite
def histories(draw: st.DrawFn) -> list[Point]:
    """Histories of what a run has made, at times up to an hour before now."""
    ages = sorted(draw(st.lists(st.floats(1, 3600), min_size=1, max_size=12)), reverse=True)
    steps = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5000)), min_size=12, max_size=12))
    points, shards, rows = [], 0, 0
    for age, step in zip(ages, [(0, 0), *steps], strict=False):
        shards, rows = shards + step[0], rows + step[1]
        points.append((NOW - age, shards, rows))
    return points


@given(st.sets(st.integers(0, 300)))
def test_numbers_written_short_are_the_same_numbers(wanted: set[int]) -> None:
    text = compressed(wanted)
    assert list(numbers(text)) == sorted(wanted) if wanted else text == ""
    assert len(text) <= len(",".join(map(str, wanted)))
    assert compressed(numbers(text) if text else ()) == text


def test_ranges() -> None:
    assert compressed([12, 3, 7, 0, 1, 2, 13, 7]) == "0-3,7,12-13"


@given(st.lists(histories(), max_size=6), st.floats(1, 4000))
def test_no_rate_says_more_than_was_made(runs: list[list[Point]], window_s: float) -> None:
    rate = rate_of(runs, now=NOW, window_s=window_s)
    assert 0 <= rate.window_s <= window_s + 1e-6
    assert 0 <= rate.shards * rate.window_s <= sum(run[-1][1] for run in runs) * (1 + 1e-9) + 1e-6
    assert 0 <= rate.rows * rate.window_s <= sum(run[-1][2] for run in runs) * (1 + 1e-9) + 1e-6
    # A run that has ended before the window changes nothing.
    ended = [(NOW - window_s - 10, 0, 0), (NOW - window_s - 5, 9, 9)]
    assert rate_of([*runs, ended], now=NOW, window_s=window_s) == rate


@given(st.lists(histories(), min_size=1, max_size=4))
def test_over_all_of_its_time_a_build_has_made_what_it_has_made(runs: list[list[Point]]) -> None:
    rate = rate_of(runs, now=NOW, window_s=10_000)
    made = sum(run[-1][1] - run[0][1] for run in runs)
    assert rate.shards * rate.window_s == pytest.approx(made, abs=1e-6)


@given(st.integers(1, 500), st.integers(1, 200), st.floats(60, 300), st.integers(1, 5))
def test_an_even_run_has_its_rate_over_any_window(a_step: int, step_s: int, window_s: float, runs: int) -> None:
    history = [(NOW - step_s * i, a_step * (100 - i), 10 * a_step * (100 - i)) for i in range(100, -1, -1)]
    rate = rate_of([history] * runs, now=NOW, window_s=min(window_s, 100.0 * step_s))
    assert rate.shards == pytest.approx(runs * a_step / step_s, rel=1e-6)
    assert rate.rows == pytest.approx(10 * rate.shards)


def test_a_clock_that_is_ahead_gives_no_rate() -> None:
    assert rate_of([[(NOW + 50, 0, 0), (NOW + 60, 5, 5)]], now=NOW).shards == 0
    assert rate_of([], now=NOW).window_s == 0
    assert rate_of([[]], now=NOW).window_s == 0


@given(st.floats(0, 1e9), st.floats(0, 1e6))
def test_what_is_left_takes_what_it_takes(left: float, a_second: float) -> None:
    seconds = seconds_left(left, a_second)
    if left == 0:
        assert seconds == 0
    elif a_second == 0:
        assert seconds is None
    else:
        assert seconds == left / a_second
