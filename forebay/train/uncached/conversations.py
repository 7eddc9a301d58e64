"""The listing of images and what stands beside them, for samples made on the fly: made once, kept under the cache root.

Plans are made of lengths, so the first batch needs those of all samples: image headers and tokens. They are kept by
recipe, and used again as long as every file has the stat that it had.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.tree import Config
from forebay.preprocess.images.modality import Images
from forebay.preprocess.vision.headers import conversation_rows, images_of
from forebay.preprocess.vision.modality import Vision
from forebay.progress import Progress
from forebay.rows.kept_columns import PREFIX, STORED_TYPES, column_of, names_of, with_kept
from forebay.rows.manifest import CONVERSATION_SCHEMA, IMAGE_SCHEMA, Manifest, described
from forebay.rows.named_files import require_confined
from forebay.rows.readers.python_inputs import list_inputs
from forebay.rows.shared_images import flattened
from forebay.store.files import hash_file, write_bytes
from forebay.store.inputs import located
from forebay.store.key import SHORT, digest
from forebay.store.layout import Array
from forebay.store.memo import stat_now
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.sources import localized, look_up
from forebay.store.source_files import SourceFile, listed_files
from forebay.store.temporary import sweep, temporary_name
from forebay.train.uncached.source import Rejected

logger = logging.getLogger(__name__)

FOLDER = ".listings"

_TABLES = ("rows", "images")

_KEPT = ("sample_id", "text", "group", "images")

_GRIDS: Sequence[str] = ("grid_h", "grid_w")

_KINDS = ("failed", "excluded")

_VERSION = 2

_PIECE = 4096
"""Rows tokenised at once."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The samples that can be used.

    rows: `sample_id`, `text`, `group`, `images` (see CONVERSATION_SCHEMA) and int32 `num_tokens`, `num_images`, of
    patches `num_patches`. images: see IMAGE_SCHEMA, of patches with `grid_h`, `grid_w`. rejected: what was left out.
    """

    files: tuple[SourceFile, ...]
    rows: pa.Table
    images: pa.Table
    rejected: Rejected


def conversations(config: Config, modality: Vision | Images, *, recipe_key: str) -> Conversations:
    """Returns the samples of a config, from what was kept if that is still true; else they are listed, with progress.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    list_inputs(config)
    manifests = list(located(config).source.places)
    name = digest({"recipe": recipe_key, "manifests": manifests, "version": _VERSION})
    folder = config.cache_root / FOLDER / name[:SHORT]
    kept = _load(folder, schemas_of(listed_lengths(modality)))
    if kept is not None and _lists_the_same(config, kept.files):
        require_confined(kept.files, localized(config).source)
        logger.info("lengths of %d samples from %s", len(kept.rows), folder)
        return kept
    manifest = modality.manifest(config, map_=_with_progress)
    if manifest.unused:
        logger.warning("conversations: %s", described(manifest.unused))
    found = _measured(modality, manifest)
    try:
        _save(folder, found)
    except OSError as err:
        logger.warning("the lengths are not kept: %s cannot be written: %s", folder, err)
    return found


def _lists_the_same(config: Config, files: Sequence[SourceFile]) -> bool:
    """Says whether the config's manifests stand for the files that they stood for: a folder may have got another."""
    listed = [(file.entry, file.name) for file in listed_files(localized(config).source, reads=config.reads)]
    return listed == [(file.entry, file.name) for file in files if file.listed]


def _with_progress(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    yield from Progress(len(tasks), unit="file", desc="image headers").over(map(function, tasks))


def _measured(modality: Vision | Images, manifest: Manifest) -> Conversations:
    """Makes the text of every row; those that a build would leave out are left out."""
    rows, rejected = manifest.rows, Rejected.of(manifest)
    modality = modality.keeping(rows)
    names = [file.name for file in manifest.files]
    counts, is_good = np.zeros(len(rows), np.int32), np.ones(len(rows), bool)
    with Progress(len(rows), unit="text", desc="tokenise") as bar:
        for start in range(0, len(rows), _PIECE):
            part = conversation_rows(manifest, rows.slice(start, _PIECE))
            for place, sample in enumerate(modality.text_samples(part, names), start):
                if "failure" in sample:
                    rejected.add(sample["failure"])
                    is_good[place] = False
                else:
                    counts[place] = len(sample.get("input_ids", ()))
            bar.update(len(part))
    images = images_of(manifest)
    lengths = {"num_tokens": counts, **_image_counts(rows, images)}
    table = with_kept(rows.select(_KEPT), {name: column_of(rows, name) for name in names_of(rows)})
    for name in listed_lengths(modality):
        table = table.append_column(name, pa.array(lengths[name].astype(np.int32)))
    kept = table.filter(pa.array(is_good)).combine_chunks()
    return Conversations(files=manifest.files, rows=kept, images=images, rejected=rejected)


def listed_lengths(modality: Vision | Images) -> tuple[str, ...]:
    """Returns the lengths that are known before an image is decoded."""
    return modality.length_names if isinstance(modality, Vision) else ("num_tokens", "num_images")


def _image_counts(rows: pa.Table, images: pa.Table) -> dict[str, Array]:
    """Returns the images of every row, and of images with grids the patches."""
    offsets, flat = flattened(rows["images"])
    counts = {"num_images": np.diff(offsets)}
    if _GRIDS[0] in images.column_names:
        height, width = (images[name].to_numpy().astype(np.int64) for name in _GRIDS)
        sums = np.concatenate(([0], np.cumsum((height * width)[flat])))
        counts["num_patches"] = sums[offsets[1:]] - sums[offsets[:-1]]
    return counts


def schemas_of(lengths: Sequence[str]) -> tuple[pa.Schema, pa.Schema]:
    """Returns the schemas of what is kept: rows with these lengths, and images, with grids where patches count."""
    grids = _GRIDS if "num_patches" in lengths else []
    return (
        pa.schema(
            [
                *map(CONVERSATION_SCHEMA.field, _KEPT),
                *(pa.field(name, pa.int32()) for name in lengths),
            ]
        ),
        pa.schema([*IMAGE_SCHEMA, *(pa.field(name, pa.int32()) for name in grids)]),
    )


def _save(folder: Path, found: Conversations) -> None:
    """Keeps a listing, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    aside = temporary_name(folder)
    aside.mkdir()
    try:
        sums = {name: _write_table(aside / name, getattr(found, name)) for name in _TABLES}
        document = {
            "files": [[f.name, str(f.path), f.entry, f.listed, f.stat] for f in found.files],
            "rejected": {name: getattr(found.rejected, name) for name in ("num_rows", *_KINDS)},
            "sums": sums,
        }
        write_bytes(aside / "listing.json", json.dumps(document).encode("ascii"))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _load(folder: Path, schemas: tuple[pa.Schema, pa.Schema]) -> Conversations | None:
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
        rows, images = map(_read_table, (folder / name for name in _TABLES), schemas)
        _require_places(rows["group"], len(files))
        _require_places(pc.list_flatten(rows["images"]), len(images))
        _require_places(images["file"], len(files))
        kinds = ({str(why): int(count) for why, count in document["rejected"][k].items()} for k in _KINDS)
        rejected = Rejected(int(document["rejected"]["num_rows"]), *map(Counter, kinds))
        return Conversations(files=files, rows=rows, images=images, rejected=rejected)
    # pyarrow's errors are ValueErrors.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as err:
        if folder.exists():
            logger.warning("listing again: %s cannot be used: %s", folder, err)
        return None


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
