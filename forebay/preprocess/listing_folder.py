"""A listing in a folder, whole or not at all: its tables, the files that it is of, and a document that names them.

Prepared builds are such folders, and listings that training without a cache keeps. Tables are mapped, so many processes
of a node share their memory. The outline of a prepared build has no rows: `forebay status` and the jobs of a cluster
read it. Nothing here imports a group or a step, so looking at one costs little.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.remote import is_url, parse_url
from forebay.config.tree import Config
from forebay.rows.kept_columns import PREFIX, STORED_TYPES
from forebay.rows.listed_frames import frame_files
from forebay.rows.manifest import CONVERSATION_SCHEMA, ITEM_SCHEMAS, LISTS, REJECTED_SCHEMA, ROW_SCHEMA, Manifest
from forebay.rows.named_files import are_same
from forebay.rows.source_table import SourceFiles
from forebay.steps.recipe import Recipe
from forebay.store.files import hash_file, put_in_place, temporary_name, write_aside, write_bytes
from forebay.store.key import SHORT, digest
from forebay.store.layout import BUILDING, Array, Group
from forebay.store.memo import SIZE, is_young, stats_of
from forebay.store.remote.raw.arriving import mirrors_in, rebased
from forebay.store.remote.raw.raw_sources import MIRRORS, localized, look_up
from forebay.store.source_files import SourceFile, entry_files

COPY_OF = "copy_of"
"""In the document of a listing that another node has made: the digest of that node's document."""

_FILES_SCHEMA = pa.schema(
    [
        pa.field("name", pa.large_binary()),
        pa.field("path", pa.large_binary()),
        pa.field("entry", pa.int32()),
        pa.field("listed", pa.bool_()),
        pa.field("stat", pa.list_(pa.int64(), 5)),
        pa.field("xxh3_128", pa.string()),
    ]
)
_ROW_TYPES = {field.name: field.type for field in (*ROW_SCHEMA, *CONVERSATION_SCHEMA)}


