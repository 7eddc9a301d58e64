"""The search for the largest batch, over devices that are functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.measure.batch_search import MAX_TRIALS, Line, Search, TrialOutcome, granule, grid_down, grid_up

MOST = 4096


def test_the_grid_has_every_size_below_16_then_multiples_of_8_then_about_3_percent() -> None:
    sizes, size = [], 1
    while size < 1100:
        sizes.append(size)
        size = grid_up(size)
    assert sizes[:19] == [*range(1, 17), 24, 32, 40]
    assert sizes[-4:] == [1008, 1024, 1056, 1088]
    assert all(grid_down(size) == size and granule(size) <= max(1, size / 2) for size in sizes)
    assert all(granule(size) / size <= 1 / 32 for size in sizes if size >= 256)


@given(size=st.integers(1, 10**6))
def test_a_size_is_rounded_to_the_grid_from_below(size: int) -> None:
    assert grid_down(size) <= size < grid_up(size)
    assert grid_down(grid_down(size)) == grid_down(size)


def test_a_line_goes_through_its_points_and_says_what_fits() -> None:
    line = Line.through((2, 30.0), (4, 50.0))
    assert (line.base, line.slope, line.at(10)) == (10.0, 10.0, 110.0)
    assert line.largest(119.0, most=MOST) == 10
    assert line.largest(19.0, most=MOST) == 0
    assert line.largest(1e9, most=64) == 64
    assert Line(base=5.0, slope=0.0).largest(5.0, most=64) == 64
    assert Line(base=5.0, slope=0.0).largest(4.0, most=64) == 0


@given(
    base=st.floats(0, 4e10),
    slope=st.floats(1e6, 2e9),
    room=st.floats(1.0, 3000.0),
    error=st.floats(0.8, 1.25),
    noise=st.lists(st.floats(0, 0.02), min_size=16, max_size=16),
    has_figure=st.booleans(),
)
def test_the_largest_batch_is_found_within_a_step_in_six_trials(
    *, base: float, slope: float, room: float, error: float, noise: list[float], has_figure: bool
) -> None:
    """Memory a fifth off the line, with fragments of up to 2 % that depend on the size."""
    limit = int(base + slope * room)

    def peak(size: int) -> float:
        return base + error * slope * size * (1 + noise[size // granule(size) % 16])

    asked = []

    def trial(size: int) -> TrialOutcome:
        asked.append(size)
        fits = peak(size) <= limit
        return TrialOutcome(fits=fits, peak_bytes=int(peak(size)) if fits or has_figure else None)

    found = Search(limit_bytes=limit, least=1, most=MOST, line=Line(base=base, slope=slope)).run(trial)
    assert len(asked) <= MAX_TRIALS
    assert len(asked) == len(set(asked))
    if found is None:
        assert peak(1) > limit
        return
    assert peak(found) <= limit
    # One step more may fit, two do not.
    assert found == MOST or peak(grid_up(found)) > limit or peak(grid_up(grid_up(found))) > limit


@given(
    limits=st.integers(1, MOST),
    least=st.integers(1, 32),
    start=st.one_of(st.none(), st.integers(1, MOST)),
    slope=st.floats(0.01, 100.0),
    curve=st.floats(0, 0.1),
    has_line=st.booleans(),
)
def test_whatever_the_line_says_the_trials_are_six_and_the_answer_was_tried(
    *, limits: int, least: int, start: int | None, slope: float, curve: float, has_line: bool
) -> None:
    asked: dict[int, bool] = {}

    def trial(size: int) -> TrialOutcome:
        asked[size] = size + curve * size**2 / 100 <= limits
        return TrialOutcome(fits=asked[size])

    line = Line(base=0.0, slope=slope) if has_line else None
    found = Search(limit_bytes=limits, least=least, most=MOST, line=line, start=start).run(trial)
    assert len(asked) <= MAX_TRIALS
    assert min(asked) >= least
    if found is None:
        assert asked.get(least) is False
    else:
        assert asked[found]
        assert found == max(size for size, fits in asked.items() if fits)


@pytest.mark.parametrize("fits_from", [8, 9, 128, MOST])
def test_a_start_without_a_line_doubles_back_to_what_fits(fits_from: int) -> None:
    def trial(size: int) -> TrialOutcome:
        return TrialOutcome(fits=size <= fits_from, peak_bytes=size * 1000)

    search = Search(limit_bytes=fits_from * 1000, least=8, most=MOST, start=128)
    assert search.run(trial) == grid_down(fits_from)
    assert search.trials <= 4
