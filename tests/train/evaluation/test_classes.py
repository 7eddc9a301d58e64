"""Accuracy and F1 of classes: those of a plain count, whatever the batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.train.evaluation.rates import ClassRates, class_rates, counted


def f1_of(said: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Returns F1 of each class that occurs, from precision and recall."""
    found = []
    for says, wants in zip(said.T, wanted.T, strict=True):
        if says.any() or wants.any():
            precision = (says & wants).sum() / max(says.sum(), 1)
            recall = (says & wants).sum() / max(wants.sum(), 1)
            found.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return found


@given(st.integers(0, 2**16), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_rates_are_those_of_a_plain_count(seed: int, rows: int, classes: int, several: bool) -> None:  # noqa: FBT001
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(rows, classes)))
    labels = torch.from_numpy(rng.integers(0, classes, rows))
    said = logits.numpy().argmax(1)[:, None] == np.arange(classes)
    wanted = labels.numpy()[:, None] == np.arange(classes)
    if several:
        wanted = rng.random((rows, classes)) < 0.4
        labels, said = torch.from_numpy(wanted).float(), logits.numpy() > 0
    cut = int(rng.integers(0, rows + 1))
    parts = [counted(logits[:cut], labels[:cut]), counted(logits[cut:], labels[cut:])]
    rates = class_rates(parts)
    assert rates == class_rates([counted(logits, labels)])
    own = f1_of(said, wanted)
    if not own:
        assert rates == ClassRates()
        return
    assert rates.f1 == pytest.approx(float(np.mean(own)))
    assert rates.accuracy == (None if several else pytest.approx((said & wanted).sum() / rows))
    if not several:
        assert rates.f1_micro == pytest.approx(rates.accuracy)


def test_samples_without_a_class_do_not_count() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    assert class_rates([counted(logits, torch.tensor([0, -100, 1]))]).accuracy == 0.5
    assert class_rates([counted(logits, torch.full((3,), -100))]) == ClassRates()
    assert class_rates([]) == ClassRates()
