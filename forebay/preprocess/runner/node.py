"""What a node must have in common with the driver of a build, looked at on the node before it makes a shard."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forebay.config.remote import RemoteConfig
from forebay.config.url import parse_url
from forebay.errors import BuildError
from forebay.preprocess.groups import Groups
from forebay.preprocess.runner.driver import token_in
from forebay.preprocess.shard_task import ShardTask
from forebay.store.layout import TEXT, Group
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.sources import place_of
from forebay.store.source_files import SourceFile

R = TypeVar("R")

_LATE_S = (0.0, 0.5, 2.0)
"""A network file system may show a new file to another machine a little later."""

Stores = tuple[tuple[str, RemoteConfig], ...]
"""The stores that raw data is read from: URL and settings of each."""


@dataclass(frozen=True, kw_only=True)
class OnNode:
    """Calls `function` on a node that sees the folder of the build and the raw data, and computes what the driver does.

    host, probe: of the machine whose values the keys of the shards name. driver: the machine of this build's driver.
    token: what the driver wrote into the folder of the build. stores: see `stores_of`. config: the config file, for
    messages.
    """

    function: Callable[[ShardTask], object]
    host: str
    probe: Mapping[Group, str]
    driver: str
    token: str
    stores: Stores
    config: str

    def __call__(self, task: ShardTask) -> object:
        """Returns `function(task)`. Raises BuildError where this node is not fit for it."""
        _open_stores(self.stores, self.token)
        if task.stage is None:  # else nothing is shared by that folder
            self._require_folder(task.folder)
        if task.group != TEXT:
            self._require_files(task.files)
        self._require_numerics(task)
        return self.function(task)

    def _require_folder(self, folder: Path) -> None:
        if _appears(lambda: token_in(folder) == self.token):
            return
        raise BuildError(
            f"{folder} on node {socket.gethostname()} is not the folder of that name on {self.driver}, the driver: all "
            "nodes must share run.cache_root; put it on a file system that they all mount at the same path, or build "
            f"in a bucket, which needs no shared folder: forebay preprocess {self.config} --runner ray --cache-root "
            "s3://BUCKET/caches --stage s3://BUCKET/stage",
            code="FB309",
        )

    def _require_files(self, files: Sequence[SourceFile]) -> None:
        for path in [file.path for file in files if file.stat is not None and file.stat[0] >= 0]:  # of no store
            if _appears(functools.partial(os.path.lexists, path)):
                continue
            raise BuildError(
                f"{path} is not there on node {socket.gethostname()}, and {self.driver} has listed it: mount the "
                "raw data on all nodes at the same path, or put it into a store and name it by URL in source.manifest "
                "(if it was removed meanwhile, put it back); finished shards are kept; then run: forebay preprocess "
                f"{self.config} --runner ray",
                code="FB309",
            )

    def _require_numerics(self, task: ShardTask) -> None:
        here, wanted = _probe(task.groups, task.group), self.probe[task.group]
        if here != wanted:
            raise BuildError(
                f"the {task.group} steps give other values on node {socket.gethostname()} (probe {here}) than on "
                f"{self.host} (probe {wanted}): another CPU family, or other libraries; install the same packages on "
                "all nodes, or leave that node out of the cluster; finished shards are kept; then run: forebay "
                f"preprocess {self.config} --runner ray",
                code="FB305",
            )


def stores_of(files: Sequence[SourceFile]) -> Stores:
    """Returns the stores that files are of; a node that has never read from them learns of them so."""
    found = {}
    for file in files:
        place = None if file.stat is None or file.stat[0] >= 0 else place_of(file.path)
        if place is not None:
            found[str(place.origin.url)] = place.origin.mirror.settings
    return tuple(found.items())


@functools.lru_cache(maxsize=1)
def _open_stores(stores: Stores, build: str) -> None:  # noqa: ARG001  once for each build
    """Makes the paths that stand for objects mean these on this node, and forgets what an earlier build was told."""
    for url, settings in stores:
        Mirror.at(parse_url(url), settings)
    forget()


@functools.cache
def _probe(groups: Groups, group: Group) -> str:
    return groups.probe(group)


def _appears(is_so: Callable[[], bool]) -> bool:
    for wait_s in _LATE_S:
        time.sleep(wait_s)
        if is_so():
            return True
    return False
