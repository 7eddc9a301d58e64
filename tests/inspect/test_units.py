from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.terminal import human_hours, human_number, human_share
from forebay.visible import human_bytes


@pytest.mark.parametrize(
    ("size_bytes", "wanted"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_600, "1 MB"),
        (75.5e9, "75.5 GB"),
        (2.5e16, "25,000 TB"),
    ],
)
def test_sizes_have_three_digits(size_bytes: float, wanted: str) -> None:
    assert human_bytes(size_bytes) == wanted


@given(st.floats(0, 1e18))
def test_no_size_is_shown_in_powers_of_ten(size_bytes: float) -> None:
    assert "e" not in human_bytes(size_bytes)


def test_hours_shares_and_numbers() -> None:
    assert [human_hours(hours) for hours in (12_345.61, 12.345, 0.01234)] == ["12,345.6", "12.35", "0.0123"]
    assert human_share(0.1234) == "12.3 %"
    numbers = [None, 123_456, -1.23456, float("nan"), float("-inf")]
    assert [human_number(number) for number in numbers] == ["-", "123456", "-1.235", "nan", "-inf"]
