"""A config and what it reads, to its plan and the plan's key: opened where the plan is kept, else made and saved."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.plan import DURATION, BucketConfig, PackConfig, PlanConfig, WindowConfig
from forebay.config.tree import Config
from forebay.errors import CacheCorruptError, CacheNotFoundError, ConfigError, PlanError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.disk import STATISTICS, AnyPlan, load_plan, pack_settings, plan_content, save_plan, sealed_content
from forebay.plan.interface import Plan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.mixture.sources import shards_of_sources
from forebay.plan.names import plan_folder, state_key
from forebay.plan.pack.alike_packs import learnt_tokens, reserved_tokens
from forebay.plan.pack.pack_plan import PackPlan, pack_plan
from forebay.plan.shard_line import shard_run, with_locality
from forebay.plan.statistics import batch_statistics, pack_statistics
from forebay.plan.window import window_plan
from forebay.steps.step import TextStep
from forebay.steps.table import text_step_of
from forebay.store.cut_samples import CutSamples
from forebay.store.key import digest
from forebay.store.layout import ROW_BITS, SIDES, Array
from forebay.store.memo import note
from forebay.store.selection import Selection
from forebay.store.source import RATE, SECONDS, SampleSource, has_untimed_items, length_of, parts_of, without_seconds
from forebay.terminal import during

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and its key, which travel together.

    key: what the states of a loader over the plan are checked by. folder: where the plan is kept; None: only in memory.
    locality: what `plan.locality = "auto"` came to, for messages; None: the config says it itself.
    """

    plan: Plan
    key: str
    folder: Path | None = None
    locality: str | None = None

    def summary(self) -> str:
        """Returns one line for a terminal."""
        line = f"plan: {self.plan.described()}"
        if self.folder is None:
            return f"{line}, not kept on disk"
        found = json.loads((self.folder / STATISTICS).read_bytes())
        share = f"{100 * found['fill']:.2f} % fill" if "fill" in found else f"{100 * found['padding']:.1f} % padding"
        return f"{line}, {share}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The arrays that plans are made of, in sample order.

    durations: integers [num_samples], in audio samples at sample_rate_hz; None: of images. The others are called only
    where they are needed, and give integers [num_samples]: frames (of what is padded), tokens (of labels), patches,
    clip_frames (as they are stored) and images, learnt (tokens, which packs are balanced by), shards (the number of the
    shard that holds the sample); shard_run: see there. None: not known. texts: bool [num_samples], those without
    seconds, whose length is their tokens; None: there are none. are_untimed: all have items and none has seconds;
    without edges in tokens they stand in one bucket. text: the step of their texts.
    sides: integers [num_samples, 2 a group], height and width of the latents of each; None: there are none.
    merge_size: its square is the patches of an image token; 0: no token stands for patches. reserved: see
    `reserved_tokens`.
    cut: counts of conversations that are cut, see `CutSamples`; empty where none is.
    """

    durations: Array | None = None
    sample_rate_hz: int = 0
    frames: Callable[[], Array] | None = None
    tokens: Callable[[], Array] | None = None
    patches: Callable[[], Array] | None = None
    clip_frames: Callable[[], Array] | None = None
    images: Callable[[], Array] | None = None
    learnt: Callable[[], Array] | None = None
    shards: Callable[[], Array] | None = None
    shard_run: Callable[[], int] | None = None
    texts: Array | None = None
    are_untimed: bool = False
    sides: Array | None = None
    merge_size: int = 0
    reserved: int = 0
    text: type[TextStep] | None = None
    cut: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def lengths(self) -> Array:
        """The durations, or of images the tokens: integers [num_samples]."""
        if self.durations is not None:
            return np.asarray(self.durations)
        if self.tokens is None:
            raise _refused("the samples have no durations and no tokens: they have no length to plan by")
        return np.asarray(self.tokens())


def plan_of(config: Config, source: SampleSource, *, keep: bool = True) -> Planned:
    """Returns the plan of a config over a source: the one on disk, or made now and, with `keep`, saved.

    Raises ConfigError without a `[plan]` section, PlanError where no plan can be made, CacheMismatchError where another
    plan or one of a newer format has the folder.
    """
    settings, samples = config.plan, samples_of(source)
    if settings is None:
        from forebay.steps.recipe import plan_example

        raise ConfigError(
            f"{config.path}: no [plan] section; add one, for example: {plan_example(config)}", code="FB104"
        )
    wanted, settings = settings, with_locality(settings, source, sizes=lambda: shards_of_sources(config, source))
    locality = settings.locality if isinstance(settings, BucketConfig) and settings != wanted else None
    if not keep:
        plan = make_plan(samples, settings)
        return Planned(plan=plan, key=_key_of(plan, None, source=source, settings=settings), locality=locality)
    where = {"dataset": config.name, "split": config.source.split, "cache_key": source.key}
    folder = plan_folder(config.cache_root, **where, settings=settings)
    plan, kept = kept_plan(
        folder,
        samples,
        cache_key=source.key,
        settings=settings,
        sample_ids=_identity(source)[1],
        selection=source if isinstance(source, Selection) else None,
    )
    if kept is not None:
        note(kept)
    key = _key_of(plan, kept, source=source, settings=settings)
    return Planned(plan=plan, key=key, folder=kept, locality=locality)


def opened_packs(folder: Path, source: SampleSource) -> tuple[Planned, PlanConfig]:
    """Returns the plan of packs in a folder, whose cache is `source`, and the settings it was made by.

    Raises as `load_plan`, and CacheMismatchError where the folder is no plan of packs.
    """
    _, settings = pack_settings(folder)
    plan = load_plan(folder, cache_key=source.key, settings=settings, num_samples=len(source))
    note(folder)
    return Planned(plan=plan, key=_key_of(plan, folder, source=source, settings=settings), folder=folder), settings


def kept_plan(
    folder: Path,
    samples: Samples,
    *,
    cache_key: str,
    settings: PlanConfig,
    sample_ids: Callable[[], str] | None = None,
    selection: Selection | None = None,
) -> tuple[AnyPlan, Path | None]:
    """Returns the plan of a folder (of `plan_folder`), made and saved where it is not there, and the folder.

    sample_ids: gives the digest of which samples these are, for the plan's metadata. selection: they themselves, where
    a filter chose them. Where the folder cannot be written the plan stays in memory, the folder is None and one log
    line says why. A damaged plan is made again: unlike a cache it costs seconds. Raises as `plan_of`.
    """
    name: dict[str, Any] = {"cache_key": cache_key, "settings": settings}
    try:
        return load_plan(folder, **name, num_samples=len(samples)), folder
    except CacheNotFoundError:
        logger.info("no plan in %s yet: making it", folder)
    except CacheCorruptError as err:
        logger.warning("making the plan again: %s", err)
    with during("plan"):
        plan = make_plan(samples, settings)
        figures, ids = plan_statistics(plan, samples), sample_ids() if sample_ids is not None else None
    try:
        save_plan(plan, folder, **name, statistics=figures, sample_ids=ids, selection=selection)
    except OSError as err:
        logger.warning("the plan stays in memory: %s cannot be written: %s", folder, err)
        return plan, None
    return load_plan(folder, **name, num_samples=len(samples)), folder


def make_plan(samples: Samples, settings: PlanConfig) -> AnyPlan:
    """Returns the plan of some samples. Raises PlanError where none can be made."""
    if isinstance(settings, BucketConfig) and settings.has_shapes:
        return _shape_plan(samples, settings)
    _require_one_shape(samples, settings)
    if samples.are_untimed:
        settings = _untimed(samples, settings)
    if isinstance(settings, PackConfig):
        units = {"patches": _asked(samples.patches), "frames": _asked(samples.clip_frames)}
        of_rows = _row_tokens(samples)
        packs = pack_plan(of_rows, **units, merge_size=samples.merge_size, reserved=samples.reserved, settings=settings)
        packs = replace(packs, cut=samples.cut) if samples.cut else packs
        if not settings.is_balanced:
            return packs
        seen = {"patches": units["patches"], "images": _asked(samples.images)}
        return packs.balanced(tokens=of_rows, **seen, learnt=_learnt(samples))
    rate = samples.sample_rate_hz
    if isinstance(settings, WindowConfig):
        return window_plan(_window_lengths(samples, settings), sample_rate_hz=rate, settings=settings)
    needs_tokens = settings.batch_tokens is not None or samples.texts is not None or settings.has_cells
    tokens = _asked(samples.tokens) if needs_tokens else None
    return bucket_plan(
        samples.lengths,
        sample_rate_hz=rate,
        settings=settings,
        # A column of zeros is no text: no batch could be sized by it.
        tokens=tokens if tokens is not None and (tokens.any() or samples.are_untimed) else None,
        shards=_asked(samples.shards) if settings.locality_shards is not None else None,
        shard_run=samples.shard_run() if settings.locality_shards is not None and samples.shard_run else 1,
        texts=samples.texts,
    )


def _shape_plan(samples: Samples, settings: BucketConfig) -> BucketPlan:
    """Returns the plan in which a bucket is a shape: as if its number were the tokens of its samples."""
    if samples.sides is None:
        raise _refused(
            "plan.by is of area and aspect, and these samples have no latents of several shapes; set shapes in their "
            "[[model]], or leave plan.by out"
        )
    sides, shapes = np.unique(samples.sides, axis=0, return_inverse=True)
    pairs = sides.reshape(len(sides), samples.sides.shape[1] // 2, 2).tolist()
    names = ["+".join(f"{width}x{height}" for height, width in own) for own in pairs]
    return bucket_plan(
        samples.lengths,
        sample_rate_hz=samples.sample_rate_hz,
        settings=replace(settings, edges=tuple(range(1, len(sides) + 1)), by=DURATION),
        tokens=shapes.reshape(-1),
        shards=_asked(samples.shards) if settings.locality_shards is not None else None,
        shard_run=samples.shard_run() if settings.locality_shards is not None and samples.shard_run else 1,
        texts=np.ones(len(samples), bool),
        shapes=names,
    )


def _require_one_shape(samples: Samples, settings: PlanConfig) -> None:
    """Raises PlanError where samples of several shapes would stand in a batch together."""
    if samples.sides is None or isinstance(settings, PackConfig) or settings.batch_size == 1:
        return
    if (count := len(np.unique(samples.sides, axis=0))) > 1:
        raise _refused(
            f'the latents have {count} shapes, and a batch has one; set plan.by = ["area", "aspect"] and '
            "plan.batch_size, or plan.batch_size = 1"
        )


def _untimed(samples: Samples, settings: PlanConfig) -> PlanConfig:
    """Returns settings by which items without seconds are planned: in one bucket, where no edges are in tokens.

    Raises PlanError for a plan that they have not.
    """
    if isinstance(settings, PackConfig):
        if samples.text is None or samples.text.can_pack:
            return settings
        raise _refused(
            'plan.kind is "pack", and images of a processor, and what a model gives beside texts, stand in batches; '
            'set plan.kind = "bucket" with batch_size, or of images vision.images = "patches"'
        )
    if settings.batch_seconds is not None:
        raise _refused("plan.batch_seconds is of audio, and images have no seconds; give plan.batch_size")
    if not isinstance(settings, BucketConfig):
        return settings
    tokens = np.asarray(_tokens(samples))
    if not tokens.any() and (settings.batch_tokens is not None or settings.edges is not None):
        raise _refused(
            "plan.batch_tokens and plan.edges are of tokens, and these samples have none; give plan.batch_size"
        )
    has_edges = settings.edges is not None or (settings.k is not None and bool(tokens.any()))
    return settings if has_edges else replace(settings, k=None, edges=(int(tokens.max(initial=0)) + 1,))


def plan_statistics(plan: AnyPlan, samples: Samples) -> dict[str, Any]:
    """Returns the document of packing_stats.json for a plan of `make_plan`."""
    shards = _asked(samples.shards)
    if isinstance(plan, PackPlan):
        images = _asked(samples.images)
        units = {
            "patches": None if images is None else _asked(samples.patches),
            "frames": None if plan.settings.max_frames is None else _asked(samples.clip_frames),
        }
        return pack_statistics(plan, _row_tokens(samples), **units, images=images, shards=shards)
    tokens = _asked(samples.tokens) if isinstance(plan, BucketPlan) and plan.cells else None
    return batch_statistics(plan, samples.lengths, frames=_asked(samples.frames), tokens=tokens, shards=shards)


def samples_of(source: SampleSource) -> Samples:
    """Returns what the plans of a source are made of."""
    texts, lengths = without_seconds(source), source.lengths
    slots, are_untimed = source.slots, has_untimed_items(source)
    sides = sorted(name for name in lengths if name.endswith(SIDES))

    def column(name: str) -> Callable[[], Array]:
        return lambda: length_of(source, name)

    def frames() -> Array:
        if are_untimed:
            tokens = length_of(source, "num_tokens")
            return tokens if tokens.any() else length_of(source, "num_images")
        stored = length_of(source, "num_frames")
        return stored if texts is None else np.where(texts, length_of(source, "num_tokens"), stored)

    return Samples(
        durations=_longest(source),
        sample_rate_hz=int(source.constants.get(RATE, 1)),  # nothing may be divided by 0
        frames=frames,
        tokens=column("num_tokens"),
        patches=column("num_patches"),
        clip_frames=column("num_frames"),
        images=column("num_images") if "num_images" in lengths else None,
        learnt=None if slots is None else lambda: np.concatenate([learnt_tokens(part) for part in parts_of(source)]),
        shards=None if slots is None else lambda: (slots >> ROW_BITS).astype(np.int32),
        shard_run=None if slots is None else lambda: shard_run(source),
        texts=texts,
        are_untimed=are_untimed,
        sides=np.stack([length_of(source, name) for name in sides], axis=1) if sides else None,
        merge_size=int(source.constants.get("merge_size", 0)),
        reserved=reserved_tokens(source.constants),
        text=text_step_of(source.constants) if source.constants.has_items else None,
        cut=sum((Counter(part.counts) for part in parts_of(source) if isinstance(part, CutSamples)), Counter()),
    )


def _longest(source: SampleSource) -> Array:
    """Returns the audio samples by which samples are planned: those of the longest variant of each."""
    found = []
    for part in parts_of(source):
        factor = float(part.constants.get("longest_variant", 1))
        lengths = length_of(part, SECONDS)
        found.append(lengths if factor == 1 else np.ceil(lengths * factor).astype(np.int64))
    return found[0] if len(found) == 1 else np.concatenate(found)


def _asked(lengths: Callable[[], Array] | None) -> Array | None:
    return None if lengths is None else np.asarray(lengths())


def _learnt(samples: Samples) -> Array:
    if samples.learnt is None:
        raise _refused(
            'plan.balance = "cost" needs the tokens that each sample learns, which a cache knows; run: forebay '
            "preprocess CONFIG"
        )
    return np.asarray(samples.learnt())


def _tokens(samples: Samples) -> Array:
    tokens = _asked(samples.tokens)
    if tokens is None:
        raise _refused('plan.kind is "pack", and the samples have no tokens; add a [text] section')
    return tokens


def _row_tokens(samples: Samples) -> Array:
    """Returns the tokens that samples have in a pack, where a prompt has a token for pieces of sound too."""
    tokens = _tokens(samples)
    if samples.text is None or samples.frames is None:
        return tokens
    found: Array = samples.text.row_tokens(tokens, np.asarray(samples.frames()))
    return found


def _window_lengths(samples: Samples, settings: WindowConfig) -> Array:
    """Returns what windows are sorted by: durations, or where no sample has audio tokens."""
    if samples.texts is None or samples.tokens is None:
        return samples.lengths
    if not samples.texts.all() or settings.batch_seconds is not None:
        raise _refused(
            f'plan.kind = "window" sorts by one length, and {int(samples.texts.sum())} of {len(samples.texts)} samples '
            'have no audio; give plan.batch_size for text alone, or plan.kind = "bucket" with edges and batch_tokens'
        )
    return np.asarray(samples.tokens())


def _key_of(plan: AnyPlan, folder: Path | None, *, source: SampleSource, settings: PlanConfig) -> str:
    """Returns what the states of a loader are checked by: the same for a cache and for its uncached steps.

    folder: of the plan, which knows the checksums of its arrays; None: they are computed.
    """
    content, sample_ids = (plan_content(plan, settings), None) if folder is None else sealed_content(folder)
    recipe, ids = _identity(source)
    filters = [part.filter_key for part in parts_of(source)]
    return state_key(
        settings,
        recipe=recipe,
        sample_ids=sample_ids or ids(),
        content=content,
        filter_key=digest(filters) if any(filters) else None,
    )


def _identity(source: SampleSource) -> tuple[str, Callable[[], str]]:
    """Returns how the samples of a source are made, and what tells which they are; of a union, of all its parts."""
    parts = parts_of(source)
    recipes = [part.recipe_key for part in parts]

    def ids() -> str:
        return digest([part.ids_digest() for part in parts])

    return digest(recipes), ids


def _refused(what: str) -> PlanError:
    return PlanError(what, code="FB504")
