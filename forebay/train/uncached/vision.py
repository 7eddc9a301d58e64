"""Images and conversations made into samples on the fly; their listing is made once and kept under the cache root.

Packs are made of lengths, so the first batch needs those of all samples: image headers and tokens. They are kept by
recipe, and used again as long as every file has the stat that it had.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.preprocess.sources.kept import PREFIX, STORED_TYPES, column_of, names_of, with_kept
from forebay.preprocess.sources.naming import require_confined
from forebay.preprocess.sources.rows import CONVERSATION_SCHEMA, IMAGE_SCHEMA, Manifest, described
from forebay.preprocess.sources.vision.part import flattened
from forebay.preprocess.vision.headers import conversation_rows, images_of, media_rows
from forebay.preprocess.vision.modality import Vision
from forebay.preprocess.vision.samples import MEDIA_ROWS
from forebay.progress import Progress
from forebay.steps.recipe import VisionRecipe, recipe_of
from forebay.store.files import hash_file, write_bytes
from forebay.store.image.codec import FIELDS, StoredImages
from forebay.store.key import SHORT, digest
from forebay.store.layout import Array
from forebay.store.memo import stat_now
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.sources import localized, look_up
from forebay.store.row_table import as_texts, sorted_categories
from forebay.store.source_files import SourceFile
from forebay.store.temporary import sweep, temporary_name
from forebay.train.uncached.source import UncachedSource

logger = logging.getLogger(__name__)

FOLDER = ".listings"

_TABLES = ("rows", "images")

_KEPT = ("sample_id", "text", "group", "images")

_LENGTHS = ("num_tokens", "num_patches", "num_images")

_SCHEMAS = (
    pa.schema([*map(CONVERSATION_SCHEMA.field, _KEPT), *(pa.field(name, pa.int32()) for name in _LENGTHS)]),
    pa.schema([*IMAGE_SCHEMA, *(pa.field(name, pa.int32()) for name in ("grid_h", "grid_w"))]),
)

_VERSION = 1

_PIECE = 4096
"""Rows tokenised at once."""


class UncachedVision(UncachedSource):
    """Images and conversations, decoded, resized and tokenised whenever they are asked for.

    fields, lengths, constants: as of a cache with codec "raw". What stands in for a bad sample is no longer than that
    sample, so that it fits where the bad one stood.
    """

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """Lists the samples, reads every image's header and tokenises every conversation, unless that was kept.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used.
        """
        recipe = cast(VisionRecipe, recipe_of(config))
        self._modality = Vision.of(config, recipe).with_codec("raw")
        found = conversations(config, self._modality, recipe_key=recipe.key)
        self._modality = self._modality.keeping(found.rows)
        super().__init__(
            config,
            recipe=recipe,
            modality=self._modality,
            files=found.files,
            rows=found.rows,
            failed=found.failed,
            stored_probe=stored_probe,
        )
        self._manifest = Manifest(files=found.files, rows=found.rows, images=found.images)
        step = recipe.patches
        self._images = StoredImages(MEDIA_ROWS, "raw", self._modality.settings, step.max_pixels, step.alpha)
        self.lengths = {name: found.rows[name].to_numpy() for name in self._modality.length_names}

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer."""
        return self._modality.recipe.chat.tokenizer

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the values of `source`, sorted, and which one each sample has; see `SampleSource`."""
        if name == "source":
            return self._by_file("group")
        if name not in names_of(self._rows):
            return None
        column = as_texts(column_of(self._rows, name)).dictionary_encode().combine_chunks()
        return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())

    def _texts(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._modality.text_samples(conversation_rows(self._manifest, self._rows), self._names))

    def _table_fields(self) -> list[str]:
        # The media rows of a vision cache are images.
        return [spec.name for spec in self.fields.values() if (spec.role, spec.group) == ("table", "text")]

    def _row_columns(self) -> dict[str, Callable[[], Any]]:
        return super()._row_columns() | {"source": lambda: self._file_names("group")}

    def _candidates(self, index: int) -> Iterator[int]:
        """The sample itself, then those behind it, around the end, that need no more room."""
        yield index
        tokens, patches = self.lengths["num_tokens"], self.lengths["num_patches"]
        for step in range(1, len(self)):
            other = (index + step) % len(self)
            if tokens[other] <= tokens[index] and patches[other] <= patches[index]:
                yield other

    def _make(self, index: int) -> dict[str, Any]:
        row = self._rows.slice(index, 1)
        text = self._good(next(iter(self._modality.text_samples(conversation_rows(self._manifest, row), self._names))))
        made = [
            self._good(values) for values in self._modality.media_samples(media_rows(self._manifest, row), self._media)
        ]
        used = text[MEDIA_ROWS].tolist()
        return self._images.sample({n: text[n] for n in ("input_ids", "label_mask")}, [made[place] for place in used])

    def _good(self, values: dict[str, Any]) -> dict[str, Any]:
        if "failure" in values:
            raise SampleError(values["failure"], values["message"])
        for name in (FIELDS["raw"], "input_ids", "label_mask"):
            if name in values:
                values[name].flags.writeable = False
        return values


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The samples that can be used.

    rows: `sample_id`, `text`, `group`, `images` (see CONVERSATION_SCHEMA) and int32 `num_tokens`, `num_patches`,
    `num_images`. images: see IMAGE_SCHEMA, with `grid_h`, `grid_w`. failed: rows left out, by reason.
    """

    files: tuple[SourceFile, ...]
    rows: pa.Table
    images: pa.Table
    failed: Counter[str]


