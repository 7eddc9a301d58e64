"""The packers on the histogram, against packers that take one sample after another."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.plan.pack.fewest import num_packs
from forebay.plan.pack.fit import Pattern, best_fit, best_fit_decreasing, hand_out, shuffle_inside, shuffled_groups
from tests.plan.packs import SEQ_LEN, lognormal, question_answers

Array = np.ndarray[Any, Any]


@st.composite
def histograms(draw: st.DrawFn) -> Array:
    """Counts of lengths 1 to `seq_len`: few or many lengths, once or thousands of times."""
    seq_len = draw(st.integers(1, 200))
    count = st.sampled_from([1, 2, 3, 17, 4000])
    held = draw(st.dictionaries(st.integers(1, seq_len), count, min_size=1, max_size=30))
    counts = np.zeros(seq_len + 1, dtype=np.int64)
    counts[list(held)] = list(held.values())
    return counts


def used(patterns: list[Pattern], seq_len: int) -> Array:
    counts = np.zeros(seq_len + 1, dtype=np.int64)
    for times, lengths in patterns:
        np.add.at(counts, lengths, times)
    return counts


@given(histograms())
def test_patterns_use_every_sample_once_within_the_room(counts: Array) -> None:
    seq_len = len(counts) - 1
    for patterns in (best_fit(counts, seq_len=seq_len), best_fit_decreasing(counts, seq_len=seq_len)):
        assert used(patterns, seq_len).tolist() == counts.tolist()
        assert max(sum(lengths) for _, lengths in patterns) <= seq_len
        assert min(times for times, _ in patterns) >= 1


@given(histograms().filter(lambda counts: counts.sum() < 5000))
def test_best_fit_decreasing_packs_as_the_plain_loop_does(counts: Array) -> None:
    seq_len = len(counts) - 1
    patterns = best_fit_decreasing(counts, seq_len=seq_len)
    rooms = sorted(seq_len - sum(lengths) for times, lengths in patterns for _ in range(times))
    assert rooms == plain_best_fit_decreasing(np.repeat(np.arange(seq_len + 1), counts), seq_len=seq_len)


def plain_best_fit_decreasing(lengths: Array, *, seq_len: int) -> list[int]:
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        place = bisect_left(rooms, length)
        insort(rooms, (rooms.pop(place) if place < len(rooms) else seq_len) - length)
    return rooms


@pytest.mark.parametrize("lengths", [question_answers(200_000), lognormal(200_000)], ids=["vqa", "lognormal"])
def test_packs_that_are_alike_are_one_pattern(lengths: Array) -> None:
    counts = np.bincount(lengths, minlength=SEQ_LEN + 1)
    patterns = best_fit(counts, seq_len=SEQ_LEN)
    assert len(patterns) < num_packs(patterns) / 2
    assert num_packs(patterns) / (lengths.sum() / SEQ_LEN) <= 1.0005


def test_exact_pairs_are_found() -> None:
    counts = np.zeros(101, dtype=np.int64)
    counts[[70, 30, 55, 45, 50]] = [5, 5, 3, 3, 4]
    patterns = best_fit(counts, seq_len=100)
    assert {sum(lengths) for _, lengths in patterns} == {100}
    counts[50] = 3  # the last one is alone
    assert num_packs(best_fit(counts, seq_len=100)) == 10


# The samples


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 2**64 - 1))
def test_groups_stay_together_and_places_are_shuffled_inside(groups: list[int], key: int) -> None:
    array = np.array(groups, dtype=np.int64)
    places = shuffled_groups(array, key=key)
    assert sorted(places.tolist()) == list(range(len(groups)))
    assert array[places].tolist() == sorted(groups)


def test_every_order_of_a_group_is_as_likely() -> None:
    orders = [tuple(shuffled_groups(np.zeros(3, dtype=np.int64), key=key).tolist()) for key in range(6000)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert max(abs(count - 1000) for count in counts) < 150


def test_a_sample_is_handed_out_once_and_has_the_length_of_its_place() -> None:
    lengths = np.array([3, 5, 3, 3, 5, 2, 3, 2])
    patterns: list[Pattern] = [(2, [5, 3]), (1, [2, 3, 2]), (1, [3])]
    members, offsets = hand_out(lengths, patterns, key=7)
    assert offsets.tolist() == [0, 2, 4, 7, 8]
    assert lengths[members].tolist() == [5, 3, 5, 3, 2, 3, 2, 3]
    assert sorted(members.tolist()) == list(range(8))


def test_pieces_of_packs_are_shuffled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    members = np.arange(1000, dtype=np.int32)
    offsets = np.array([0, 5, 6, 300, 301, 640, 1000])
    whole = members.copy()
    shuffle_inside(whole, offsets, key=3)
    monkeypatch.setattr("forebay.plan.pack.fit._PIECE", 100)
    pieces = members.copy()
    shuffle_inside(pieces, offsets, key=3)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        assert sorted(whole[start:stop].tolist()) == list(range(start, stop))
        assert sorted(pieces[start:stop].tolist()) == list(range(start, stop))
    assert (whole != members).mean() > 0.9
