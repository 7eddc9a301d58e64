"""The plan of a config over what it reads. Loads no torch: `forebay preprocess` makes the plan too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import Config, PlanConfig
from forebay.errors import ConfigError
from forebay.store.cache import ROW_BITS
from forebay.train.plan import (
    AnyPlan,
    BucketPlan,
    PackPlan,
    Samples,
    make_plan,
    pack_plan,
    plan_key,
    resolve_packs,
    resolve_plan,
)
from forebay.train.source import SampleSource
from forebay.train.union import without_audio

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and where it is kept; `folder` is None where it is only in memory."""

    plan: AnyPlan
    key: str
    folder: Path | None

    def summary(self) -> str:
        """Returns one line for a terminal."""
        plan = self.plan
        if isinstance(plan, PackPlan):
            return self._summary_of_packs(plan)
        shapes = f"{len(plan.batch_sizes)} buckets" if isinstance(plan, BucketPlan) else f"{plan.num_windows} windows"
        line = f"plan: {plan.num_batches} batches in {shapes}"
        if self.folder is None:
            return f"{line}, {_NOT_KEPT}"
        padding = json.loads((self.folder / "packing_stats.json").read_bytes())["padding"]
        return f"{line}, {100 * padding:.1f} % padding"

    def _summary_of_packs(self, plan: PackPlan) -> str:
        line = f"plan: {len(plan.members)} samples in {plan.num_batches} packs"
        line += "".join(f", {len(found)} left out as {reason}" for reason, found in plan.unplaced.items() if len(found))
        if self.folder is None:
            return f"{line}, {_NOT_KEPT}"
        fill = json.loads((self.folder / "packing_stats.json").read_bytes())["fill"]
        return f"{line}, {100 * fill:.2f} % fill"


_NOT_KEPT = "not kept (the cache root cannot be written)"


def plan_of(config: Config, source: SampleSource, *, keep: bool = True) -> Planned:
    """Returns the plan of a config over a source: the one on disk, or made now and, with `keep`, saved.

    Raises ConfigError without a `[plan]` section, PlanError where no plan can be made.
    """
    if config.plan is None:
        raise ConfigError(f"{config.path}: no [plan] section; add one, for example: {plan_example(config)}")
    key = plan_key(source.key, config.plan)
    slots = getattr(source, "slots", None)  # only what is read from a cache lies in shards
    texts = without_audio(source)

    def tokens() -> Array:
        return np.asarray(source.lengths["num_tokens"])

    def frames() -> np.ndarray[Any, Any]:
        stored = np.asarray(source.lengths["num_frames"])
        return stored if texts is None else np.where(texts, tokens(), stored)

    shards = None if slots is None else lambda: (np.asarray(slots) >> ROW_BITS).astype(np.int32)
    if config.plan.kind == "pack":
        plan, folder = _packs_of(config, config.plan, source, shards=shards, keep=keep)
        return Planned(plan=plan, key=key, folder=folder)
    durations = np.asarray(source.lengths["num_samples"])
    rate = int(source.constants["sample_rate_hz"])
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


def plan_example(config: Config) -> str:
    """Returns what a `[plan]` section for the data of a config may say."""
    if config.vision is not None:
        return '[plan] with kind = "pack" and seq_len = 8192'
    if config.audio.features == "none":
        return "[plan] with k = 8 and batch_tokens = 8192"
    return "[plan] with batch_seconds = 120"


def _packs_of(
    config: Config, settings: PlanConfig, source: SampleSource, *, shards: Callable[[], Array] | None, keep: bool
) -> tuple[AnyPlan, Path | None]:
    tokens = np.asarray(source.lengths["num_tokens"])

    def patches() -> Array:
        return np.asarray(source.lengths["num_patches"])

    if not keep:
        return pack_plan(tokens, patches=patches(), settings=settings), None
    return resolve_packs(
        config.cache_root,
        tokens,
        patches=patches,
        images=lambda: np.asarray(source.lengths["num_images"]),
        dataset=config.name,
        split=config.source.split,
        cache_key=source.key,
        settings=settings,
        shards=shards,
    )
