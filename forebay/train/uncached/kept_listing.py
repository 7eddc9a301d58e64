"""The rows of samples that are made on the fly, with their lengths: made once, those with images kept under the root.

Plans are made of lengths, so the first batch needs those of all samples: headers and tokens. They are kept by recipe,
and used again as long as every file has the stat that it had.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.tree import Config
from forebay.preprocess.assemble import EXCLUDING
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import listed
from forebay.preprocess.text_group import TOKENS
from forebay.progress import Progress
from forebay.rows.kept_columns import PREFIX, STORED_TYPES, names_of
from forebay.rows.manifest import CONVERSATION_SCHEMA, IMAGE_SCHEMA, Manifest, described
from forebay.rows.named_files import require_confined
from forebay.steps.text.transcript import DETECTED_FIELDS
from forebay.store.files import hash_file, sweep, temporary_name, write_bytes
from forebay.store.inputs import located
from forebay.store.key import SHORT, digest
from forebay.store.layout import Array
from forebay.store.memo import stat_now
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.raw_sources import localized, look_up
from forebay.store.source_files import SourceFile, listed_files
from forebay.task_map import Map

logger = logging.getLogger(__name__)

FOLDER = ".listings"

_TABLES = ("rows", "images")

_KEPT = ("sample_id", "text", "group", "images")

_KINDS = ("failed", "excluded")

_VERSION = 3

_PIECE = 4096
"""Rows tokenised at once."""


@dataclass(frozen=True)
class Rejected:
    """What is left out of `num_rows` rows, by reason, as a build counts it: bad rows, and good ones not wanted."""

    num_rows: int
    failed: Counter[str]
    excluded: Counter[str]

    @classmethod
    def of(cls, manifest: Manifest) -> Rejected:
        """Returns what the listing left out."""
        counts = {kind: Counter(found) for kind, found in manifest.counts().items()}
        return cls(len(manifest.rows) + counts["failed"].total(), counts["failed"], counts["excluded"])

    def add(self, reason: str) -> None:
        """Counts a row that was listed and cannot be used."""
        (self.excluded if reason in EXCLUDING else self.failed)[reason] += 1

    def __str__(self) -> str:
        kinds = (("bad", self.failed), ("not wanted", self.excluded))
        told = [(kind, ", ".join(f"{reason} {count}" for reason, count in sorted(own.items()))) for kind, own in kinds]
        return "left out: " + ("; ".join(f"{kind}: {reasons}" for kind, reasons in told if reasons) or "none")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The rows that can be used, and how long they are as far as that is known without decoding.

    lengths: int32 [rows] by name. said: columns of the row table that texts were given by what was made of them, None
    where there are none. rejected: what was left out.
    """

    manifest: Manifest
    lengths: Mapping[str, Array]
    rejected: Rejected
    said: pa.Table | None = None

    @property
    def rows(self) -> pa.Table:
        """The rows, as of a manifest."""
        return self.manifest.rows

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files, as of a manifest."""
        return self.manifest.files


def counted_rows(config: Config, groups: Groups) -> Counted:
    """Returns the rows of a config, from what was kept if that is still true; else they are listed, with progress.

    Kept are those of rows that list images, whose headers and conversations take long.
    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    if all(group.lists is None for group in groups.items):
        return _measured(groups, _listed(config, groups))
    manifests = list(located(config).source.places)
    name = digest({"recipe": groups.recipe.key, "manifests": manifests, "version": _VERSION})
    folder = config.cache_root / FOLDER / name[:SHORT]
    kept = _load(folder, groups)
    if kept is not None and _lists_the_same(config, kept.files):
        require_confined(kept.files, localized(config).source)
        logger.info("lengths of %d samples from %s", len(kept.rows), folder)
        return kept
    found = _measured(groups, _listed(config, groups, map_=_with_progress))
    try:
        _save(folder, found)
    except OSError as err:
        logger.warning("the lengths are not kept: %s cannot be written: %s", folder, err)
    return found


def _listed(config: Config, groups: Groups, *, map_: Map = map) -> Manifest:
    manifest = listed(config, groups, map_=map_)
    if manifest.unused:
        logger.warning("samples: %s", described(manifest.unused))
    return manifest


def _lists_the_same(config: Config, files: Sequence[SourceFile]) -> bool:
    """Says whether the config's manifests stand for the files that they stood for: a folder may have got another."""
    now = [(file.entry, file.name) for file in listed_files(localized(config).source, reads=config.reads)]
    return now == [(file.entry, file.name) for file in files if file.listed]


