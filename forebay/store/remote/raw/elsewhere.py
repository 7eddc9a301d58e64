"""Files that another node has listed, by the paths that they have on this one.

Raw data of a store lies in mirrors, whose folders are below `remote.shard_dir` of each node. What the path of a mirror
stands for is its URL, and from the URL follows its folder on any node.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.raw.raw_sources import place_of
from forebay.store.source_files import SourceFile

Mirrors = tuple[tuple[str, Url], ...]
"""Folders of one node, each with the URL that it stands for."""


def mirrors_in(files: Iterable[SourceFile]) -> Mirrors:
    """Returns the mirrors of this node that files lie in, as another node must know them."""
    places = (place_of(file.path) for file in files)
    return tuple(sorted({(str(p.origin.folder), p.origin.url) for p in places if p is not None}, key=str))


def rebased(files: Sequence[SourceFile], mirrors: Mirrors, settings: RemoteConfig) -> tuple[SourceFile, ...]:
    """Returns files, whose paths another node has listed, with the paths that they have here.

    mirrors: folders of that node, with the URL that each stands for. A path outside of them is the same on all nodes.
    """
    return tuple(_rebased(file, mirrors, settings) for file in files) if mirrors else tuple(files)


def _rebased(file: SourceFile, mirrors: Mirrors, settings: RemoteConfig) -> SourceFile:
    for folder, url in mirrors:
        if file.path.is_relative_to(folder):
            return replace(file, path=_mirror(url, settings, os.getpid()) / file.path.relative_to(folder))
    return file


@functools.lru_cache(maxsize=256)
def _mirror(url: Url, settings: RemoteConfig, pid: int) -> Path:  # noqa: ARG001  a fork opens it anew
    return Mirror.at(url, settings).folder
