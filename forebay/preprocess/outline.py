"""The outline of a prepared build, without its rows: `forebay status` and the jobs of a cluster read it.

It imports no group and no step, so looking costs little.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.remote import is_url
from forebay.config.tree import Config
from forebay.preprocess.listing_folder import files_now, read_document, table_of
from forebay.steps.recipe import Recipe
from forebay.store.key import SHORT, digest
from forebay.store.layout import BUILDING, Array, Group

FORMAT = 3
DOCUMENT = "prepared.json"
_FOLDERS = ("audio_dir", "image_dir", "texts")


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
    if (document := prepared_document(folder)) is None:
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
    return config.cache_root / BUILDING / f"prepared-{digest(named)[:SHORT]}"


def submission_file(config: Config, recipe: Recipe) -> Path:
    """Returns the file that says which jobs of a cluster were last started for a config's build."""
    return folder_of(config, recipe).with_suffix(".submitted.json")


def prepared_document(folder: Path) -> dict[str, Any] | None:
    """Returns what a prepared build says of itself; None where it is not whole."""
    document = read_document(folder, DOCUMENT)
    return None if document is None or document.get("format") != FORMAT else document