def _with_progress(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    yield from Progress(len(tasks), unit="file", desc="image headers").over(map(function, tasks))


def _measured(groups: Groups, manifest: Manifest) -> Counted:
    """Makes the text of every row; those that a build would leave out are left out."""
    rows, rejected = manifest.rows, Rejected.of(manifest)
    groups = groups.keeping(rows)
    names = [file.name for file in manifest.files]
    counts, is_good = np.zeros(len(rows), np.int32), np.ones(len(rows), bool)
    listing = Listing(groups=groups, manifest=manifest, key="")
    told = [field.name for field in groups.text.fields() if field.name in _SAID.names]
    said: list[dict[str, Any]] = []
    with Progress(len(rows), unit="text", desc="tokenise") as bar:
        for start in range(0, len(rows), _PIECE):
            part = groups.text_rows(listing, start, min(start + _PIECE, len(rows)))
            for place, sample in enumerate(groups.text.samples(part, names), start):
                if "failure" in sample:
                    rejected.add(sample["failure"])
                    is_good[place] = False
                    continue
                counts[place] = len(sample.get(TOKENS, ()))
                if len(told) > 1:
                    said.append({name: sample[name] for name in told})
            bar.update(len(part))
    good = dataclasses.replace(manifest, rows=rows.filter(pa.array(is_good)).combine_chunks())
    lengths = _lengths(groups, good, counts[is_good])
    table = pa.Table.from_pylist(said, schema=_SAID) if said else None
    return Counted(manifest=good, lengths=lengths, rejected=rejected, said=table)


_SAID = pa.schema(
    {
        "language": pa.large_string(),
        **{field.name: pa.large_string() if field.dtype == "str" else pa.float64() for field in DETECTED_FIELDS},
    }
)
"""The columns of rows whose languages are detected."""


def _lengths(groups: Groups, manifest: Manifest, tokens: Array) -> dict[str, Array]:
    """Returns the lengths of rows, by the names that a cache has them by, as far as they are known."""
    found: dict[str, Array] = {"num_tokens": tokens}
    items = groups.items_of(manifest)
    for group in groups.items:
        of_items = group.listed_lengths(items[group.name].table, manifest.files)
        found |= {name: items[group.name].sums(values) for name, values in of_items.items()}
    return {name: found[name].astype(np.int32) for name in groups.length_names if name in found}


def _save(folder: Path, found: Counted) -> None:
    """Keeps a listing, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    aside = temporary_name(folder)
    aside.mkdir()
    kept = [PREFIX + name for name in names_of(found.rows)]
    rows = found.rows.select([*_KEPT, *kept])
    for name, values in found.lengths.items():
        rows = rows.append_column(name, pa.array(values))
    tables = {"rows": rows, "images": found.manifest.images}
    try:
        document = {
            "files": [[f.name, str(f.path), f.entry, f.listed, f.stat] for f in found.files],
            "rejected": {name: getattr(found.rejected, name) for name in ("num_rows", *_KINDS)},
            "lengths": list(found.lengths),
            "sums": {name: _write_table(aside / name, tables[name]) for name in _TABLES},
        }
        write_bytes(aside / "listing.json", json.dumps(document).encode("ascii"))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _load(folder: Path, groups: Groups) -> Counted | None:
    """Returns what was kept; None where nothing was, it is damaged, or a file has changed since."""
    try:
        document = json.loads((folder / "listing.json").read_bytes())
        files = tuple(map(_file, document["files"]))
        forget()
        look_up([file.path for file in files])
        if any(stat_now(file.path) != file.stat for file in files):
            return None
        if any(hash_file(folder / name) != document["sums"][name] for name in _TABLES):
            return None
        lengths = [name for name in groups.length_names if name in document["lengths"]]
        rows, images = map(_read_table, (folder / name for name in _TABLES), _schemas(groups, lengths))
        _require_places(rows["group"], len(files))
        _require_places(pc.list_flatten(rows["images"]), len(images))
        _require_places(images["file"], len(files))
        kinds = ({str(why): int(count) for why, count in document["rejected"][k].items()} for k in _KINDS)
        return Counted(
            manifest=Manifest(files=files, rows=rows.drop_columns(lengths), images=images),
            lengths={name: rows[name].to_numpy() for name in lengths},
            rejected=Rejected(int(document["rejected"]["num_rows"]), *map(Counter, kinds)),
        )
    # pyarrow's errors are ValueErrors.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as err:
        if folder.exists():
            logger.warning("listing again: %s cannot be used: %s", folder, err)
        return None


def _schemas(groups: Groups, lengths: Sequence[str]) -> tuple[pa.Schema, pa.Schema]:
    """Returns the schemas of what is kept: rows with these lengths, and images with what their group knows of them."""
    known = [name for group in groups.items for name in group.known_columns if name not in IMAGE_SCHEMA.names]
    return (
        pa.schema([*map(CONVERSATION_SCHEMA.field, _KEPT), *(pa.field(name, pa.int32()) for name in lengths)]),
        pa.schema([*IMAGE_SCHEMA, *(pa.field(name, pa.int32()) for name in known)]),
    )


def _write_table(path: Path, table: pa.Table) -> str:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return hash_file(path)


def _read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Returns a kept table. Raises ValueError where it is none: its checksum says that it is whole, not whose it is."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    table.validate(full=True)  # arrow trusts offsets and ends the process where they lead out
    kept = [PREFIX + name for name in names_of(table)]
    if not table.drop_columns(kept).schema.equals(schema) or any(
        table.schema.field(name).type not in STORED_TYPES for name in kept
    ):
        raise ValueError(f"{path} holds {', '.join(table.schema.names)} in other types than a listing does")
    return table


def _require_places(places: pa.ChunkedArray, count: int) -> None:
    """Raises ValueError where numbers are no places in a list of this length."""
    ends = pc.min_max(places).as_py()
    if places.null_count or (len(places) and not 0 <= ends["min"] <= ends["max"] < count):
        raise ValueError(f"places of {ends} in a list of {count}")


def _file(values: list[Any]) -> SourceFile:
    name, path, entry, listed, stat = values
    if stat is not None:
        device, inode, size_bytes, mtime_ns, ctime_ns = stat
        stat = device, inode, size_bytes, mtime_ns, ctime_ns
    return SourceFile(name, Path(path), entry, listed, stat)
