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
from forebay.store.canonical import digest
from forebay.train.plan import (
    AnyPlan,
    BucketPlan,
    PackPlan,
    Samples,
    make_plan,
    pack_plan,
    plan_content,
    plan_key,
    resolve_packs,
    resolve_plan,
    sealed_content,
    state_key,
)
from forebay.train.source import Identified, SampleSource
from forebay.train.union import parts_of, without_audio

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and where it is kept; `folder` is None where it is only in memory.

    key: what a loader's state is checked by. earlier_key: what it was checked by in states of before.
    """

    plan: AnyPlan
    key: str
    earlier_key: str
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
    plan, folder = _plan_and_folder(config, config.plan, source, keep=keep)
    key = key_of(plan, folder, source=source, settings=config.plan)
    return Planned(plan=plan, key=key, earlier_key=plan_key(source.key, config.plan), folder=folder)


def key_of(plan: AnyPlan, folder: Path | None, *, source: SampleSource, settings: PlanConfig) -> str:
    """Returns what the states of a loader over this plan are checked by: the same for a cache and for its uncached steps.

    folder: of the plan, which knows the checksums of its arrays; None: they are computed.
    """
    content, sample_ids = (plan_content(plan), None) if folder is None else sealed_content(folder)
    recipe, ids = _identity(source)
    return state_key(settings, recipe=recipe, sample_ids=sample_ids or ids(), content=content)


def _identity(source: SampleSource) -> tuple[str, Callable[[], str]]:
    """Returns how the samples of a source are made, and what tells which they are; of a union, of all its parts."""
    parts = parts_of(source)
    recipes = [part.recipe_key if isinstance(part, Identified) else part.key for part in parts]

    def ids() -> str:
        return digest([part.ids_digest() if isinstance(part, Identified) else part.key for part in parts])

    return digest(recipes), ids


def _plan_and_folder(
    config: Config, settings: PlanConfig, source: SampleSource, *, keep: bool
) -> tuple[AnyPlan, Path | None]:
    slots = getattr(source, "slots", None)  # only what is read from a cache lies in shards
    texts = without_audio(source)

    def tokens() -> Array:
        return np.asarray(source.lengths["num_tokens"])

    def frames() -> np.ndarray[Any, Any]:
        stored = np.asarray(source.lengths["num_frames"])
        return stored if texts is None else np.where(texts, tokens(), stored)

    shards = None if slots is None else lambda: (np.asarray(slots) >> ROW_BITS).astype(np.int32)
    if settings.kind == "pack":
        return _packs_of(config, settings, source, shards=shards, keep=keep)
    durations = np.asarray(source.lengths["num_samples"])
    rate = int(source.constants["sample_rate_hz"])
    if not keep:
        samples = Samples(durations=durations, sample_rate_hz=rate, tokens=tokens, shards=shards, texts=texts)
        return make_plan(samples, settings), None
    return resolve_plan(
        config.cache_root,
        durations,
        frames=frames,
        sample_rate_hz=rate,
        dataset=config.name,
        split=config.source.split,
        cache_key=source.key,
        settings=settings,
        tokens=tokens,
        shards=shards,
        texts=texts,
        sample_ids=_identity(source)[1],
    )


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
        sample_ids=_identity(source)[1],
    )
