from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.measure.predict import Timed, costs

BATCHES = st.lists(
    st.tuples(st.integers(1, 100), st.integers(1, 10_000), st.floats(0.001, 10)), min_size=1, max_size=60
)


@given(batches=BATCHES)
def test_all_batches_together_take_what_they_took(batches: list[tuple[int, int, float]]) -> None:
    of_sample, of_frame = costs([Timed(*each) for each in batches])
    assert min(of_sample, of_frame) >= 0
    total = sum(of_sample * samples + of_frame * frames for samples, frames, _ in batches)
    assert total == pytest.approx(sum(seconds for *_, seconds in batches))


@pytest.mark.parametrize(("of_sample", "of_frame"), [(0.03, 0.0), (0.0, 1e-4), (0.01, 2e-4)])
def test_what_batches_take_is_told_apart(of_sample: float, of_frame: float) -> None:
    shapes = [(1, 3000), (2, 1600), (8, 900), (4, 1700), (6, 600), (3, 470), (2, 1100), (1, 700), (6, 1000)]
    timed = [Timed(samples, frames, of_sample * samples + of_frame * frames) for samples, frames in shapes]
    assert costs(timed) == pytest.approx((of_sample, of_frame), abs=1e-9)


def test_a_few_batches_are_told_by_their_frames() -> None:
    assert costs([Timed(2, 100, 1.0), Timed(2, 300, 3.0)]) == pytest.approx((0.0, 0.01))
    assert costs([Timed(2, 0, 1.0)]) == (0.5, 0.0)
    assert costs([]) == (0.0, 0.0)


def test_some_batches_say_whether_samples_or_frames_count() -> None:
    shapes = [(1, 3000), (2, 1600), (8, 900), (4, 1700)]
    assert costs([Timed(n, frames, 0.03 * n) for n, frames in shapes]) == pytest.approx((0.03, 0.0))
    assert costs([Timed(n, frames, 1e-4 * frames) for n, frames in shapes]) == pytest.approx((0.0, 1e-4))
