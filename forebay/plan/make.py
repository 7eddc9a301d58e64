"""Settings to a plan, whatever its kind.

A config's plan from the shelf, or made now.

The plan of a config over what it reads. Loads no torch: `forebay preprocess` makes the plan too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.plan import LengthsConfig, PackConfig, PlanConfig, WindowConfig
from forebay.config.tree import Config
from forebay.errors import CacheCorruptError, CacheNotFoundError, ConfigError, PlanError
from forebay.plan.bucket.make import bucket_plan
from forebay.plan.bucket.plan import BucketPlan
from forebay.plan.disk import (
    AnyPlan,
    load_plan,
    plan_content,
    plan_folder,
    plan_key,
    save_plan,
    sealed_content,
    state_key,
)
from forebay.plan.pack.plan import PackPlan, pack_plan
from forebay.plan.pack.statistics import pack_statistics
from forebay.plan.statistics import statistics
from forebay.plan.window import WindowPlan, window_plan
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, Array
from forebay.store.source import SampleSource, parts_of, without_audio


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


def make_plan(samples: Samples, settings: LengthsConfig) -> BucketPlan | WindowPlan:
    """Returns the plan of some samples. Raises PlanError where none can be made."""
    if isinstance(settings, WindowConfig):
        return window_plan(_window_lengths(samples, settings), sample_rate_hz=samples.sample_rate_hz, settings=settings)
    return bucket_plan(
        samples.durations,
        sample_rate_hz=samples.sample_rate_hz,
        settings=settings,
        tokens=_tokens(samples) if settings.batch_tokens is not None or samples.texts is not None else None,
        shards=samples.shards() if samples.shards is not None and settings.locality_shards is not None else None,
        texts=samples.texts,
    )


def _window_lengths(samples: Samples, settings: WindowConfig) -> Array:
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
    settings: LengthsConfig,
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
    settings: PackConfig,
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
    recipes = [part.recipe_key for part in parts]

    def ids() -> str:
        return digest([part.ids_digest() for part in parts])

    return digest(recipes), ids


def _plan_and_folder(
    config: Config, settings: PlanConfig, source: SampleSource, *, keep: bool
) -> tuple[AnyPlan, Path | None]:
    slots = source.slots
    texts = without_audio(source)

    def tokens() -> Array:
        return np.asarray(source.lengths["num_tokens"])

    def frames() -> np.ndarray[Any, Any]:
        stored = np.asarray(source.lengths["num_frames"])
        return stored if texts is None else np.where(texts, tokens(), stored)

    shards = None if slots is None else lambda: (slots >> ROW_BITS).astype(np.int32)
    if isinstance(settings, PackConfig):
        return _packs_of(config, settings, source, shards=shards, keep=keep)
    durations = np.asarray(source.lengths["num_audio_samples"])
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
    if config.modality == "vision":
        return '[plan] with kind = "pack" and seq_len = 8192'
    if config.audio.features == "none":
        return "[plan] with k = 8 and batch_tokens = 8192"
    return "[plan] with batch_seconds = 120"


def _packs_of(
    config: Config, settings: PackConfig, source: SampleSource, *, shards: Callable[[], Array] | None, keep: bool
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
