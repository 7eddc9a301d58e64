from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.inspect.seen_images import duration_histogram
from forebay.terminal import bars


@given(st.lists(st.integers(0, 10**9), max_size=300), st.sampled_from([8_000, 16_000, 44_100]))
def test_every_clip_is_in_exactly_one_bin(samples: list[int], rate: int) -> None:
    durations_s = np.array(samples, np.float64) / rate
    found = duration_histogram(durations_s)
    edges, counts = found["edges_s"], found["samples"]
    assert edges[0] == 0
    assert np.all(np.diff(edges) > 0)
    assert len(counts) == len(found["hours"]) == len(edges) - 1 <= 17
    assert sum(counts) == len(samples)
    assert sum(found["hours"]) == pytest.approx(durations_s.sum() / 3600)
    for index, count in enumerate(counts):
        last = index == len(counts) - 1
        inside = (durations_s >= edges[index]) & ((durations_s < edges[index + 1]) | last)
        assert count == inside.sum()


def test_bins_have_a_round_width() -> None:
    found = duration_histogram(np.linspace(0.5, 29.5, 1000))
    assert found["edges_s"] == [2.0 * index for index in range(16)]


def test_one_clip_of_an_hour_does_not_hide_the_others() -> None:
    durations_s = np.append(np.linspace(0.1, 9.9, 999), 3600.0)
    found = duration_histogram(durations_s)
    assert found["edges_s"] == [float(edge) for edge in range(11)] + [3600.0]
    assert found["samples"][-1] == 1
    assert min(found["samples"][:-1]) > 90


def test_a_duration_on_an_edge_belongs_to_the_bin_above_it() -> None:
    # 0.3 is less than three times 0.1 in floating point.
    found = duration_histogram(np.array([0.1, 0.2, 0.3, 1.0]))
    assert found["edges_s"][:4] == [0.0, 0.1, 0.2, 0.3]
    assert found["samples"] == [0, 1, 1, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("durations_s", [[], [0.0]])
def test_nothing_has_one_bin(durations_s: list[float]) -> None:
    found = duration_histogram(np.array(durations_s, np.float64))
    assert found == {"edges_s": [0.0, 0.1], "samples": [len(durations_s)], "hours": [0.0]}


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_bars_rise_with_the_counts_and_none_that_counts_is_empty(counts: list[int]) -> None:
    lengths = [len(bar) for bar in bars(counts, beside=60)]
    assert [length > 0 for length in lengths] == [count > 0 for count in counts]
    assert max(lengths) == (40 if any(counts) else 0)
    pairs: list[tuple[Any, Any]] = sorted(zip(counts, lengths, strict=True))
    assert [length for _, length in pairs] == sorted(lengths)
