from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.measure.predict import run

SECONDS = st.floats(0.001, 1.0)
BATCHES = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=60)


def test_a_loop_without_hands_waits_for_each_batch() -> None:
    found = run([0.2] * 10, [0.1] * 10, hands=0, ahead=4)
    assert found.total_s == pytest.approx(3.0)
    assert found.idle == pytest.approx(2 / 3)


def test_a_slow_step_waits_for_the_first_batch_alone() -> None:
    found = run([0.1] * 100, [1.0] * 100, hands=2, ahead=4)
    assert found.wait_s == pytest.approx(0.1)


def test_hands_that_are_too_slow_set_the_pace() -> None:
    found = run([1.0] * 200, [0.1] * 200, hands=2, ahead=4)
    assert found.total_s == pytest.approx(100, rel=0.02)  # two hands, a second a batch
    assert found.idle == pytest.approx(0.8, abs=0.02)


def test_more_batches_ahead_help_where_some_are_much_longer() -> None:
    fills = ([0.01] * 9 + [1.0]) * 20
    few, many = (run(fills, [0.1] * 200, hands=1, ahead=ahead) for ahead in (1, 16))
    assert few.idle > 0.3
    assert many.idle < 0.15


def test_more_batches_are_never_ahead_than_were_asked_for() -> None:
    # The third is asked for when the loop wants the second, which is at 1 s; with two ahead at once.
    one, two = (run([1.0, 3.0, 3.0], [0.0] * 3, hands=4, ahead=ahead) for ahead in (1, 2))
    assert (one.wait_s, two.wait_s) == (4.0, 3.0)


@given(batches=BATCHES, hands=st.integers(0, 8), ahead=st.integers(1, 16))
def test_no_loop_is_faster_than_its_steps_or_its_hands(
    batches: list[tuple[float, float]], hands: int, ahead: int
) -> None:
    fills, steps = [fill for fill, _ in batches], [step for _, step in batches]
    found = run(fills, steps, hands=hands, ahead=ahead)
    assert found.total_s >= max(sum(steps), sum(fills) / max(hands, 1)) - 1e-9
    assert found.total_s <= sum(steps) + sum(fills) + 1e-9
    assert found.wait_s == pytest.approx(found.total_s - sum(steps))
    assert 0 <= found.idle <= 1


@given(batches=BATCHES, hands=st.integers(1, 8))
def test_another_batch_ahead_never_makes_it_slower_with_equal_batches(
    batches: list[tuple[float, float]], hands: int
) -> None:
    fills, steps = [batches[0][0]] * len(batches), [step for _, step in batches]
    totals = [run(fills, steps, hands=hands, ahead=ahead).total_s for ahead in (1, 2, 4, 8)]
    assert all(later <= before + 1e-9 for before, later in itertools.pairwise(totals))


def test_a_step_on_the_cpu_shares_the_cores() -> None:
    alone = run([0.1] * 50, [0.1] * 50, hands=2, ahead=4)
    shared = run([0.1] * 50, [0.1] * 50, hands=2, ahead=4, cores=1, step_cores=1.0)
    enough = run([0.1] * 50, [0.1] * 50, hands=2, ahead=4, cores=4, step_cores=1.0)
    assert shared.total_s > 1.8 * alone.total_s
    assert enough.total_s == alone.total_s
