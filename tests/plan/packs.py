"""Lengths as they come in vision-language data, and packs as lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.plan.pack.pack_plan import PackPlan

SEQ_LEN = 8192
Array = np.ndarray[Any, Any]


def question_answers(count: int) -> Array:
    """200 to 400 tokens, and 2 % of any length up to a whole pack: int32."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(200, 401, count)
    is_long = rng.random(count) < 0.02
    lengths[is_long] = rng.integers(401, SEQ_LEN + 1, is_long.sum())
    return lengths.astype(np.int32)


def lognormal(count: int) -> Array:
    """Lengths of median 600, cut off at a whole pack: int32."""
    rng = np.random.default_rng(count)
    return np.clip(np.exp(rng.normal(np.log(600), 1.0, count)), 1, SEQ_LEN).astype(np.int32)


def photos_and_text(count: int, *, text_share: float) -> tuple[Array, Array]:
    """Tokens and patches: one to three photos of 64 to 1280 tokens, four patches each, and text; or text alone."""
    rng = np.random.default_rng(count)
    photos = rng.choice([1, 1, 1, 2, 3], count)
    sizes = np.clip(np.exp(rng.normal(np.log(400), 0.5, (3, count))), 64, 1280).astype(np.int64)
    images = (sizes * (np.arange(3)[:, None] < photos)).sum(0)
    is_text = rng.random(count) < text_share
    images[is_text] = 0
    return images + rng.integers(30, 300, count) + is_text * rng.integers(0, 900, count), 4 * images


def packs_of(plan: PackPlan) -> list[Array]:
    return np.split(plan.members, plan.offsets[1:-1])
