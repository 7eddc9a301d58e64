"""How fast texts are spoken beside the others of their language: what shows a text that is of another recording."""

from __future__ import annotations

import numpy as np

from forebay.store.layout import Array, Ints

OUT_OF_RANGE = 3.5
"""A robust z-score from which on a value is called an outlier (Iglewicz and Hoaglin 1993)."""

_ENOUGH = 20
"""Samples from which on a language has a range of its own; smaller languages share one."""

_LEAST_SPREAD = 0.05
"""Of the logarithm: equal texts of equal lengths would make any other sample an outlier."""


def middle_and_spread(values: Array, *, least: float) -> tuple[float, float]:
    """Returns the median and the robust deviation, MAD / 0.6745, which is `least` or more.

    values: float64 [one or more].
    """
    middle = float(np.median(values))
    return middle, max(float(np.median(np.abs(values - middle))) / 0.6745, least)


def pace_scores(characters_per_s: Array, language_of: Ints, *, num_languages: int) -> Array:
    """Returns how far the characters a second of each sample are from those of its language, in robust deviations.

    float64 [num_samples]: 0.6745 * (x - median) / MAD of the logarithm, languages with fewer than 20 samples taken
    together. characters_per_s: float64 [num_samples], NaN where there is no text or no length, and then the score is
    NaN too. language_of: int [num_samples], below `num_languages`.
    """
    x = np.log(characters_per_s)
    known = np.isfinite(x)
    counts = np.bincount(language_of[known], minlength=num_languages)
    groups = np.where(counts[language_of] < _ENOUGH, -1, language_of)
    scores = np.full(len(x), np.nan)
    for group in np.unique(groups[known]):
        own = known & (groups == group)
        middle, spread = middle_and_spread(x[own], least=_LEAST_SPREAD)
        scores[own] = (x[own] - middle) / spread
    return scores
