"""Plans of any kind, made of nothing but lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.config.plan import LengthsConfig
from forebay.errors import PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.disk import AnyPlan
from forebay.plan.make import Samples, make_plan
from forebay.plan.pack.pack_plan import PackPlan
from forebay.plan.window import WindowPlan

RATE = 1000
ROWS_PER_SHARD = 8
Array = np.ndarray[Any, Any]


def tokens_of(lengths: Array) -> Array:
    """Roughly a token each 300 ms, and a few that come from nowhere."""
    return lengths // 300 + np.arange(len(lengths)) % 7 + 1


def shards_of(lengths: Array) -> Array:
    return np.arange(len(lengths)) // ROWS_PER_SHARD


def samples_of(lengths: Array) -> Samples:
    return Samples(
        durations=lengths,
        sample_rate_hz=RATE,
        tokens=lambda: tokens_of(lengths),
        shards=lambda: shards_of(lengths),
    )


def of_lengths(plan: AnyPlan) -> BucketPlan | WindowPlan:
    """Returns the plan, which is none of packs."""
    assert not isinstance(plan, PackPlan)
    return plan


def plan_of_any_kind(lengths: Array, settings: LengthsConfig) -> BucketPlan | WindowPlan | None:
    """The plan, or None where `drop` leaves nothing to plan."""
    try:
        return of_lengths(make_plan(samples_of(lengths), settings))
    except PlanError:
        if settings.tail != "drop":
            raise
        return None
