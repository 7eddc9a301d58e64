"""What a prepared build says of itself, without its rows: how `forebay status` and the jobs of a cluster look at one.

It imports no group and no step, so looking costs little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.config.url import is_url, parse_url
from forebay.steps.recipe import Recipe
from forebay.store.key import SHORT, digest
from forebay.store.layout import Array, Group
from forebay.store.memo import SIZE, Stat, is_same, stat_now
from forebay.store.remote.raw.elsewhere import rebased
from forebay.store.remote.raw.raw_sources import localized, look_up
from forebay.store.source_files import SourceFile, listed_files

FORMAT = 2
DOCUMENT = "prepared.json"
COPY_OF = "copy_of"
_FOLDERS = ("audio_dir", "image_dir", "texts")
"""In the document of a build that another node has prepared: the digest of that node's document."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A prepared build without its rows. moved: a source file that is not what it was then; None: none."""

    key: str
    host: str
    num_samples: int
    cuts: pa.Table
    moved: str | None

    @cached_property
    def by_group(self) -> dict[Group, pa.Table]:
        """The shards of each group, text last; those of a group stand together."""
        groups = self.cuts["group"].to_pylist()
        return {group: self.cuts.slice(groups.index(group), groups.count(group)) for group in dict.fromkeys(groups)}

    def num_rows(self, group: Group) -> Array:
        """Returns the rows of every shard of a group."""
        rows: Array = _numbers(self.by_group[group]["stop"]) - _numbers(self.by_group[group]["start"])
        return rows


def _numbers(column: pa.ChunkedArray) -> Array:
    # Arrow's own conversion loads pandas.
    whole = column.combine_chunks()
    return np.frombuffer(whole.buffers()[1], np.int64, len(whole), 8 * whole.offset)


def outline(config: Config, recipe: Recipe) -> Outline | None:
    """Returns the outline of a config's prepared build, also where its sources have changed; None if there is none."""
    folder = folder_of(config, recipe)
    if (document := read_document(folder)) is None:
        return None
    return Outline(
        key=document["key"],
        host=document["host"],
        num_samples=len(table_of(folder, "rows")),
        cuts=table_of(folder, "cuts"),
        moved=files_now(config, folder, document)[1],
    )


def folder_of(config: Config, recipe: Recipe) -> Path:
    """Returns where the prepared build of a config is, or would be: named by all but the sources' content."""
    manifests = [name if is_url(name) else os.path.abspath(name) for name in config.source.manifests]
    named = {
        "format": FORMAT,
        "recipe": recipe.key,
        "manifests": manifests,
        "confined": config.source.confined,
        "remote_identity": config.source.remote_identity,
        "rows_per_shard": config.layout.rows_per_shard,
        "codec": config.codec,
        **{name: place for name in _FOLDERS if (place := getattr(config.source, name)) is not None},
    }
    return config.cache_root / ".building" / f"prepared-{digest(named)[:SHORT]}"


def submission_file(config: Config, recipe: Recipe) -> Path:
    """Returns the file that says which jobs of a cluster were last started for a config's build."""
    return folder_of(config, recipe).with_suffix(".submitted.json")


def read_document(folder: Path) -> dict[str, Any] | None:
    """Returns what a prepared build says of itself; None where it is not whole."""
    try:
        document: dict[str, Any] = json.loads((folder / DOCUMENT).read_bytes())
        for name, entry in document["files"].items():
            if (folder / name).stat().st_size != entry["size_bytes"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return document if document.get("format") == FORMAT else None


def files_now(config: Config, folder: Path, document: Mapping[str, Any]) -> tuple[tuple[SourceFile, ...], str | None]:
    """Returns the files of a prepared build by their paths on this node, and one that is not what it was then."""
    files = _files(table_of(folder, "files"))
    is_elsewhere = COPY_OF in document
    if is_elsewhere:
        mirrors = tuple((str(at), parse_url(url)) for at, url in document.get("mirrors", ()))
        files = rebased(files, mirrors, config.remote)
    return files, _moved(config, files, is_elsewhere=is_elsewhere)


def _moved(config: Config, files: Sequence[SourceFile], *, is_elsewhere: bool) -> str | None:
    """Returns a file that is not what it was: a stat each, and no reading.

    is_elsewhere: another node has listed them. A copy of a file has other times there and the same size; whoever reads
    the file compares its content.
    """
    found = [(file.entry, file.name) for file in listed_files(localized(config).source, reads=config.reads)]
    known = [(file.entry, file.name) for file in files if file.listed]
    if found != known:
        return next(iter(sorted(name for _, name in set(found) ^ set(known))), config.source.manifests[0])
    look_up([file.path for file in files])
    is_known = _is_as_large if is_elsewhere else is_same
    return next((str(file.path) for file in files if not is_known(stat_now(file.path), file.stat)), None)


def _is_as_large(now: Stat | None, known: Stat | None) -> bool:
    if now is None or known is None or now[0] < 0:  # the version of an object is the same for all nodes
        return is_same(now, known)
    return now[SIZE] == known[SIZE]


def _files(table: pa.Table) -> tuple[SourceFile, ...]:
    return tuple(
        SourceFile(
            os.fsdecode(row["name"]),
            Path(os.fsdecode(row["path"])),
            entry=row["entry"],
            listed=row["listed"],
            stat=None if row["stat"] is None else tuple(row["stat"]),
            xxh3_128=row["xxh3_128"],
        )
        for row in table.to_pylist()
    )


def table_of(folder: Path, name: str) -> pa.Table:
    """Returns a table of a prepared build, mapped: many processes of a node share its memory."""
    with pa.memory_map(str(folder / f"{name}.arrow")) as mapped:
        return pa.ipc.open_file(mapped).read_all()
