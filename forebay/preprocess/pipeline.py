"""A config to a sealed cache: list, hash, cut, make or link every shard, seal. Run again, it goes on where it was.

If the cache root lies in a store, the sealed cache is then pushed, and stands there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from forebay.config.remote import Url, is_url, parse_url
from forebay.config.tree import Config
from forebay.errors import BuildError, CacheCorruptError, ConfigError, PlanError, RemoteError, RemoteExistsError
from forebay.plan.make import plan_of
from forebay.plan.pack.overlong import in_pieces
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.build_run import Run
from forebay.preprocess.device_process import devices_of, serve_device
from forebay.preprocess.fetch_models import fetch_models
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import resolve
from forebay.preprocess.listing_folder import folder_of
from forebay.preprocess.pool import Pool, Runner
from forebay.preprocess.prepared import Prepared, PrepareReport, prepared, require_key, require_numerics, require_parts
from forebay.preprocess.prepared import load as load_prepared
from forebay.preprocess.prepared import remove as remove_prepared
from forebay.preprocess.runner.ray import GPU, Ray
from forebay.preprocess.stage import staged_prepared
from forebay.preprocess.stage_workspace import check_stage, remove_stage
from forebay.preprocess.workspace import Workspace, workspace_folder
from forebay.rows.columns_aside import one_heap
from forebay.rows.named_files import manifest_files
from forebay.rows.readers.arrow_files import require_datasets
from forebay.rows.readers.python_inputs import list_inputs
from forebay.steps.recipe import AnyConfig, Recipe, as_config, plan_example, recipe_of
from forebay.steps.step import Stored
from forebay.steps.table import forms_of
from forebay.store.cache import open_cache
from forebay.store.files import put_away, require_writable, sweep
from forebay.store.layout import BUILDING, INPUTS, PLANS, TAR_INDEX, Constants, Group
from forebay.store.lookup import Lookup, Sealed, failures_of, find_cache
from forebay.store.memo import Memo
from forebay.store.metadata import FILE_NAME as METADATA
from forebay.store.remote.carry.transfer import push
from forebay.store.remote.mirror import Mirror, key_there
from forebay.store.remote.node.node import WantedFile
from forebay.store.remote.raw.raw_sources import localized, naming_urls
from forebay.store.seal import quick_problems, verify_folder
from forebay.store.selection import Filter, filtered
from forebay.store.shared_disk import is_gone, seen
from forebay.store.source import SampleSource
from forebay.task_map import WorkerDied, begin, is_second_try
from forebay.visible import from_here

logger = logging.getLogger(__name__)
_SHOWN = 5
"""Problems of a cache that a message lists."""
_WRITTEN_FOLDERS = ("", PLANS, TAR_INDEX, INPUTS, BUILDING)
"""Folders of a cache root in which a run that was killed may have left something unfinished."""


def check_options(config: Config, options: Options) -> None:
    """Raises ConfigError for options that a cache root in a store does not take, and for a stage that is none."""
    if options.stage is not None:
        check_stage(config, options.stage)
        return
    if options.part is not None and config.remote_root is not None:
        raise ConfigError(
            f"--shards: the cache root is {config.remote_root}, and the parts of other nodes are not seen from here; "
            f"put their shards into the bucket: --stage URL, or build below a folder that all jobs share, then push "
            f"the cache: forebay preprocess {config.named} --cache-root DIR --shards I::N, forebay cache push DIR/NAME "
            f"{config.remote_root}/NAME"
        )
    if options.runner != "local" and options.stage is None and config.remote_root is not None:
        raise ConfigError(
            f"--runner {options.runner}: the cache root is {config.remote_root}, and what stands for it on this node "
            "is not seen by the others; give a place in its bucket for finished shards: forebay preprocess "
            f"{config.named} --runner {options.runner} --stage URL, or a folder that all nodes share: --cache-root DIR"
        )


def require_whole(config: Config, standing: Sealed, options: Options) -> None:
    """Raises BuildError where a cache in a store is to be made again, or is not what was sealed.

    It is compared by a listing, with `verify` byte for byte. No command changes it: others may be reading it.
    """
    again = f"remove all below {standing.place}/, then run: forebay preprocess {config.named}"
    if options.rebuild:
        raise BuildError(
            f"--rebuild: {standing.place} is sealed, and no node can tell whether others are reading it; {again}"
        )
    folder = standing.folder
    problems = verify_folder(folder, progress=options.progress).problems if options.verify else quick_problems(folder)
    if problems:
        raise BuildError(f"{standing.place} is damaged: {_some(problems)}; {again}")


def pushed(config: Config, report: BuildReport, options: Options) -> BuildReport:
    """Puts the cache that a build sealed on this node into the store, and returns the report of it there.

    What arrives becomes this node's mirror of it, so training here downloads nothing. One that another node has pushed
    meanwhile stays, and this one goes: both have the same values.
    Raises RemoteError where the store does not take it; the sealed cache stays, and the next run pushes the rest.
    """
    folder = Path(report.cache)
    url = parse_url(str(config.remote_root)) / folder.name
    transfer = None
    try:
        transfer = push(folder, url, config.remote, verify=options.verify, progress=options.progress)
    except RemoteError as err:
        if not isinstance(err, RemoteExistsError) or key_there(url, config.remote) != report.key:
            err.add_note(
                f"the cache is sealed in {from_here(folder)}; to push what is missing: forebay preprocess "
                f"{config.named}"
            )
            raise
        logger.warning("another builder has pushed %s meanwhile: that one is used", url)
    _settle(folder, url, config)
    return replace(report, cache=str(url), pushed=transfer)


def _settle(folder: Path, url: Url, config: Config) -> None:
    """Makes a cache that stands in the store this node's mirror of it; its folder goes when nobody reads it any more.

    Every file is linked before the folder goes, so it is whole at any instant. Shards beyond the bound go with it.
    """
    data = (folder / METADATA).read_bytes()
    mirror = Mirror.at(url, config.remote, state=xxhash.xxh3_128_hexdigest(data))
    if mirror.bucket.read(METADATA) == data:  # and not of another builder, whose rows may lie elsewhere
        mirror.adopt(WantedFile(name=METADATA, size_bytes=len(data), is_kept=True), folder / METADATA)
        left = config.remote.cache_size_bytes
        for wanted in _files(folder):
            left -= wanted.size_bytes
            if left < 0 or not mirror.adopt(wanted, folder / wanted.name):
                break
    put_away(folder)


def _files(folder: Path) -> list[WantedFile]:
    """Returns the files of a cache but metadata.json, those beside the shards first."""
    cache = open_cache(folder, verify="never")
    small = [WantedFile.of(name, entry, is_kept=True) for name, entry in cache.metadata["files"].items()]
    return small + [wanted for unit in range(cache.num_units) for wanted in cache.unit_files(unit)]


def _some(problems: Iterable[str]) -> str:
    first, *others = problems
    shown = "; ".join([first, *others[: _SHOWN - 1]])
    return shown + (f"; and {len(others) - _SHOWN + 1} more" if len(others) >= _SHOWN else "")


def build(config: AnyConfig, options: Options | None = None) -> BuildReport:
    """Makes the sealed cache of a config, then its plan, and returns what was done; what is there already stays.

    config: of `load_config`, or the path of its file.
    A shard that is on disk and whole is kept, an equal one of any cache under the root is linked, the rest is made by
    worker processes. Interrupted at any instant, running it again goes on from the shards that were finished.
    Raises ManifestError or ConfigError where the input as a whole cannot be used, BuildError where more than
    `run.max_failed_share` of the samples are bad, a source changes meanwhile, a worker keeps dying, or the cache root
    cannot be written; PlanError where the samples of the sealed cache give no plan.
    Under a cache root in a store all this happens in what stands for the root on this node. The sealed cache is then
    pushed; RemoteError where the store does not take it.
    """
    config, options = as_config(config), options or Options()
    check_options(config, options)
    fetch_models(config)
    Filter.of(config.filter)  # the plan needs its files, hours later
    with naming_urls(), one_heap():
        report = _build_cache(config, options)
    if options.dry_run or not report.sealed:
        return report
    if config.remote_root is not None and not is_url(report.cache):
        report = pushed(config, report, options)
    return _with_plan(config, report)


def _with_plan(config: Config, report: BuildReport) -> BuildReport:
    if config.plan is None:
        where, example = from_here(config.path), plan_example(config)
        line = f"plan: none, {where} has no [plan] section; training needs one, for example: {example}"
        return replace(report, plan=line)
    if not report.num_samples:
        raise PlanError(f"no samples to plan: {report.nothing_left()}", code="FB501")
    source: SampleSource = open_cache(report.cache, remote=config.remote)
    if config.filter.is_given:
        source = filtered(source, Filter.of(config.filter))
    planned = plan_of(config, in_pieces(source, config.plan))
    folder = None if planned.folder is None else str(planned.folder)
    return replace(report, plan=planned.summary(), plan_folder=folder)


def _build_cache(config: Config, options: Options) -> BuildReport:
    started_s = time.monotonic()
    if not options.dry_run:
        for folder in _WRITTEN_FOLDERS:
            sweep(config.cache_root / folder)
    memo = Memo.of(config)
    # `loader.cache_dir` names what training reads; a build makes the cache of the config.
    config = replace(config, loader=replace(config.loader, cache_dir=None))
    recipe = recipe_of(config)
    list_inputs(config, again=options.rebuild)
    standing = _standing(config, find_cache(config, recipe, memo=memo))
    if standing is not None and _usable(config, standing, options):
        require_key(config, standing.key, options.key)
        if (failures := failures_of(config, standing)) is not None:
            raise BuildError(failures, code="FB301")
        if not options.dry_run:  # a builder that was killed after it had sealed left its folders
            remove_prepared(config, recipe)
            Workspace(workspace_folder(config, standing.key)).remove()
            remove_stage(config, options, recipe, workspace_folder(config, standing.key).name)
        elif config.codec is not None or config.model:
            again = "the cache is sealed, so no codec and no model is tried; to try: forebay preprocess %s --rebuild %s"
            logger.warning(again, config.named, "--dry-run")
        return BuildReport.of_standing(standing, seconds=time.monotonic() - started_s)
    _require(config, recipe)
    if not options.dry_run:
        setting = "run.cache_root" if config.remote_root is None else "remote.shard_dir"
        require_writable(config.cache_root, setting=setting)
    with (
        _pool(config, options, recipe) as pool,
        _runner(config, options, pool) as runner,
    ):
        made = _prepared(config, options, recipe, pool, memo, models=runner if config.run.num_gpus else pool)
        run = Run(config, options, made, pool, memo, runner=runner)
        if standing is not None:
            run.compare_probe(standing)
        try:
            report = run.dry(standing) if options.dry_run else run.run(standing)
        except (OSError, CacheCorruptError, BuildError) as err:
            other = _of_another(config, recipe, options, memo, err=err)
            remove_prepared(config, recipe)
            run.workspace.remove()
            return BuildReport.of_standing(other, seconds=time.monotonic() - started_s)
    return replace(report, seconds=time.monotonic() - started_s)


def _require(config: Config, recipe: Recipe) -> None:
    """Raises what a build would run into after hours: code that is not to be trusted, extras that are missing."""
    recipe.check()
    if config.source.kind == "hf":
        require_datasets()


def _of_another(config: Config, recipe: Recipe, options: Options, memo: Memo, *, err: Exception) -> Sealed:
    """Returns the cache of another builder that took the folder of this build away; raises `err` where there is none.

    That builder has sealed, and no lock told it that somebody else was at work.
    """

    def sealed() -> Sealed | None:
        found = find_cache(config, recipe, memo=memo).found
        return found if found is not None and _usable(config, found, options) else None

    gone = err if isinstance(err, OSError) else err.__cause__
    if not isinstance(gone, OSError) or not (is_gone(gone) or isinstance(gone, FileNotFoundError)):
        raise err
    # A rebuild has no use for a cache that stands, and raw data that is gone is no sign of another builder.
    name = gone.filename or config.cache_root  # reading what was opened names no file
    is_ours = not options.rebuild and str(name).startswith(str(config.cache_root))
    what = f"the cache that another builder may have sealed ({gone.strerror}: {gone.filename})"
    found = seen(sealed, config.cache_root, what=what) if is_ours else sealed()
    if found is None:
        raise err
    return found


@contextlib.contextmanager
def _pool(config: Config, options: Options, recipe: Recipe) -> Iterator[Pool]:
    """Yields the workers of a build, which have what the recipe's steps import from their start, and its devices."""
    modules = (__name__, *recipe.libraries)
    with Pool(config.run.num_workers or os.cpu_count() or 1, shows=options.progress, modules=modules) as pool:
        if config.model and _is_local(options) and (devices := devices_of(config.run.devices, pool.map)):
            pool.serve(serve_device, devices)
        yield pool


