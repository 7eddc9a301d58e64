"""How well a model of classes does: accuracy, and F1 by counts that ranks can sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from forebay.steps.batch import IGNORED
from forebay.store.layout import Array


@dataclass(frozen=True, kw_only=True)
class ClassCounts:
    """Of each class, in how many samples it was right, said and wanted: int64 [classes]."""

    right: Array
    said: Array
    wanted: Array
    several: bool
    """Whether a sample has any number of classes, each of which is said where its logit is above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassRates:
    """accuracy: share of samples whose likeliest class is theirs; None where a sample has several classes.

    f1: of each class 2 * right / (said + wanted), and the mean over the classes that are said or wanted (macro).
    f1_micro: the same of the sums over all classes. None where there is no class.
    """

    accuracy: float | None = None
    f1: float | None = None
    f1_micro: float | None = None


def counted(logits: torch.Tensor, labels: torch.Tensor) -> ClassCounts:
    """Returns the counts of a batch.

    logits: [batch, classes]. labels: int64 [batch], a class or -100 for none; or floats [batch, classes], 0 and 1.
    """
    logits, labels, several = logits.float().cpu(), labels.cpu(), labels.is_floating_point()
    if several:
        said, wanted = logits > 0, labels > 0.5
    else:
        known, classes = labels != IGNORED, torch.arange(logits.shape[1])
        said, wanted = ((rows[known, None] == classes) for rows in (logits.argmax(-1), labels))
    right, says, wants = (each.sum(0).numpy() for each in (said & wanted, said, wanted))
    return ClassCounts(right=right, said=says, wanted=wants, several=several)


def class_rates(counts: Iterable[ClassCounts]) -> ClassRates:
    """Returns the rates of all counts together; each None where there are none."""
    own = list(counts)
    if not own:
        return ClassRates()
    right, both = (np.sum(each, axis=0) for each in ([c.right for c in own], [c.said + c.wanted for c in own]))
    samples = int(sum(c.wanted.sum() for c in own))
    occurs = both > 0
    if not occurs.any():
        return ClassRates()
    return ClassRates(
        accuracy=None if own[0].several else int(right.sum()) / samples,
        f1=float(np.mean(2 * right[occurs] / both[occurs])),
        f1_micro=2 * int(right.sum()) / int(both.sum()),
    )
