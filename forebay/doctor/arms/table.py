"""The arms by their names."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from forebay.doctor.arms import codecs, loaders, pieces, plans, raw
from forebay.doctor.bench import Bench


def _step(bench: Bench, seconds: float) -> Any:
    # transformers and accelerate take seconds to import, and a step that is given needs neither.
    return pkgutil.resolve_name("forebay.doctor.arms.step:step")(bench, seconds)


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
    "step": _step,
}
