"""Conversations over images: the kinds of source to one table of rows and one of different images."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import Reads, SourceConfig, row_slice
from forebay.errors import BuildError, ManifestError
from forebay.rows.eligible import FIRST_WAVE, next_wave, unneeded
from forebay.rows.image_facts import ListedImages
from forebay.rows.image_rows import ImagePart, ReadPiece, candidate_rows, listed_rows
from forebay.rows.kept_columns import PREFIX, column_of, names_of, require_values, with_kept
from forebay.rows.manifest import CONVERSATION_SCHEMA, Manifest, merged, rejections
from forebay.rows.meanings.image_class import with_labels
from forebay.rows.named_files import NamedFiles, manifest_files, require_folder
from forebay.rows.reader import reader_of
from forebay.rows.shared_images import first_uses, flattened, share_groups
from forebay.store.layout import Array
from forebay.store.remote.raw.arriving import is_remote, run_on_sources, tell_if_too_large
from forebay.task_map import Map, WorkerDied


def read_conversations(
    source: SourceConfig, *, cache_root: str | os.PathLike[str], map_: Map = map, reads: Reads = "conversations"
) -> Manifest:
    """Returns the eligible rows of a config, what their images are, and what was left out and why.

    reads: what rows are read as, `Config.reads`. Of `labels` the schema of the rows says what they are, see `labels`.

    rows: CONVERSATION_SCHEMA, with rows of one file that share an image brought together, the groups by first
    appearance. images: IMAGE_SCHEMA, of these rows alone.

    Rows are left out in this order: `source.rows`, rows that are no conversation, ids that occur twice,
    `source.exclude`, images that cannot be used (a row fails with its first), `max_samples`; of a row that is out by an
    earlier one no image is read. A table of 10 million rows is held as arrow and numpy; a Python object is held for
    each image that is a file of its own.

    map_: runs the tasks, `map` or one over processes. With `max_samples` or an end in `source.rows` only as much is
    read as it takes, and a bit more. Raises ManifestError where a manifest as a whole cannot be used, BuildError where
    an image kills the processes of `map_`, OSError or TarError where the machine fails.
    """
    reader = reader_of(source)
    manifests = manifest_files(source, reads=reads)
    require_folder(source)
    tell_if_too_large(manifests)
    tasks = reader.pieces_of(source, manifests, reads=reads, cache_root=os.fspath(cache_root))
    read = ReadPiece(reader.read)
    selected = slice(None) if source.rows is None else row_slice(source.rows)
    images = ListedImages(source, NamedFiles(manifests, source), map_, reader, os.fspath(cache_root))
    parts: list[ImagePart] = []
    remote = is_remote(source)
    wave = (1 if remote else FIRST_WAVE) if _may_end_early(source, selected) else None
    while True:
        batch = list(itertools.islice(tasks, wave))
        found = run_on_sources(map_, read, batch, lambda task: [task.path], is_remote=remote, total=len(manifests))
        parts += found
        images.extend(found)
        rows = listed_rows(parts)
        is_all = wave is None or len(batch) < wave or (selected.stop is not None and len(rows) >= selected.stop)
        good = 0
        if is_all or source.max_samples is not None:
            chosen = _selected(rows, selected, source, is_all=is_all)
            candidates = candidate_rows(chosen, manifests, source, lists_images=reader.lists_media)
            failed = _looked_at(candidates.rows, images, source.max_samples)
            good = int(np.count_nonzero(failed < 0))
            if is_all or good == source.max_samples:
                return _finished(candidates, failed, images, parts, reads=reads)
        wave = next_wave(wave or 1, looked_at=len(parts), rows=good, source=source, is_remote=remote)


def _may_end_early(source: SourceConfig, selected: slice) -> bool:
    """Whether the rows that are wanted may be known before all are; those counted from the end are not."""
    ends = [number for number in (selected.start, selected.stop) if number is not None]
    return all(number >= 0 for number in ends) and (source.max_samples is not None or selected.stop is not None)


def _selected(rows: pa.Table, selected: slice, source: SourceConfig, *, is_all: bool) -> pa.Table:
    """Returns the rows that `source.rows` selects. Raises ManifestError where there is none, and no others follow."""
    named, chosen = ", ".join(source.manifests), np.arange(len(rows), dtype=np.int64)[selected]
    if is_all and not len(rows):
        raise ManifestError(f"{named}: no rows; add samples or name another manifest", code="FB204")
    if is_all and not len(chosen):
        raise ManifestError(
            f"{named}: source.rows is {source.rows}, which selects none of {len(rows)} rows; correct it", code="FB204"
        )
    return rows if source.rows is None else rows.take(pa.array(chosen))


def _looked_at(rows: pa.Table, images: ListedImages, max_samples: int | None) -> Array:
    """Returns the first image of each row that cannot be used, as a reference, else -1.

    Rows behind the one that fills `max_samples` are not looked at.
    """
    count = len(rows) if max_samples is None else max_samples
    while True:
        offsets, references = flattened(rows["images"].slice(0, count))
        try:
            images.look(first_uses(references)[0])
        except WorkerDied as err:
            raise BuildError(_death(err, rows, images), code="FB302") from err
        is_bad = images.facts()["reason"].is_valid().to_numpy()[images.fact[references]]
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[is_bad]
        failed = np.full(len(offsets) - 1, -1, np.int64)
        failed[owner[::-1]] = references[is_bad][::-1]
        good = np.flatnonzero(failed < 0)
        if max_samples is not None and len(good) >= max_samples:
            return failed[: good[max_samples - 1] + 1]
        if count >= len(rows):
            return failed
        count *= 2


def _death(err: WorkerDied, rows: pa.Table, images: ListedImages) -> str:
    offsets, references = flattened(rows["images"])
    used = np.flatnonzero(np.isin(references, images.references_to(err.task, err.position)))
    owners = pa.array(np.unique(np.searchsorted(offsets, used, side="right") - 1))
    excluded = ", ".join(f'"{sample}"' for sample in rows["sample_id"].take(owners).to_pylist())
    return (
        f"{err} at the header of image {err.task.name(err.position)!r}. If that is to blame, leave out what it is of: "
        f"[source] exclude = [{excluded}]; then run: forebay preprocess CONFIG"
    )


def _finished(
    candidates: Manifest, failed: Array, images: ListedImages, parts: Sequence[ImagePart], *, reads: Reads
) -> Manifest:
    """The manifest of the rows that were looked at."""
    source = images.source
    is_full = np.count_nonzero(failed < 0) == source.max_samples
    rows = candidates.rows.slice(0, len(failed))
    rejected = candidates.rejected
    if is_full:  # `max_samples` left out what follows
        rejected = rejected.filter(pc.less(rejected["row"], rows["row"][-1]))
    rejected = pa.concat_tables([rejected, _failures(rows, failed, images)])
    num_listed = len(candidates.files)
    used = np.unique(images.file[flattened(rows["images"])[1]])
    absent = [part.group for part in parts if part.absent]
    absent += used[(used >= num_listed) & np.isin(used, images.absent())].tolist()
    rows, table = _brought_together(rows.filter(pa.array(failed < 0)) if np.any(failed >= 0) else rows, images)
    unused = merged(part.unused for part in parts)
    manifest = Manifest(
        files=tuple(images.files.files[: max(num_listed, int(used.max(initial=0)) + 1)]),
        rows=rows,
        rejected=rejected.take(pa.array(np.argsort(rejected["row"].to_numpy(), kind="stable"))),
        absent=tuple(sorted({*absent})),
        images=table,
        unused=unused,
    )
    if is_full and source.kind == "webdataset":
        manifest = dataclasses.replace(manifest, absent=(*manifest.absent, *unneeded(manifest, rows)))
    require_values(rows, unused, where=", ".join(source.manifests))
    if reads == "labels":
        labelled = with_labels(rows, [part.classes for part in parts if len(part.rows)])
        manifest = dataclasses.replace(manifest, rows=labelled)
    return manifest


def _failures(rows: pa.Table, failed: Array, images: ListedImages) -> pa.Table:
    gone = rows.filter(pa.array(failed >= 0))
    facts = images.facts().take(pa.array(images.fact[failed[failed >= 0]]))
    return rejections(gone["row"], gone["sample_id"], kind="failed", reason=facts["reason"], message=facts["message"])


def _brought_together(rows: pa.Table, images: ListedImages) -> tuple[pa.Table, pa.Table]:
    """CONVERSATION_SCHEMA and IMAGE_SCHEMA of rows whose images can all be used."""
    offsets, references = flattened(rows["images"])
    groups = share_groups(rows["group"].to_numpy(), offsets, images.contents(references))
    order = np.argsort(groups, kind="stable")
    rows = rows.select(
        [name for name in rows.column_names if name in CONVERSATION_SCHEMA.names or name.startswith(PREFIX)]
    )
    if np.any(order[1:] < order[:-1]):  # a copy of all texts
        rows = rows.take(pa.array(order))
    offsets, references = flattened(rows["images"])
    different, numbers = first_uses(images.contents(references))
    first = np.empty(len(different), np.int64)
    first[numbers[::-1]] = references[::-1]
    columns = {
        **{name: rows[name] for name in ("row", "sample_id", "explicit_id", "group", "text")},
        "images": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(numbers, pa.int32())),
        "image_group": pa.array(first_uses(groups[order])[1]),
    }
    table = pa.table([columns[f.name] for f in CONVERSATION_SCHEMA], schema=CONVERSATION_SCHEMA)
    return with_kept(table, {name: column_of(rows, name) for name in names_of(rows)}), images.table(first)
