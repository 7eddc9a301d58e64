"""Settings to a plan, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.config import PlanConfig
from forebay.errors import PlanError
from forebay.train.plan.bucket import BucketPlan, bucket_plan
from forebay.train.plan.interface import Array
from forebay.train.plan.window import WindowPlan, window_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What plans are made of, in sample order.

    durations: integers [num_samples], in audio samples at sample_rate_hz. The others are called only where they are
    needed; they give integers [num_samples]: tokens (of labels), shards (the number of the shard that holds the sample).
    None: not known. texts: bool [num_samples], those without audio, whose length is their tokens; None: there are none.
    """

    durations: Array
    sample_rate_hz: int
    tokens: Callable[[], Array] | None = None
    shards: Callable[[], Array] | None = None
    texts: Array | None = None


def make_plan(samples: Samples, settings: PlanConfig) -> BucketPlan | WindowPlan:
    """Returns the plan of some samples. Raises PlanError where none can be made."""
    if settings.kind == "window":
        return window_plan(_window_lengths(samples, settings), sample_rate_hz=samples.sample_rate_hz, settings=settings)
    return bucket_plan(
        samples.durations,
        sample_rate_hz=samples.sample_rate_hz,
        settings=settings,
        tokens=_tokens(samples) if settings.batch_tokens is not None or samples.texts is not None else None,
        shards=samples.shards() if samples.shards is not None and settings.locality_shards is not None else None,
        texts=samples.texts,
    )


def _window_lengths(samples: Samples, settings: PlanConfig) -> Array:
    """Returns what windows are sorted by: durations, or where no sample has audio tokens."""
    if samples.texts is None or samples.tokens is None:
        return samples.durations
    if not samples.texts.all() or settings.batch_seconds is not None:
        raise PlanError(
            f'plan.kind = "window" sorts by one length, and {int(samples.texts.sum())} of {len(samples.texts)} samples have '
            'no audio; give plan.batch_size for text alone, or plan.kind = "bucket" with edges and batch_tokens'
        )
    return np.asarray(samples.tokens())


def _tokens(samples: Samples) -> Array | None:
    """Returns the tokens of the samples; None where they have no text, and no batch could be sized by it."""
    tokens = np.asarray(samples.tokens()) if samples.tokens is not None else None
    return tokens if tokens is not None and tokens.any() else None
