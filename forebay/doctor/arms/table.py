"""The arms by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.doctor.arms import codecs, loaders, pieces, plans, raw, step
from forebay.doctor.bench import Bench

ARMS: dict[str, Callable[[Bench, float], Any]] = {
    "find": raw.find,
    "listing": raw.listing,
    "raw read": raw.reads,
    "steps of a build": raw.made,
    "cache": pieces.pieces,
    "plan": plans.plans,
    "cached loader": loaders.cached,
    "uncached loader": loaders.uncached,
    "uncached DataLoader": loaders.workers,
    "codecs": codecs.codecs,
    "step": step.step,
}
