"""A config's source: the sealed cache of its key, or the same steps on the fly; several sources for a mixture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from forebay.config import Config, LoaderConfig, MixtureConfig, MixtureSource, PackConfig
from forebay.config.remote import RemoteConfig
from forebay.errors import CacheNotFoundError, ConfigError, ForebayError
from forebay.plan.in_order import in_order
from forebay.plan.interface import Plan
from forebay.plan.make import Planned, plan_of
from forebay.plan.mixture.mix_sources import mix, mix_packs
from forebay.plan.pack.overlong import in_pieces
from forebay.steps.recipe import AnyConfig, as_config, load_config, recipe_of
from forebay.steps.step import Stored
from forebay.steps.table import form_step
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import Lookup, failures_of, find_cache, not_found_message
from forebay.store.memo import note
from forebay.store.selection import Filter, FilterChoice, filtered, missing_of_all, say_missing
from forebay.store.shared_disk import wait_alone
from forebay.store.source import SampleSource, SourceUnion, has_untimed_items, parts_of, source_kind
from forebay.train.augment.augmentation import Augmentation, draws_of
from forebay.train.collate.collator import BatchMaker
from forebay.train.collate.packed import PackCollator, PackShapes, pack_forms
from forebay.train.collate.patches import DeviceExpansion, has_patches, pixel_dtype
from forebay.train.device import is_host
from forebay.train.loader import Loader, LoaderSettings
from forebay.train.ranks import resolve_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)
T = TypeVar("T")
SourceKind = Literal["cache", "uncached"]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def make_loader(
    config: AnyConfig,
    *,
    shuffle: bool = True,
    with_ids: bool = False,
    with_columns: Sequence[str] = (),
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    device_mesh: DeviceMesh | None = None,
    as_tensordict: bool = False,
    output: Literal["torch", "numpy"] = "torch",
    device: torch.device | str | None = None,
    device_prefetch: int = 1,
) -> Loader:
    """Returns the loader of this rank: the sealed cache of the same config, found by its key, or the uncached steps.

    `loader.cache` decides: `auto` takes the cache, else goes uncached with one warning that names the command to run;
    `require` raises CacheNotFoundError; `off` goes uncached. Where torch.distributed is up, rank 0 finds cache and plan
    and the others are told; a rank with `dp_rank=0, dp_world_size=1` finds them by itself. `[[mixture.source]]` reads
    several caches, each chosen in this way; weights are applied on top of the plan of all their samples.
    Every batch is right for `model(**batch)`. Packs have `pixel_values`, expanded where the batch is handed out, and
    `use_cache=False`; with `loader.pixels = "uint8"` they are of another form, see `PatchBatch`.
    config: of `load_config`, or the path of its file.
    shuffle: False gives the same batches at every seed and epoch, in the order of the cache, with every sample once:
    what an evaluation wants. See `in_order` for what that order is. A mixture's weights then do not count.
    with_ids: True hands out pairs: the batch, and the ids of its samples in their order, a list of strings. The ids are
    not in the batch, because a model would not take them.
    with_columns: names of columns of the row table (`cache.column_names`), those of `source.keep_columns` among them:
    pairs are handed out, the batch and a dict of name to the values of its samples in their order, None where there is
    none. A column is read once, as a whole; `sample_id` may be one, `with_ids` is for ids alone.
    output: "numpy" hands out arrays in place of tensors, of the same memory, for loops of other frameworks.
    dp_rank, dp_world_size, device_mesh: which batches are this process's, see `resolve_ranks`; left out, they are
    found.
    device, device_prefetch: where batches are handed out, and how many are copied there ahead, see `Loader`; they
    depend on the process and not on the run, so no config holds them.
    Raises ConfigError without a `[plan]` section, for ranks that cannot be, or for a device that is not there,
    CacheMismatchError for caches whose samples cannot stand in one batch, where `mixture.batches` mixes them.
    """
    config, ranks = as_config(config), resolve_ranks(dp_rank, dp_world_size, device_mesh=device_mesh)
    with _deciding(alone=dp_rank is not None and ranks.dp_world_size == 1):
        source = select(config)
        planned = _planned(config, source) if shuffle else planned_in_order(config, source)
    collator: BatchMaker | None = None
    finish: Callable[[Any], Any] | None = None
    augment = _augment(config, source) if shuffle else None
    if isinstance(config.plan, PackConfig):
        changes = augment and next(augment(part) for part in parts_of(source) if part.constants.has_items)
        collator, finish = pack_makers(
            config, source, planned.plan, device=device, as_tensordict=as_tensordict, augmentation=changes
        )
    here: dict[str, Any] = {"as_tensordict": as_tensordict, "output": output}
    here |= {"device": device, "device_prefetch": device_prefetch}
    here |= {"with_ids": with_ids, "with_columns": with_columns if isinstance(with_columns, str) else (*with_columns,)}
    return Loader(
        source,
        planned,
        replace(loader_settings(config), **here),
        dp_rank=ranks.dp_rank,
        dp_world_size=ranks.dp_world_size,
        collator=collator,
        finish=finish,
        augment=augment,
        features=config.loader.device_features,
        varies=shuffle,
    )


def _augment(config: Config, source: SampleSource) -> Callable[[SampleSource], Augmentation] | None:
    """Returns what makes the changes of a source, which texts alone have none of; None for a config without any."""
    if not config.augment:
        is_packed = isinstance(config.plan, PackConfig)
        draws = not is_packed and any(draws_of(config, Stored.of(part)) for part in parts_of(source))
        return (lambda part: Augmentation.of(config, part)) if draws else None
    if not any(part.constants.has_items for part in parts_of(source)):
        raise ConfigError(f"{config.path}: augment changes clips and images, and the samples are texts alone")
    return lambda part: Augmentation.of(config, part) if part.constants.has_items else Augmentation((), ())


def loader_settings(config: Config) -> LoaderSettings:
    """Returns how the loader of a config works, as the config says it."""
    section = config.loader
    return LoaderSettings(
        seed=section.seed,
        dtype=_DTYPES[section.dtype],
        crop_s=section.crop_s,
        num_threads=section.num_threads,
        prefetch=section.prefetch,
        pin_memory=section.pin_memory,
        form=section.form,
        tokens=section.tokens,
    )


def _planned(config: Config, source: SampleSource) -> Planned:
    """Returns the plan of what is read, with the weights of a mixture on top."""
    if isinstance(config.plan, PackConfig) and isinstance(source, SourceUnion):
        if config.mixture.batches == "per_source":
            return mix_packs(config, source, [_plan_of_all(config, part) for part in source.sources])
        return _plan_of_all(config, source)
    planned = _plan_of_all(config, source)
    return mix(config, source, planned) if config.mixture.is_given else planned


def planned_in_order(config: Config, source: SampleSource) -> Planned:
    """Returns the plan of what is read without its shuffle, see `in_order`; of a mixture every sample once."""
    is_apart = isinstance(source, SourceUnion) and config.mixture.batches == "per_source"
    parts = source.source_of if is_apart and isinstance(source, SourceUnion) else None
    return in_order(_plan_of_all(config, source), parts=parts)


def _plan_of_all(config: Config, source: SampleSource) -> Planned:
    """Returns the plan of all samples that are read; rank 0 makes it, the others open it."""
    is_kept, made = source_kind(source) == "cache", []
    if is_kept:
        _by_rank_0(lambda: made.append(plan_of(config, source)))
    if made:
        return made[0]
    # What stands for a URL lies on each node for itself: of several ranks there one makes the plan.
    with _one_of_node(config.cache_root) if is_kept and config.remote_root is not None else nullcontext():
        return plan_of(config, source, keep=is_kept)


@contextmanager
def _one_of_node(root: Path) -> Iterator[None]:
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".planning", "wb") as file:
        wait_alone(file.fileno())  # on a file system without locks all of them make it
        yield


def pack_makers(
    config: Config,
    source: SampleSource,
    plan: Plan,
    *,
    device: torch.device | str | None,
    as_tensordict: bool,
    augmentation: Augmentation | None = None,
) -> tuple[PackCollator, DeviceExpansion | None]:
    """Returns what makes the batches of packs on the host, and what then makes values of codes on a device."""
    settings, forms = config.loader, pack_forms(Stored.of(source))
    shapes = PackShapes.of(plan, config.plan, source.constants)
    if settings.pixels == "uint8" and as_tensordict:
        raise ConfigError(
            'loader.pixels is "uint8" and as_tensordict is true: a model would take a TensorDict with uint8 patches '
            'and pass over them; set loader.pixels = "float32"'
        )
    if settings.pixels == "uint8" or is_host(device) or not any(map(has_patches, forms)):
        return pack_collator(settings, source, shapes, augmentation), None
    # The patches cross over as they are, an eighth of the bytes.
    stored = replace(settings, pixels="uint8")
    values = DeviceExpansion(*forms, dtype=pixel_dtype(settings.pixels))
    return pack_collator(stored, source, shapes, augmentation), values


def pack_collator(
    settings: LoaderConfig,
    source: SampleSource,
    shapes: PackShapes | None = None,
    augmentation: Augmentation | None = None,
) -> PackCollator:
    """Returns what makes the batches of packs, as `[loader]` wants them. shapes: those of their plan."""
    dtype = None if settings.pixels == "uint8" else pixel_dtype(settings.pixels)
    if not any(map(has_patches, pack_forms(Stored.of(source)))):
        dtype = _DTYPES[settings.dtype]
    return PackCollator(source, shapes=shapes, dtype=dtype, varlen=settings.varlen, augmentation=augmentation)


def as_stored(config: Config) -> Config:
    """Returns a config whose packs keep their uint8 patches: the learner expands the patches on the device.

    Images beside clips are no patches.
    """
    if config.loader.form == "ragged":
        raise ConfigError(
            f'{config.path}: loader.form is "ragged", and forebay train takes padded batches; leave it out, or call '
            "forebay.train.make_loader in a loop of your own"
        )
    if config.plan is None or config.plan.kind != "pack" or config.audio is not None:
        return config
    return replace(config, loader=replace(config.loader, pixels="uint8"))


def select(config: Config) -> SampleSource:
    """Returns what a config's samples are read from, see `make_loader`; those that `[filter]` leaves.

    The filter of a config with `[[mixture.source]]` is applied to each source, after the filter of that source's own
    config, if it has one.
    """
    if config.mixture.source:
        parts = [_select_entry(config, entry) for entry in config.mixture.source]
    else:
        parts = [(_select_one(config), config.path)]
    if config.filter.is_given:
        parts = _filtered(config, parts)
    parts = [(in_pieces(part, config.plan), name) for part, name in parts]
    return _union(config, parts) if config.mixture.source else parts[0][0]


def _select_one(config: Config) -> SampleSource:
    place, probe = _by_rank_0(lambda: _choose(config))
    if place is not None:
        return open_by_config(place, config)
    from forebay.train.uncached.uncached_source import uncached_source

    return uncached_source(config, stored_probe=probe)


def _filtered(config: Config, parts: Sequence[tuple[SampleSource, str]]) -> list[tuple[SampleSource, str]]:
    """Returns what `[filter]` leaves of each source; the log says how many, and which ids no source has."""
    filter_ = Filter.of(config.filter)
    if (told := _by_rank_0(lambda: filter_.key)) != filter_.key:
        raise ConfigError(
            f"{config.path}: [filter] has the key {filter_.key[:16]} here and {told[:16]} on rank 0: files of ids "
            "differ between the nodes; put the same files on all of them"
        )
    found: list[tuple[SampleSource, str]] = []
    choices: list[FilterChoice] = []
    for source, name in parts:
        selection = filtered(source, filter_, name=source.place)
        selection.source.keep_to(selection.places)
        found.append((selection, name))
        choices += [] if selection.choice is None else [selection.choice]
        logger.info("filter of %s: %s", selection.name, selection.choice)
    say_missing(missing_of_all(choices), name=" and ".join(selection.place for selection, _ in found))
    return found


def _union(config: Config, parts: Sequence[tuple[SampleSource, str]]) -> SourceUnion:
    """Returns the union of the sources of `[[mixture.source]]`.

    Raises ConfigError for patches in batches, and for images beside what is none.
    """
    is_packed = isinstance(config.plan, PackConfig)
    for part, name in [] if is_packed else parts:
        steps = [form_step(str(values.get("features"))) for values in part.constants.groups.values()]
        if any(step is not None and step.stands_in for step in steps):
            raise ConfigError(
                f'{config.path}: {name} holds patches for packs, and this plan is of batches; set plan.kind = "pack", '
                'or vision.images = "processor" in its config and run forebay preprocess',
                code="FB116",
            )
    untimed = [has_untimed_items(part) for part, _ in parts]
    if any(untimed) and not all(untimed):
        part, name = parts[untimed.index(False)]
        raise ConfigError(
            f"{config.path}: {name} has features {part.constants.get('features')!r} and stands beside images; a "
            "mixture with images is of caches with [vision] alone: leave that source out",
            code="FB116",
        )
    mixes = config.mixture.batches == "mixed"
    shares = {"shares_batches": is_packed or mixes, "shares_variants": mixes}  # one collator makes all packs
    return SourceUnion([part for part, _ in parts], [name for _, name in parts], **shares)


def _select_entry(config: Config, entry: MixtureSource) -> tuple[SampleSource, str]:
    settings = config.loader
    if entry.cache is not None:
        return open_by_config(entry.cache, config), entry.cache
    named = where_it_lies(load_config(str(entry.config)), config)
    # Of the other config only what it reads counts: its own mixture would have no weights here.
    loader = replace(
        named.loader, cache=settings.cache, verify=settings.verify, max_open_shards=settings.max_open_shards
    )
    return select(replace(named, loader=loader, mixture=MixtureConfig(), plan=None)), str(entry.config)


def where_it_lies(named: Config, config: Config) -> Config:
    """Returns a config that `config` names, with the cache root under which its cache is: its own, else `config`'s.

    A root that the command gives (`--cache-root`) comes first: it holds for all that the command reads. So does what
    `[remote]` says of this node: its folder, its bound, its downloads. Only how the store of the named config is asked
    is said there, where it says anything.
    """
    names = ("endpoint", "region", "anonymous")
    there = {name: getattr(named.remote, name) for name in names}
    says = there != {name: getattr(RemoteConfig(), name) for name in names}
    own = replace(named, remote=replace(config.remote, **there) if says else config.remote)
    other = replace(named, run=replace(named.run, cache_root=config.run.cache_root), remote=config.remote)
    if other == own:
        return own
    root = [each for each in config.given if each.partition("=")[0].strip() == "run.cache_root"]
    other = replace(other, given=(*named.given, *root))
    first, last = (other, own) if root else (own, other)

    def is_under(each: Config) -> bool:
        return find_cache(each, recipe_of(each)).found is not None

    return _by_rank_0(lambda: last if is_under(last) and not is_under(first) else first)


def open_by_config(place: str, config: Config) -> Cache:
    """Returns the cache of a folder or URL, opened as `[loader]` and `[remote]` say."""
    settings = config.loader
    cache = open_cache(place, verify=settings.verify, max_open_shards=settings.max_open_shards, remote=config.remote)
    note(cache.folder)
    return cache


_alone = ContextVar("alone", default=False)


@contextmanager
def _deciding(*, alone: bool) -> Iterator[None]:
    """Notes, until the block ends, that no other rank decides this: who asked one would wait for ever."""
    token = _alone.set(alone)
    try:
        yield
    finally:
        _alone.reset(token)


def _by_rank_0(make: Callable[[], T]) -> T:
    """Returns on every rank what `make` gives on rank 0, and raises on every rank what it raises there.

    Ranks that each looked would race a build that seals meanwhile, hash the same sources and make the same plan.
    """
    import torch.distributed as dist

    if _alone.get() or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [make(), None]
        except ForebayError as err:
            answer = [None, err]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    told: T = answer[0]
    return told


def _choose(config: Config) -> tuple[str | None, dict[str, str] | None]:
    """Returns the folder or URL of the cache to use (None: go uncached), and the probe of a cache that is not used.

    Of a cache in a store the URL: another node has another mirror of it, which it opens by itself.
    """
    lookup = find_cache(config, recipe_of(config))
    found = lookup.found
    if config.loader.cache == "off":
        return None, dict(found.metadata["probe"]) if found is not None else None
    if found is None:
        if config.loader.cache == "require":
            raise CacheNotFoundError(not_found_message(config, lookup))
        logger.warning("going uncached, which is slow: %s", not_found_message(config, lookup))
        return None, None
    _say(config, lookup)
    return found.place, None


def _say(config: Config, lookup: Lookup) -> None:
    if lookup.found is None:
        return
    if lookup.state == "absent":
        built, here = lookup.found.metadata["name"], config.name
        other = f"; it was built as name = {built!r}, the config has {here!r}: loader.cache_dir names another cache"
        more = other if built != here else ""
        logger.warning("using %s unchecked: its raw data is not here to be compared%s", lookup.found.place, more)
    else:
        logger.info("using %s", lookup.found.place)
    if config.remote_root is not None and lookup.found.url is None and not config.loader.cache_dir:
        logger.warning(
            "%s is only on this node; to push it to %s: forebay preprocess %s",
            *(lookup.found.place, config.remote_root, config.path),
        )
    if (failures := failures_of(config, lookup.found)) is not None:
        logger.warning("%s", failures)