def _runner(config: Config, options: Options, pool: Pool) -> AbstractContextManager[Runner]:
    """Returns who makes the shards. A cluster that does not answer shows before anything is listed."""
    gpus = {model.name: config.run.num_gpus for model in config.model}
    return contextlib.nullcontext(pool) if _is_local(options) else Ray(options.address, gpus=gpus)


def _is_local(options: Options) -> bool:
    return options.runner == "local" or options.dry_run


def _standing(config: Config, lookup: Lookup) -> Sealed | None:
    """Returns the sealed cache that was found, if it is in the codec of the config."""
    found = lookup.found
    if lookup.state == "absent":
        # A mistyped manifest must not pass for raw data that was taken away.
        manifest_files(localized(config).source)
        logger.warning("%s is not compared: some of its raw data is not here", found.place if found else "")
    if found is not None and found.metadata.get("codec") != config.codec:
        logger.info("%s has the same values in another codec", found.place)
        return None
    return found


def prepare(config: Config, options: Options | None = None, *, num_parts: int | None = None) -> PrepareReport:
    """Lists and hashes the raw data of a config once, for all parts of its build, and returns what that found.

    Where the cache is sealed nothing is prepared. num_parts: the parts that there will be.
    Raises what `build` raises before it makes a shard, ConfigError for more parts than shards.
    """
    options = options or Options()
    check_options(config, replace(options, part=(0, 1)))
    fetch_models(config)
    started_s = time.monotonic()
    require_writable(config.cache_root, setting="run.cache_root")
    config = replace(config, loader=replace(config.loader, cache_dir=None))
    recipe, memo = recipe_of(config), Memo.of(config)
    list_inputs(config, again=options.rebuild)
    with naming_urls():
        standing = _standing(config, find_cache(config, recipe, memo=memo))
        if standing is not None and _usable(config, standing, options):
            require_key(config, standing.key, options.key)
            remove_prepared(config, recipe)
            return PrepareReport.of_standing(standing, seconds=time.monotonic() - started_s)
        _require(config, recipe)
        with _pool(config, options, recipe) as pool:
            found, is_new = _shared(config, options, recipe, pool, memo, models=pool)
    require_key(config, found.listing.key, options.key)
    require_parts(config, num_parts or 0, found.num_shards)
    return PrepareReport(
        key=found.listing.key,
        folder=str(folder_of(config, recipe)),
        num_samples=len(found.listing.rows),
        num_files=len(found.listing.files),
        num_shards=found.num_shards,
        already_prepared=not is_new,
        seconds=time.monotonic() - started_s,
    )


