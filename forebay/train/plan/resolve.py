"""A config's plan from the shelf, or made now."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.config import PlanConfig
from forebay.errors import CacheCorruptError, CacheNotFoundError
from forebay.train.plan.bucket import BucketPlan
from forebay.train.plan.disk import AnyPlan, load_plan, plan_folder, save_plan
from forebay.train.plan.interface import Array
from forebay.train.plan.make import Samples, make_plan
from forebay.train.plan.pack import PackPlan, pack_plan
from forebay.train.plan.pack_stats import pack_statistics
from forebay.train.plan.packing_stats import statistics
from forebay.train.plan.window import WindowPlan

logger = logging.getLogger(__name__)


def resolve_plan(
    root: Path,
    durations: Array,
    *,
    frames: Callable[[], Array],
    sample_rate_hz: int,
    dataset: str,
    split: str,
    cache_key: str,
    settings: PlanConfig,
    tokens: Callable[[], Array] | None = None,
    shards: Callable[[], Array] | None = None,
    texts: Array | None = None,
    sample_ids: Callable[[], str] | None = None,
) -> tuple[AnyPlan, Path | None]:
    """Returns the plan of a sealed cache and its folder: opened where it is under `root`, else built and saved.

    durations: integers [num_samples], in audio samples. The others give integers [num_samples] and are called only when a
    plan has to be made: frames, of features; tokens, of labels; shards, the number of each sample's shard. texts: see
    `Samples`; frames are then tokens. sample_ids: gives the digest of which samples these are, for the plan's metadata.
    Where the root cannot be written the plan stays in memory, the folder is None and one log line says why. A damaged
    plan is made again: unlike a cache it costs seconds. Raises CacheMismatchError for a plan of another cache or of a newer
    format under the same name, PlanError where no plan can be made.
    """
    folder = plan_folder(root, dataset=dataset, split=split, cache_key=cache_key, settings=settings)

    def make() -> tuple[BucketPlan | WindowPlan, dict[str, Any]]:
        samples = Samples(durations=durations, sample_rate_hz=sample_rate_hz, tokens=tokens, shards=shards, texts=texts)
        plan = make_plan(samples, settings)
        return plan, statistics(plan, durations, frames=frames(), shards=shards() if shards is not None else None)

    return _resolved(
        folder, make, cache_key=cache_key, settings=settings, num_samples=len(durations), sample_ids=sample_ids
    )


def resolve_packs(
    root: Path,
    tokens: Array,
    *,
    patches: Callable[[], Array],
    images: Callable[[], Array],
    dataset: str,
    split: str,
    cache_key: str,
    settings: PlanConfig,
    shards: Callable[[], Array] | None = None,
    sample_ids: Callable[[], str] | None = None,
) -> tuple[AnyPlan, Path | None]:
    """Returns the pack plan of a sealed cache and its folder: as `resolve_plan`.

    tokens: integers [num_samples]. patches, images: of each sample, and shards, the number of its shard: called only when
    a plan has to be made.
    """
    folder = plan_folder(root, dataset=dataset, split=split, cache_key=cache_key, settings=settings)

    def make() -> tuple[PackPlan, dict[str, Any]]:
        found = patches()
        plan = pack_plan(tokens, patches=found, settings=settings)
        numbers = shards() if shards is not None else None
        return plan, pack_statistics(plan, tokens, settings=settings, patches=found, images=images(), shards=numbers)

    return _resolved(
        folder, make, cache_key=cache_key, settings=settings, num_samples=len(tokens), sample_ids=sample_ids
    )


def _resolved(
    folder: Path,
    make: Callable[[], tuple[AnyPlan, dict[str, Any]]],
    *,
    cache_key: str,
    settings: PlanConfig,
    num_samples: int,
    sample_ids: Callable[[], str] | None,
) -> tuple[AnyPlan, Path | None]:
    """Returns the plan of a folder, made and saved where it is not there; `make` gives it and its statistics."""
    try:
        return load_plan(folder, cache_key=cache_key, settings=settings, num_samples=num_samples), folder
    except CacheNotFoundError:
        logger.info("no plan in %s yet: making it", folder)
    except CacheCorruptError as err:
        logger.warning("making the plan again: %s", err)
    plan, found = make()
    try:
        ids = sample_ids() if sample_ids is not None else None
        save_plan(plan, folder, cache_key=cache_key, settings=settings, statistics=found, sample_ids=ids)
    except OSError as err:
        logger.warning("the plan stays in memory: %s cannot be written: %s", folder, err)
        return plan, None
    return load_plan(folder, cache_key=cache_key, settings=settings, num_samples=num_samples), folder
