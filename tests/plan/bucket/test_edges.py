from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import BucketConfig
from forebay.plan.make_buckets import bucket_edges, bucket_plan, optimal_cuts
from forebay.plan.statistics import batch_statistics


def cost(cuts: tuple[int, ...] | list[int], counts: list[int], tops: list[int]) -> int:
    """The cost of samples that are padded to the upper edge of their bucket."""
    firsts = [0, *(cut + 1 for cut in cuts[:-1])]
    return sum(sum(counts[first : cut + 1]) * tops[cut] for first, cut in zip(firsts, cuts, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 10),
)
def test_no_other_edges_pad_less(bins: list[tuple[int, int]], k: int) -> None:
    counts = [count for count, _ in bins]
    tops = np.cumsum([width for _, width in bins]).tolist()
    cuts = optimal_cuts(np.array(counts), np.array(tops), k=k)
    assert len(cuts) == min(k, len(bins))
    assert cuts == sorted(set(cuts))
    assert cuts[-1] == len(bins) - 1
    others = itertools.combinations(range(len(bins) - 1), len(cuts) - 1)
    assert cost(cuts, counts, tops) == min(cost((*other, len(bins) - 1), counts, tops) for other in others)


def test_large_counts_do_not_overflow() -> None:
    counts, tops = np.full(1024, 2**21), np.arange(1, 1025) * 2**12
    cuts = optimal_cuts(counts, tops, k=4)
    assert np.abs(np.array(cuts) - [255, 511, 767, 1023]).max() == 0


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=80), st.integers(1, 12))
def test_edges_hold_every_sample_below_them(lengths: list[int], k: int) -> None:
    durations = np.array(lengths)
    edges = bucket_edges(durations, sample_rate_hz=1000, settings=BucketConfig(k=k, batch_size=1))
    assert edges == sorted(set(edges))
    assert 1 <= len(edges) <= k
    assert edges[-1] > durations.max()
    plan = bucket_plan(durations, sample_rate_hz=1000, settings=BucketConfig(k=k, batch_size=1))
    assert (plan.bucket_sizes > 0).all()
    assert plan.edges_s == tuple(edge / 1000 for edge in edges)


def test_few_lengths_have_a_bucket_each() -> None:
    durations = np.array([5, 5, 9, 9, 9, 30])
    plan = bucket_plan(durations, sample_rate_hz=10, settings=BucketConfig(k=64, batch_size=2))
    assert plan.bucket_sizes.tolist() == [2, 3, 1]
    assert batch_statistics(plan, durations)["padding"] == 0.0


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_pieces_and_dtypes_do_not_change_the_edges(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    durations = np.random.default_rng(1).integers(0, 30_000, 5000)
    settings = BucketConfig(k=9, batch_size=1)
    whole = bucket_edges(durations, sample_rate_hz=1000, settings=settings)
    monkeypatch.setattr("forebay.plan.make_buckets.PIECE", 77)
    assert bucket_edges(durations.astype(dtype), sample_rate_hz=1000, settings=settings) == whole


def test_more_edges_pad_less() -> None:
    durations = np.random.default_rng(1).integers(500, 30_000, 20_000)
    found = [
        batch_statistics(
            bucket_plan(durations, sample_rate_hz=1000, settings=BucketConfig(k=k, batch_seconds=60)), durations
        )
        for k in (1, 4, 16, 64)
    ]
    padding = [document["padding"] for document in found]
    assert padding == sorted(padding, reverse=True)
    assert padding[-1] < 0.03 < 0.2 < padding[0]