def _prepared(config: Config, options: Options, recipe: Recipe, pool: Pool, memo: Memo, *, models: Runner) -> Prepared:
    """Returns what a build starts from. Parts share it on disk; a build that is alone lists again what has changed.

    models: has the devices that models run on.
    """
    is_part = options.part is not None or options.seal_only or options.stage is not None
    if is_part and not options.dry_run:
        found, is_new = _shared(config, options, recipe, pool, memo, models=models)
    elif (standing := load_prepared(config, recipe)) is not None:
        found, is_new = standing, False
    else:
        found, is_new = _cut(config, resolve(config, memo, pool.map, recipe=recipe), pool, models), True
    if not is_new:
        require_numerics(config, found, *_measured(found.listing.groups, pool, models))
    require_key(config, found.listing.key, options.key)
    return found


def _shared(
    config: Config, options: Options, recipe: Recipe, pool: Pool, memo: Memo, *, models: Runner
) -> tuple[Prepared, bool]:
    def make() -> Prepared:
        return _cut(config, resolve(config, memo, pool.map, recipe=recipe), pool, models)

    if options.stage is not None:
        return staged_prepared(config, recipe, parse_url(options.stage), make)
    return prepared(config, recipe, make)


def _cut(config: Config, listing: Listing, pool: Pool, models: Runner) -> Prepared:
    groups = listing.groups
    num_shards = -(-len(listing.rows) // groups.shard_rows(config.layout.rows_per_shard))
    num_workers = config.run.num_workers or os.cpu_count() or 1
    probe, constants = _measured(groups, pool, models, copies=max(1, min(num_shards, num_workers)))
    listing = replace(listing, groups=groups.measured(constants))
    if len(groups.items) > 1:  # what stands in no batch together is said before anything is made
        forms_of(Stored(config.path, constants, {spec.name: spec for spec in listing.groups.fields()}))
    cuts = list(listing.groups.cuts(listing, probe=probe, rows_per_shard=config.layout.rows_per_shard))
    return Prepared(listing=listing, cuts=cuts, probe=probe, constants=constants, host=socket.gethostname())


def _measured(groups: Groups, pool: Pool, models: Runner, *, copies: int = 1) -> tuple[Mapping[Group, str], Constants]:
    """Returns the probe of every group, and the constants.

    In workers, so that they are made under the same pinned threads as the shards; in two, because one needs torch and
    the other transformers, and those take longer to load than a small build. copies: workers that measure the same
    where there is text alone: they load transformers side by side, and not one when the others are done. models: a
    cluster, where its tasks have GPUs: this machine may have none.
    """
    asked = [_ToMeasure(groups, name) for name in (groups.names if groups.items else groups.names * copies)]
    on_nodes = {group.name for group in groups.recipe.models} if models is not pool else {*()}
    try:
        here = [part for part in asked if part.group not in on_nodes]
        measured = dict(zip([part.group for part in here], pool.map(_measure, here), strict=True))
        for part, found in models.run(_measure_on_gpu, [part for part in asked if part.group in on_nodes]):
            measured[part.group] = found
    except WorkerDied as err:
        raise BuildError(
            f"{err} at the built-in inputs of the {err.task[1]} steps: most often memory was full; use fewer "
            "run.num_workers, and of a model a smaller batch or another device; nothing was made",
            code="FB302",
        ) from err
    constants = Constants({name: measured[name][1] for name in groups.names})
    return {name: measured[name][0] for name in groups.names}, constants


class _ToMeasure(NamedTuple):
    """A group that is to be measured."""

    groups: Groups
    group: Group


def _measure(part: _ToMeasure) -> tuple[str, Mapping[str, Any]]:
    """Returns a group's probe, and its constants."""
    return part.groups.probe(part.group), part.groups.constants_of(part.group)


def _measure_on_gpu(part: _ToMeasure) -> tuple[str, Mapping[str, Any]]:
    begin(is_tried_again=is_second_try(), on=GPU)
    return _measure(part)


def _usable(config: Config, standing: Sealed, options: Options) -> bool:
    """Whether a sealed cache is left alone: all files are there and of the right size, and right by hash if asked.

    Raises BuildError for one in a store that is not to be left alone.
    """
    if standing.url is not None:
        require_whole(config, standing, options)
        return True
    if options.rebuild:
        return False
    folder = standing.folder
    problems = verify_folder(folder, progress=options.progress).problems if options.verify else quick_problems(folder)
    for problem in problems:
        logger.warning("mending %s", problem)
    return not problems