def conversations(config: Config, modality: Vision, *, recipe_key: str) -> Conversations:
    """Returns the samples of a config, from what was kept if that is still true; else they are listed, with progress.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    name = digest({"recipe": recipe_key, "manifests": list(config.source.manifests), "version": _VERSION})
    folder = config.cache_root / FOLDER / name[:SHORT]
    kept = _load(folder)
    if kept is not None:
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


def _with_progress(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    yield from Progress(len(tasks), unit="file", desc="image headers").over(map(function, tasks))


def _measured(modality: Vision, manifest: Manifest) -> Conversations:
    """Tokenises every conversation; those that a build would leave out are left out."""
    rows, failed = manifest.rows, Counter(manifest.counts()["failed"])
    names = [file.name for file in manifest.files]
    counts = np.zeros(len(rows), np.int32)
    with Progress(len(rows), unit="text", desc="tokenise") as bar:
        for start in range(0, len(rows), _PIECE):
            part = conversation_rows(manifest, rows.slice(start, _PIECE))
            for place, sample in enumerate(modality.text_samples(part, names), start):
                if "failure" in sample:
                    failed[sample["failure"]] += 1
                else:
                    counts[place] = len(sample["input_ids"])
            bar.update(len(part))
    images = images_of(manifest)
    offsets, flat = flattened(rows["images"])
    sums = np.concatenate(([0], np.cumsum((images["grid_h"].to_numpy().astype(np.int64) * images["grid_w"])[flat])))
    lengths = {
        "num_tokens": counts,
        "num_patches": sums[offsets[1:]] - sums[offsets[:-1]],
        "num_images": np.diff(offsets),
    }
    table = with_kept(rows.select(_KEPT), {name: column_of(rows, name) for name in names_of(rows)})
    for name, values in lengths.items():
        table = table.append_column(name, pa.array(values.astype(np.int32)))
    kept = table.filter(pa.array(counts > 0)).combine_chunks()
    return Conversations(files=manifest.files, rows=kept, images=images, failed=failed)


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
            "failed": dict(found.failed),
            "sums": sums,
        }
        write_bytes(aside / "listing.json", json.dumps(document).encode("ascii"))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _load(folder: Path) -> Conversations | None:
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
        rows, images = map(_read_table, (folder / name for name in _TABLES), _SCHEMAS)
        _require_places(rows["group"], len(files))
        _require_places(pc.list_flatten(rows["images"]), len(images))
        _require_places(images["file"], len(files))
        failed = Counter({str(reason): int(count) for reason, count in document["failed"].items()})
        return Conversations(files=files, rows=rows, images=images, failed=failed)
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
