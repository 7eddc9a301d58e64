"""What is doubtful of the classes of a listing: folders of a class without images, and one class for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import PICTURES, SourceConfig
from forebay.config.url import is_url
from forebay.store.remote.raw.sources import walk
from forebay.visible import printable

_SHOWN = 5


def class_doubts(source: SourceConfig, rows: pa.Table) -> Iterator[str]:
    """Yields what a person should know of the classes of some listed rows; their text is their class."""
    if empty := empty_classes(source):
        more = f" and {len(empty) - _SHOWN} more" if len(empty) > _SHOWN else ""
        named = ", ".join(repr(printable(name)) for name in empty[:_SHOWN])
        folders = "folder holds" if len(empty) == 1 else "folders hold"
        yield f"{len(empty)} {folders} no image, so no class has its name: {named}{more}"
    classes = pc.unique(rows["text"])
    if len(classes) == 1 and len(rows) > 1:
        name = printable(classes[0].as_py())[:60]
        yield f"all {len(rows)} rows have one class, {name!r}: nothing can be learnt of it; give rows of another class"


def empty_classes(source: SourceConfig) -> list[str]:
    """Returns the folders right below those of `kind = "folder"` that hold no image at any depth, sorted.

    Hidden folders are none. Folders in a store have files in them, or are not there.
    """
    if source.kind != "folder":
        return []
    roots = [Path(manifest) for manifest in source.manifests if not is_url(manifest)]
    return sorted(name for root in roots if root.is_dir() for name in _empty_below(root))


def _empty_below(root: Path) -> Iterator[str]:
    with os.scandir(root) as entries:
        folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for folder in folders:
        if not _has_image(folder.path):
            yield folder.name


def _has_image(folder: str) -> bool:
    return any(
        name.lower().endswith(PICTURES) and not name.startswith(".") for _, _, names in walk(folder) for name in names
    )
