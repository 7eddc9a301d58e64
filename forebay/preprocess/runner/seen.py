"""The state of a build on disk: its cache, what was prepared, shards and runs. Looking changes and hashes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.tree import Config
from forebay.errors import RemoteError
from forebay.preprocess.outline import Outline, outline, submission_file
from forebay.preprocess.runner.parts import PartRecord, read_parts
from forebay.preprocess.workspace import finished_keys, folders_of, workspace_folder, workspaces_of
from forebay.steps.recipe import Recipe
from forebay.store.layout import Array, Group
from forebay.store.lookup import Sealed, find_cache
from forebay.store.memo import Memo
from forebay.store.remote.raw.raw_sources import naming_urls


@dataclass(frozen=True, kw_only=True)
class SeenParts:
    """A build as it stands on disk at one moment.

    sealed: its cache. unknown: a cache of its recipe, if the raw data would have to be hashed to know whether it is
    this one. workspace: where finished shards stand; None where no run has begun. parts: what the runs say, oldest
    first. submission: the jobs that were last submitted. problem: what could not be looked at.
    """

    now: float
    sealed: Sealed | None
    unknown: Sealed | None
    prepared: Outline | None
    workspace: Path | None
    parts: Sequence[PartRecord]
    submission: Mapping[str, Any] | None
    problem: str | None

    @cached_property
    def keys(self) -> Mapping[Group, list[str]]:
        """The keys of all shards by group, in their order; empty where nothing is prepared."""
        if self.prepared is None:
            return {}
        return {group: cuts["key"].to_pylist() for group, cuts in self.prepared.by_group.items()}

    @cached_property
    def finished(self) -> Mapping[Group, set[str]]:
        """The keys of the finished shards by group."""
        if self.workspace is None:
            return {}
        return {group: finished_keys(self.workspace / group) for group in self.keys or folders_of(self.workspace)}

    @cached_property
    def is_finished(self) -> Mapping[Group, Array]:
        """Says of every shard of a prepared build whether it is finished, by group."""
        return {
            group: np.fromiter(map(self.finished.get(group, set()).__contains__, keys), bool, len(keys))
            for group, keys in self.keys.items()
        }

    @property
    def is_staged(self) -> bool:
        """Whether finished shards stand in a store, and only the records of this node's runs are seen from here."""
        return self.workspace is not None and self.workspace.name.endswith("-stage")

    @property
    def num_shards(self) -> int:
        """How many shards the group has that has most; 0 where nothing is prepared."""
        return max(map(len, self.keys.values()), default=0)

    def missing_parts(self, num_parts: int) -> list[int]:
        """Returns which of so many parts of a prepared build have shards that are not finished."""
        missing: Array = np.flatnonzero(~self._whole_cuts())
        return [int(part) for part in np.unique(missing % num_parts)]

    def _whole_cuts(self) -> Array:
        whole: Array = np.ones(self.num_shards, bool)
        for is_there in self.is_finished.values():
            whole[: len(is_there)] &= is_there
        return whole


def seen_of(config: Config, recipe: Recipe) -> SeenParts:
    """Returns what is on disk of a config's build; a root in a store is asked for its caches."""
    now = time.time()
    config = replace(config, loader=replace(config.loader, cache_dir=None))
    with naming_urls():
        sealed, unknown, problem = _caches(config, recipe)
        prepared = outline(config, recipe)
    workspace = _workspace(config, recipe, None if prepared is None else prepared.key)
    return SeenParts(
        now=now,
        sealed=sealed,
        unknown=unknown,
        prepared=prepared,
        workspace=workspace,
        parts=[] if workspace is None else read_parts(workspace, now=now),
        submission=_submission(config, recipe),
        problem=problem,
    )


def _caches(config: Config, recipe: Recipe) -> tuple[Sealed | None, Sealed | None, str | None]:
    try:
        lookup = find_cache(config, recipe, may_hash=False, memo=Memo.of(config))
    except RemoteError as err:
        return None, None, f"whether the cache is sealed is not known: {err}"
    found = lookup.found
    if found is not None and found.metadata.get("codec") == config.codec:
        return found, None, None
    return None, lookup.nearest if lookup.state == "unknown" else None, None


def _workspace(config: Config, recipe: Recipe, key: str | None) -> Path | None:
    """Returns the folder of a build: of the prepared one, else of the one that was begun last."""
    begun = workspaces_of(config, recipe.key)
    if key is not None:
        named = [workspace_folder(config, key, suffix) for suffix in ("", "-rebuild", "-stage")]
        begun = [folder for folder in begun if folder in named]
    return next(iter(begun), None)


def _submission(config: Config, recipe: Recipe) -> Mapping[str, Any] | None:
    try:
        document = json.loads(submission_file(config, recipe).read_bytes())
        return {name: document[name] for name in ("num_parts", "jobs", "logs", "label", "submitted")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
