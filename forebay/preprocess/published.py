"""The end of a build whose cache root lies in a store: what was sealed on this node is pushed, and stands there."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import xxhash

from forebay.config.tree import Config
from forebay.config.url import Url, parse_url
from forebay.errors import BuildError, ConfigError, RemoteError, RemoteExistsError
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.stage_workspace import check_stage
from forebay.store.cache import open_cache
from forebay.store.files import remove_aside, temporary_name
from forebay.store.lookup import Sealed
from forebay.store.metadata import FILE_NAME as METADATA
from forebay.store.remote.carry.transfer import push
from forebay.store.remote.mirror import Mirror, key_there
from forebay.store.remote.node.node import WantedFile
from forebay.store.seal import quick_problems, verify_folder
from forebay.store.shared_disk import move
from forebay.visible import from_here

logger = logging.getLogger(__name__)

_SHOWN = 5
"""Problems of a cache that a message lists."""


def check_options(config: Config, options: Options) -> None:
    """Raises ConfigError for options that a cache root in a store does not take, and for a stage that is none."""
    if options.stage is not None:
        check_stage(config, options.stage)
        return
    if options.part is not None and config.remote_root is not None:
        raise ConfigError(
            f"--shards: the cache root is {config.remote_root}, and the parts of other nodes are not seen from here; "
            f"put their shards into the bucket: --stage URL, or build below a folder that all jobs share, then push "
            f"the cache: forebay preprocess {config.path} --cache-root DIR --shards I::N, forebay cache push DIR/NAME "
            f"{config.remote_root}/NAME"
        )
    if options.runner != "local" and options.stage is None and config.remote_root is not None:
        raise ConfigError(
            f"--runner {options.runner}: the cache root is {config.remote_root}, and what stands for it on this node "
            "is not seen by the others; give a place in its bucket for finished shards: forebay preprocess "
            f"{config.path} --runner {options.runner} --stage URL, or a folder that all nodes share: --cache-root DIR"
        )


def require_whole(config: Config, standing: Sealed, options: Options) -> None:
    """Raises BuildError where a cache in a store is to be made again, or is not what was sealed.

    It is compared by a listing, with `verify` byte for byte. No command changes it: others may be reading it.
    """
    again = f"remove all below {standing.place}/, then run: forebay preprocess {config.path}"
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
                f"the cache is sealed in {from_here(folder)}; to push what is missing: forebay preprocess {config.path}"
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
    aside = temporary_name(folder)
    move(folder, aside)
    remove_aside(aside)


def _files(folder: Path) -> list[WantedFile]:
    """Returns the files of a cache but metadata.json, those beside the shards first."""
    cache = open_cache(folder, verify="never")
    small = [WantedFile.of(name, entry, is_kept=True) for name, entry in cache.metadata["files"].items()]
    return small + [wanted for unit in range(cache.num_units) for wanted in cache.unit_files(unit)]


def _some(problems: Iterable[str]) -> str:
    first, *others = problems
    shown = "; ".join([first, *others[: _SHOWN - 1]])
    return shown + (f"; and {len(others) - _SHOWN + 1} more" if len(others) >= _SHOWN else "")