def save_listing(
    folder: Path, name: str, manifest: Manifest, *, tables: Mapping[str, pa.Table], document: Mapping[str, Any]
) -> None:
    """Makes a folder hold a listing. name: of its document. tables, document: what is there beside the manifest.

    `listed_at_ns` of the document is from before the listing began.
    """
    sources = SourceFiles.of(manifest.files)
    found = {"rows": manifest.rows, "rejected": manifest.rejected, "files": _files_table(sources), **tables}
    found |= {LISTS[group]: table for group, table in manifest.items.items()}
    aside = temporary_name(folder)
    aside.mkdir(exist_ok=True)  # nobody else has its name: what is there is ours
    try:
        for table_name, table in found.items():
            with write_aside(aside / f"{table_name}.arrow") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table.combine_chunks())
        files = {at.name: {"size_bytes": at.stat().st_size, "xxh3_128": hash_file(at)} for at in aside.iterdir()}
        whole = {
            **document,
            "absent": list(manifest.absent),
            "unused": dict(manifest.unused),
            "mirrors": [[at, str(url)] for at, url in mirrors_in(sources.paths)],
            "files": files,
        }
        write_bytes(aside / name, json.dumps(whole).encode("ascii"))
        put_in_place(aside, folder, may_stay=lambda: (read_document(folder, name) or {}).get("files") == files)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_document(folder: Path, name: str) -> dict[str, Any] | None:
    """Returns what a listing says of itself; None where it is not whole."""
    try:
        document: dict[str, Any] = json.loads((folder / name).read_bytes())
        for file, entry in document["files"].items():
            if (folder / file).stat().st_size != entry["size_bytes"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return document


def table_of(folder: Path, name: str) -> pa.Table:
    """Returns a table of a listing, mapped."""
    with pa.memory_map(str(folder / f"{name}.arrow")) as mapped:
        return pa.ipc.open_file(mapped).read_all()


def manifest_in(folder: Path, document: Mapping[str, Any], files: Sequence[SourceFile]) -> Manifest:
    """Returns the manifest of a listing. files: those of its table, by their paths on this node."""
    return Manifest(
        files=files,
        rows=table_of(folder, "rows"),
        rejected=table_of(folder, "rejected"),
        absent=tuple(document["absent"]),
        items={group: table_of(folder, name) for group, name in LISTS.items() if f"{name}.arrow" in document["files"]},
        unused=document["unused"],
    )


def require_sound(folder: Path, document: Mapping[str, Any]) -> None:
    """Raises ValueError or OSError where tables are not those that were written, or could not have been.

    A checksum says that a table is whole, not whose: arrow trusts offsets and ends the process where they lead out.
    """
    for file, entry in document["files"].items():
        if hash_file(folder / file) != entry["xxh3_128"]:
            raise ValueError(f"{file} is damaged")
    tables = {file: table_of(folder, file.removesuffix(".arrow")) for file in document["files"]}
    for table in tables.values():
        table.validate(full=True)
    rows = tables["rows.arrow"]
    count = len(tables["files.arrow"])
    _require_types(tables["files.arrow"], _types(_FILES_SCHEMA))
    _require_types(tables["rejected.arrow"], _types(REJECTED_SCHEMA))
    named = [name for name in rows.column_names if not name.startswith(PREFIX)]
    _require_types(rows.select(named), {name: _ROW_TYPES.get(name, pa.null()) for name in {*named, "group", "text"}})
    if any(rows.schema.field(name).type not in STORED_TYPES for name in {*rows.column_names}.difference(named)):
        raise ValueError("kept columns have other types than a listing's")
    for name in ("group", "file"):
        if name in named:
            _require_places(rows[name], count)
    for group, name in LISTS.items():
        items, schema = tables.get(f"{name}.arrow", ITEM_SCHEMAS[group].empty_table()), ITEM_SCHEMAS[group]
        _require_types(items, {**_derived(items, schema), **_types(schema)})
        _require_places(items["file"], count)
        _require_places(pa.chunked_array([frame_files(items)]), count)
        if name in named:
            _require_places(pc.list_flatten(rows[name]), len(items))


def _derived(items: pa.Table, schema: pa.Schema) -> dict[str, pa.DataType]:
    """Returns the types of what groups make of the facts of items: numbers."""
    found = {field.name: field.type for field in items.schema if field.name not in schema.names}
    return {name: kind if pa.types.is_integer(kind) else pa.null() for name, kind in found.items()}


def _types(schema: pa.Schema) -> dict[str, pa.DataType]:
    return dict(zip(schema.names, schema.types, strict=True))


def _require_types(table: pa.Table, types: Mapping[str, pa.DataType]) -> None:
    if _types(table.schema) != types:
        raise ValueError(f"a table holds {', '.join(table.column_names)} in other types than a listing does")


def _require_places(places: pa.ChunkedArray, count: int) -> None:
    """Raises ValueError where numbers are no places in a list of this length."""
    ends = pc.min_max(places).as_py()
    if places.null_count or (len(places) and not 0 <= ends["min"] <= ends["max"] < count):
        raise ValueError(f"places of {ends} in a list of {count}")


def files_now(config: Config, folder: Path, document: Mapping[str, Any]) -> tuple[Sequence[SourceFile], str | None]:
    """Returns the files of a listing by their paths on this node, and one that is not what it was then."""
    files: Sequence[SourceFile] = files_of(table_of(folder, "files"))
    if is_elsewhere := COPY_OF in document:
        mirrors = tuple((str(at), parse_url(url)) for at, url in document.get("mirrors", ()))
        files = rebased(files, mirrors, config.remote)
    return files, moved_since(config, files, listed_at_ns=document["listed_at_ns"], is_elsewhere=is_elsewhere)


def moved_since(
    config: Config, files: Sequence[SourceFile], *, listed_at_ns: int, is_elsewhere: bool = False
) -> str | None:
    """Returns a file that is not what it was when it was listed, None for none: a stat each, and no reading.

    is_elsewhere: another node has listed them. A copy of a file has other times there and the same size; whoever reads
    the file compares its content. As in `hashes.memo`, a file that nobody has hashed is distrusted where it was changed
    about when it was listed: a second change inside one clock tick would not show.
    """
    entries = entry_files(localized(config).source, meaning=config.meaning)
    found = [(each.entry, name) for each in entries for name in each.names]
    own = SourceFiles.of(files)
    listed = own.take(np.flatnonzero(own.is_listed))
    known = list(zip(listed.entries.tolist(), listed.all_names, strict=True))
    if found != known:
        return next(iter(sorted(name for _, name in set(found) ^ set(known))), config.source.manifests[0])
    paths = own.paths
    look_up(path for path in paths if MIRRORS in path)
    stats, is_there = stats_of(paths)
    is_known = are_same(own, stats, is_there)
    if is_elsewhere:  # the version of an object is the same for all nodes
        is_known |= own.has_stat & is_there & (stats[:, 0] >= 0) & (stats[:, SIZE] == own.stats[:, SIZE])
    is_trusted = own.is_hashed | ~own.has_stat | ~is_young(own.stats, listed_at_ns)
    return next((paths[number] for number in np.flatnonzero(~(is_known & is_trusted)).tolist()), None)


def files_of(table: pa.Table) -> SourceFiles:
    """Returns the files of a listing, by their paths on the node that made it."""
    return SourceFiles.of_columns(*(table[name].to_pylist() for name in _FILES_SCHEMA.names))


def _files_table(files: SourceFiles) -> pa.Table:
    stats = pa.FixedSizeListArray.from_arrays(pa.array(files.stats.reshape(-1)), 5)
    columns = {
        "name": files.names,
        "path": files.written_paths(),
        "entry": files.entries,
        "listed": files.is_listed,
        "stat": pc.if_else(pa.array(files.has_stat), stats, pa.scalar(None, stats.type)),
        "xxh3_128": files.hashes,
    }
    return pa.table(columns, schema=_FILES_SCHEMA)


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
