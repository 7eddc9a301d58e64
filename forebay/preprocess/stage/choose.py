"""Where the shards of a build stand: in a folder, or in a stage, which must be one of the cache root's bucket."""

from __future__ import annotations

from pathlib import Path

from forebay.config.tree import Config
from forebay.config.url import Url, is_url, parse_url
from forebay.errors import ConfigError
from forebay.preprocess.groups import Listing
from forebay.preprocess.outline import folder_of
from forebay.preprocess.prepared import remove
from forebay.preprocess.report import Options
from forebay.preprocess.shard_place import ShardPlace
from forebay.preprocess.stage.prepared import remove_staged
from forebay.preprocess.stage.stage import Stage
from forebay.preprocess.stage.workspace import StagedWorkspace
from forebay.preprocess.workspace import Workspace
from forebay.steps.recipe import Recipe

_SUFFIX = "-stage"
"""Ends the name of a driver's own folder: shards of a build without a stage stand in the one without it."""


def check_stage(config: Config, text: str) -> None:
    """Raises ConfigError for a stage that is no folder of the bucket that the cache root lies in."""
    command = f"forebay preprocess {config.path}"
    if not is_url(text):
        raise ConfigError(
            f"--stage {text} is a folder of this machine; where all nodes share it, no stage is needed: "
            f"{command} --cache-root {text}; else name one of the bucket: --stage s3://bucket/stage"
        )
    stage = parse_url(text)
    if stage.scheme in ("http", "https"):
        raise ConfigError(f"--stage {stage}: nothing is put to a web server; name a folder of s3://, gs:// or az://")
    if config.remote_root is None:
        raise ConfigError(
            f"--stage {stage}: the cache root is {config.run.cache_root}, a folder of this machine, and the cache is "
            f"sealed in the bucket of its stage; run: {command} --stage {stage} --cache-root "
            f"{stage.scheme}://{stage.bucket}/caches, then forebay cache pull"
        )
    root = parse_url(config.remote_root)
    if (stage.scheme, stage.bucket) != (root.scheme, root.bucket):
        raise ConfigError(
            f"--stage {stage} is in another bucket than the cache root {root}, and a store copies within one; run: "
            f"{command} --stage {root.scheme}://{root.bucket}/stage"
        )
    if _is_inside(stage, root) or _is_inside(root, stage):
        raise ConfigError(
            f"--stage {stage} and the cache root {root} lie one in the other, and what is below a root are caches; "
            f"run: {command} --stage {root.scheme}://{root.bucket}/{_beside(root)}"
        )


def _is_inside(one: Url, other: Url) -> bool:
    return not other.key or f"{one.key}/".startswith(f"{other.key}/")


def _beside(root: Url) -> str:
    return "stage" if root.key.partition("/")[0] != "stage" else "staged"


def shard_place(config: Config, options: Options, listing: Listing, *, folder: Path, origin: str) -> ShardPlace:
    """Returns where the shards of a build stand.

    folder: of this machine, whose name a stage has too. origin: names what the build is of, whatever its content.
    """
    if options.stage is None:
        return Workspace(folder, origin)
    url = parse_url(options.stage)
    return StagedWorkspace(
        stage=Stage(url=url / folder.name, settings=config.remote).knowing(listing.files),
        local=Workspace(folder.with_name(f"{folder.name}{_SUFFIX}"), origin),
        root=parse_url(str(config.remote_root)),
        prepared=url / folder_of(config, listing.recipe).name,
        groups=listing.groups,
        verify=options.verify,
        progress=options.progress,
    )


def remove_stage(config: Config, options: Options, recipe: Recipe, name: str) -> None:
    """Removes what a driver left in the stage that was killed after it had sealed. name: of the build's folder."""
    if options.stage is not None:
        url = parse_url(options.stage)
        Stage(url=url / name, settings=config.remote).remove()
        remove_staged(url / folder_of(config, recipe).name, config.remote)
        remove(config, recipe)
