"""The plan of a config over what it reads. Loads no torch: `forebay preprocess` makes the plan too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import Config
from forebay.errors import ConfigError
from forebay.store.cache import ROW_BITS
from forebay.train.plan import BucketPlan, Samples, WindowPlan, make_plan, plan_key, resolve_plan
from forebay.train.source import SampleSource
from forebay.train.union import without_audio


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and where it is kept; `folder` is None where it is only in memory."""

    plan: BucketPlan | WindowPlan
    key: str
    folder: Path | None

    def summary(self) -> str:
        """Returns one line for a terminal."""
        plan = self.plan
        shapes = f"{len(plan.batch_sizes)} buckets" if isinstance(plan, BucketPlan) else f"{plan.num_windows} windows"
        line = f"plan: {plan.num_batches} batches in {shapes}"
        if self.folder is None:
            return f"{line}, not kept (the cache root cannot be written)"
        padding = json.loads((self.folder / "packing_stats.json").read_bytes())["padding"]
        return f"{line}, {100 * padding:.1f} % padding"


def plan_of(config: Config, source: SampleSource, *, keep: bool = True) -> Planned:
    """Returns the plan of a config over a source: the one on disk, or made now and, with `keep`, saved.

    Raises ConfigError without a `[plan]` section, PlanError where no plan can be made.
    """
    if config.plan is None:
        raise ConfigError(f"{config.path}: no [plan] section; add one, for example: [plan] batch_seconds = 120")
    durations = np.asarray(source.lengths["num_samples"])
    rate = int(source.constants["sample_rate_hz"])
    key = plan_key(source.key, config.plan)
    slots = getattr(source, "slots", None)  # only what is read from a cache lies in shards
    texts = without_audio(source)

    def tokens() -> np.ndarray[Any, Any]:
        return np.asarray(source.lengths["num_tokens"])

    def frames() -> np.ndarray[Any, Any]:
        stored = np.asarray(source.lengths["num_frames"])
        return stored if texts is None else np.where(texts, tokens(), stored)

    shards = None if slots is None else lambda: (np.asarray(slots) >> ROW_BITS).astype(np.int32)
    if not keep:
        samples = Samples(durations=durations, sample_rate_hz=rate, tokens=tokens, shards=shards, texts=texts)
        return Planned(plan=make_plan(samples, config.plan), key=key, folder=None)
    plan, folder = resolve_plan(
        config.cache_root,
        durations,
        frames=frames,
        sample_rate_hz=rate,
        dataset=config.name,
        split=config.source.split,
        cache_key=source.key,
        settings=config.plan,
        tokens=tokens,
        shards=shards,
        texts=texts,
    )
    return Planned(plan=plan, key=key, folder=folder)
