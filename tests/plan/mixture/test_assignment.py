from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PlanError
from forebay.plan.mixture.sources import PERIOD, Assignment, quantise
from tests.strategies import whole_weights

TWELVE = {
    "english": 0.1396,
    "telugu": 0.1273,
    "hindi": 0.1264,
    "punjabi": 0.1245,
    "malayalam": 0.1095,
    "gujarati": 0.0960,
    "kannada": 0.0874,
    "tamil": 0.0725,
    "bengali": 0.0416,
    "marathi": 0.0360,
    "odia": 0.0307,
    "assamese": 0.0086,
}
"""The twelve languages of the issue."""


def deviation(assignment: Assignment) -> float:
    """The largest distance of a source from its share over every prefix of one period, counted without the class."""
    period, weights = assignment.period, assignment.weights
    sources = assignment.locate(np.arange(period))[0]
    lengths, worst = np.arange(1, period + 1), 0
    for source, weight in enumerate(weights.tolist()):
        worst = max(worst, int(np.abs(np.cumsum(sources == source) * period - lengths * weight).max()))
    return worst / period


def tijdeman(weights: Any) -> float:
    """His bound for the number of sources that have a weight."""
    live = int((np.asarray(weights) > 0).sum())
    return 1 - 1 / (2 * live - 2) if live > 1 else 0.0


def random_weights(rng: np.random.Generator, total: int) -> np.ndarray[Any, Any]:
    """Whole weights of that sum: 1 to 60 sources, from equal to very unequal ones."""
    parts = rng.exponential(size=int(rng.integers(1, 61))) ** rng.integers(0, 6)
    return np.asarray(rng.multinomial(total, parts / parts.sum()))


def test_thousands_of_random_weights_stay_within_tijdemans_bound() -> None:
    rng = np.random.default_rng(4)
    for _ in range(3000):
        weights = random_weights(rng, int(rng.integers(1, 700)))
        assert deviation(Assignment(weights)) <= tijdeman(weights) + 1e-12


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.wide)])
def test_whole_periods_of_65536_too(count: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(count):
        weights = random_weights(rng, PERIOD)
        assignment = Assignment(weights)
        assert assignment.period * np.gcd.reduce(weights) == PERIOD
        assert deviation(assignment) <= tijdeman(weights) + 1e-12


def test_the_twelve_languages_are_within_one_at_every_prefix() -> None:
    weights = quantise(list(TWELVE.values()))
    shares = np.array(list(TWELVE.values())) / sum(TWELVE.values())  # the table sums to 1.0001
    assert np.abs(weights / PERIOD - shares).max() < 1 / PERIOD
    assignment = Assignment(weights)
    assert deviation(assignment) <= tijdeman(weights) < 1
    # So every batch, wherever it begins, holds each language within two of its share.
    for size in (16, 32, 64, 128):
        counts = np.diff(assignment.counts(np.arange(0, PERIOD + 1, size)), axis=0)
        assert (counts.sum(1) == size).all()
        assert (np.abs(counts - size * assignment.weights / PERIOD) < 2).all()


@given(whole_weights(), st.integers(0, 2**45))
def test_place_and_turn_are_one_to_one_and_counts_count(weights: list[int], start: int) -> None:
    assignment = Assignment(np.array(weights))
    places = start + np.arange(50)
    sources, ordinals = assignment.locate(places)
    assert np.array_equal(assignment.places(sources, ordinals), places)
    counts = assignment.counts(places)
    assert np.array_equal(counts.sum(-1), places)
    assert np.array_equal(counts[np.arange(50), sources], ordinals)
    assert np.array_equal(np.diff(counts, axis=0), np.eye(len(weights), dtype=int)[sources[:-1]])
    assert not set(sources.tolist()) & set(np.flatnonzero(np.array(weights) == 0).tolist())


@given(whole_weights())
def test_the_sequence_begins_again_after_a_period_and_a_common_factor_changes_nothing(weights: list[int]) -> None:
    assignment, tripled = Assignment(np.array(weights)), Assignment(np.array(weights) * 3)
    places = np.arange(assignment.period)
    sources = assignment.locate(places)[0]
    assert np.array_equal(np.bincount(sources, minlength=len(weights)), assignment.weights)
    for cycle in (1, 2**30):
        assert np.array_equal(assignment.locate(places + cycle * assignment.period)[0], sources)
    assert np.array_equal(tripled.locate(places)[0], sources)


def test_shapes_are_kept() -> None:
    assignment = Assignment(np.array([2, 0, 1]))
    places = np.arange(12).reshape(3, 4)
    assert assignment.locate(places)[0].shape == (3, 4)
    assert assignment.counts(places).shape == (3, 4, 3)
    assert assignment.locate(np.arange(6))[0].tolist() == [0, 2, 0, 0, 2, 0]


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [PERIOD, 1]])
def test_weights_of_another_sum_are_refused(weights: list[int]) -> None:
    with pytest.raises(PlanError, match=r"weights of an assignment are .* wanted 0 or more, of sum 1 to 65536"):
        Assignment(np.array(weights, dtype=np.int64))
