"""The conversations of a config with their lengths, listed and tokenised once and kept under the cache root.

Packs are made of lengths, so the first batch needs those of all samples: image headers and tokens. Kept by recipe; used
again as long as every file has the stat that it had.

How long clips will be once they are decoded, from headers that say it to the sample.

A manifest's durations are often rounded (two decimals in a file list), and then batches could differ from those of the
cache, whose lengths are those of the decoded audio.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from forebay.config.tree import Config
from forebay.preprocess.sources.naming import require_confined
from forebay.preprocess.sources.rows import CONVERSATION_SCHEMA, IMAGE_SCHEMA, WHOLE_FILE, Manifest
from forebay.preprocess.sources.speech.durations import opened
from forebay.preprocess.sources.unused import described
from forebay.preprocess.sources.vision.rows import flattened
from forebay.preprocess.speech.headers import AudioInfo, parsed_header
from forebay.preprocess.vision.headers import conversation_rows, images_of, list_vision
from forebay.preprocess.vision.modality import VisionLine
from forebay.steps.audio.waveform import Decode
from forebay.store.files import hash_file, write_bytes
from forebay.store.key import SHORT, digest
from forebay.store.layout import Array
from forebay.store.memo import stat_now
from forebay.store.source_files import SourceFile
from forebay.store.temporary import sweep, temporary_name

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


def conversations(config: Config, line: VisionLine, *, recipe_key: str) -> Conversations:
    """Returns the samples of a config, from what was kept where that is still true; else they are listed, with progress.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    name = digest({"recipe": recipe_key, "manifests": list(config.source.manifests), "version": _VERSION})
    folder = config.cache_root / FOLDER / name[:SHORT]
    kept = _load(folder)
    if kept is not None:
        require_confined(kept.files, config.source)
        logger.info("lengths of %d samples from %s", len(kept.rows), folder)
        return kept
    manifest = list_vision(config, map_=_with_progress)
    if manifest.unused:
        logger.warning("conversations: %s", described(manifest.unused))
    found = _measured(line, manifest)
    try:
        _save(folder, found)
    except OSError as err:
        logger.warning("the lengths are not kept: %s cannot be written: %s", folder, err)
    return found


def _with_progress(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    yield from tqdm(map(function, tasks), total=len(tasks), desc="image headers", file=sys.stderr, disable=None)


def _measured(line: VisionLine, manifest: Manifest) -> Conversations:
    """Tokenises every conversation; those that a build would leave out are left out."""
    rows, failed = manifest.rows, Counter(manifest.counts()["failed"])
    names = [file.name for file in manifest.files]
    counts = np.zeros(len(rows), np.int32)
    with tqdm(total=len(rows), desc="tokenise", file=sys.stderr, disable=None) as bar:
        for start in range(0, len(rows), _PIECE):
            part = conversation_rows(manifest, rows.slice(start, _PIECE))
            for place, sample in enumerate(line.text_samples(part, names), start):
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
    table = rows.select(_KEPT)
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
        files = tuple(_file(*values) for values in document["files"])
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
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as err:  # pyarrow's errors are ValueErrors
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
    if not table.schema.equals(schema):
        raise ValueError(f"{path} holds {', '.join(table.schema.names)} in other types than a listing does")
    return table


def _require_places(places: pa.ChunkedArray, count: int) -> None:
    """Raises ValueError where numbers are no places in a list of this length."""
    ends = pc.min_max(places).as_py()
    if places.null_count or (len(places) and not 0 <= ends["min"] <= ends["max"] < count):
        raise ValueError(f"places of {ends} in a list of {count}")


def _file(name: str, path: str, entry: int, listed: bool, stat: list[int] | None) -> SourceFile:
    if stat is None:
        return SourceFile(name, Path(path), entry, listed)
    device, inode, size_bytes, mtime_ns, ctime_ns = stat
    return SourceFile(name, Path(path), entry, listed, (device, inode, size_bytes, mtime_ns, ctime_ns))


UNKNOWN = -1


_HEADERS_A_PIECE = 512
"""Rows that a thread does at once."""


_THREADS = 8
"""Of which most wait, where the files lie on a network."""


def exact_lengths(rows: pa.Table, files: Sequence[SourceFile], step: Decode) -> Array:
    """Returns the audio samples of every row after decoding, int64 [num_rows]; UNKNOWN where no header says it exactly.

    rows, files: as in `Manifest`. FLAC and RIFF WAVE say it, in a read of 4 KiB a clip, with a progress bar. Clips inside of
    a table (`hf`) are UNKNOWN: reading them is reading everything. So is what cannot be opened: it will fail when it is read.
    """
    columns = [rows[name].to_numpy() for name in ("file", "offset", "size")]
    pieces = [
        [column[start : start + _HEADERS_A_PIECE].tolist() for column in columns]
        for start in range(0, len(rows), _HEADERS_A_PIECE)
    ]
    found = np.full(len(rows), UNKNOWN, np.int64)
    with ThreadPoolExecutor(_THREADS) as threads, _bar(len(rows)) as bar:
        made = threads.map(lambda piece: list(_lengths(piece, files, step)), pieces)
        for number, lengths in enumerate(made):
            found[number * _HEADERS_A_PIECE : number * _HEADERS_A_PIECE + len(lengths)] = lengths
            bar.update(len(lengths))
    return found


def _bar(count: int) -> Any:
    return tqdm(total=count, desc="audio headers", file=sys.stderr, disable=None)


def _lengths(piece: list[list[int]], files: Sequence[SourceFile], step: Decode) -> Iterator[int]:
    for number, places in groupby(zip(*piece, strict=True), key=lambda place: place[0]):
        file = files[number]
        with ExitStack() as stack:
            descriptor = None
            for _, offset, size in places:
                if size == WHOLE_FILE and file.listed:
                    yield UNKNOWN
                    continue
                try:
                    if descriptor is None:
                        descriptor = stack.enter_context(opened(str(file.path)))
                    yield _length(descriptor, offset, size, step)
                except OSError:
                    yield UNKNOWN


def _length(descriptor: int, offset: int, size: int, step: Decode) -> int:
    if size == WHOLE_FILE:
        size = os.fstat(descriptor).st_size
    info = parsed_header(
        lambda start, count: os.pread(descriptor, max(0, min(count, size - start)), offset + start), size
    )
    return UNKNOWN if info is None else decoded_length(info, step)


def decoded_length(info: AudioInfo, step: Decode) -> int:
    """Returns the samples of a clip at the step's rate and no longer than it clips; UNKNOWN where its header has none."""
    if info.num_samples <= 0 or info.sample_rate_hz <= 0:
        return UNKNOWN
    # soxr rounds half up.
    length = (2 * info.num_samples * step.sample_rate_hz + info.sample_rate_hz) // (2 * info.sample_rate_hz)
    return max(1, length if step.clip_s is None else min(length, round(step.clip_s * step.sample_rate_hz)))
