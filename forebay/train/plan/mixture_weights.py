"""Weights of a mixture: normalised, and quantised to whole numbers of 65,536."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from forebay.errors import PlanError
from forebay.train.plan.bucket import Array

PERIOD = 65_536
"""Quantised weights sum to it, and an assignment repeats after it."""


def quantise(weights: Sequence[float]) -> Array:
    """Returns the weights as int64 [num_sources] that sum to 65,536, each within 1 of its exact share of that.

    weights: [num_sources], 0 or more each, of any scale. Largest remainder (Hamilton's method), in rational arithmetic, so
    that every machine gives the same; of equal remainders the first sources' are rounded up. A weight below 1/65,536 of the
    sum may become 0. Raises PlanError for none, too many, a negative or infinite one, or a sum of 0.
    """
    if not 1 <= len(weights) <= PERIOD:
        raise PlanError(f"a mixture has {len(weights)} sources, wanted 1 to {PERIOD}")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise PlanError(f"weight {number} of the mixture is {weight}, wanted a number from 0 on")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if total == 0:
        raise PlanError(f"all {len(weights)} weights of the mixture are 0; give one source at least more than 0")
    shares = [weight * PERIOD / total for weight in exact]
    floors = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: floors[i] - shares[i])  # stable: the first of equals
    for number in by_remainder[: PERIOD - sum(floors)]:
        floors[number] += 1
    return np.array(floors, dtype=np.int64)


def tempered(hours: Sequence[float], temperature: float) -> list[float]:
    """Returns the weights hours^temperature, [num_sources], of scale 1 for the largest; no hours give weight 0.

    temperature: 0 or more; 1 is proportional to hours, less lifts the small sources, 0 makes all equal. (Conneau et al.
    2020, section 3.1, call it alpha.) Raises PlanError for a temperature that is none, and where there are no hours.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise PlanError(f"temperature of the mixture is {temperature}, wanted a number from 0 on")
    largest = max(hours, default=0.0)
    if largest <= 0:
        raise PlanError("no source of the mixture has any audio, so hours give no weights; give weights instead")
    return [(part / largest) ** temperature if part > 0 else 0.0 for part in hours]
