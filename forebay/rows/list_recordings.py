"""Recordings in two stages: a manifest is listed once, then the media of every source file is found, a task each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SOURCE_KINDS, SourceConfig
from forebay.config.tree import Config
from forebay.errors import ManifestError
from forebay.rows.eligible import (
    FIRST_WAVE,
    apply_filters,
    fail_impossible,
    name_absent_languages,
    next_wave,
    take_first,
    unique_ids,
)
from forebay.rows.kept_columns import concatenated, require_values, typed
from forebay.rows.manifest import ROW_SCHEMA, SPAN, Manifest, merged
from forebay.rows.meanings.recording_pieces import refuse_differing, refuse_uncovered, to_judge
from forebay.rows.meanings.recordings import list_records, locate_files
from forebay.rows.named_files import shown_name, stamped
from forebay.rows.reader import Located, LocateTask, RecordingLister, reader_of
from forebay.store.remote.raw.arriving import is_remote, run_on_sources, tell_if_too_large
from forebay.store.remote.raw.raw_sources import localized, shown
from forebay.task_map import Map

ROWS_PER_TASK = 4096
_CHECKED_ROWS = 256

_TASK_COLUMNS = ("row", "sample_id", "file", "member", "offset", "size", "duration_s", "language")


def read_manifest(source: SourceConfig, *, cache_root: str | os.PathLike[str] | None = None) -> Manifest:
    """Returns the rows that a manifest names and the filters leave, as far as it alone tells; no tar is opened.

    Tars that are listed without their rows have none yet; durations may be NaN, places UNLOCATED. cache_root: None
    where no index may be kept.
    Raises ManifestError where a manifest as a whole cannot be used: absent, empty, another form, columns or types.
    """
    kind = _lister(source)
    listed = kind.list(source, *([cache_root and Path(cache_root)] if kind.has_index else []))
    rows = typed(listed.rows)
    if SOURCE_KINDS[source.kind].has_audio:
        rows = refuse_differing(rows, functools.partial(_recording, listed))
    manifest = unique_ids(dataclasses.replace(listed, rows=rows))
    if not kind.lists_tars:
        name_absent_languages(manifest.rows, source)
    return apply_filters(fail_impossible(manifest), source)


def locate_tasks(
    manifest: Manifest, source: SourceConfig, *, cache_root: str | os.PathLike[str]
) -> Iterator[LocateTask]:
    """Yields a task for every tar that has rows left, in their order; of other kinds, for runs of 4096 rows of a file.

    A tar is not divided: its index would be loaded for each run.
    """
    kind, rows = _lister(source), manifest.rows.select(_TASK_COLUMNS)
    if kind.lists_tars:
        cuts = [(number, 0, 0) for number in range(len(manifest.files))]
    else:
        most = source.max_samples if source.max_samples is not None and is_remote(source) else ROWS_PER_TASK
        step = len(rows) if kind.in_tars else min(most, ROWS_PER_TASK)
        cuts = _cuts(manifest.rows["group"].to_numpy(), step)
    for group, start, stop in cuts:
        part = rows.slice(start, stop - start)
        numbers = {group, *pc.unique(part["file"]).to_pylist()}
        yield LocateTask(
            group=group,
            name=shown_name(manifest.files[group]),
            paths={number: str(manifest.files[number].path) for number in sorted(numbers)},
            rows=part,
            cache_root=os.fspath(cache_root),
            column=source.columns.media,
            keep=tuple(sorted(source.keep_columns)),
        )


def read_rows(
    source: SourceConfig, *, cache_root: str | os.PathLike[str], map_: Map = map, is_hashed: bool = False
) -> Manifest:
    """Returns the eligible samples of a config, every place and duration known, and what was left out.

    map_: runs the tasks, `map` or one over processes. With `max_samples` only as many files are looked into as it
    takes. is_hashed: of a store whole files are downloaded ahead, since they will be hashed, even if an index would do.
    Raises ManifestError where a manifest as a whole cannot be used, OSError or TarError where the machine fails.
    """
    listed = read_manifest(source, cache_root=cache_root)
    listed = dataclasses.replace(listed, files=tuple(stamped(listed.files)))
    tell_if_too_large(listed.files)
    tasks, remote = list(locate_tasks(listed, source, cache_root=cache_root)), is_remote(source)
    lister, results = _lister(source), list[Located]()
    # Where no more rows were listed than are wanted, every task is needed.
    all_at_once = source.max_samples is None or 0 < len(listed.rows) <= source.max_samples
    wave = len(tasks) if all_at_once else 1 if remote else FIRST_WAVE
    is_all = False
    while not is_all:
        batch = tasks[len(results) : len(results) + max(1, wave)]
        results += _located(batch, lister, map_, source=source, total=len(listed.files), is_hashed=is_hashed)
        is_all = len(results) == len(tasks)
        manifest = _finished(listed, results, source, is_all=is_all)
        if len(manifest.rows) >= (source.max_samples or len(listed.rows) + 1):
            break
        rows = len(manifest.rows)
        wave = next_wave(wave, looked_at=len(results), rows=rows, source=source, is_remote=remote)
    manifest = take_first(manifest, source.max_samples, is_all=is_all, is_of_tars=lister.lists_tars)
    _refuse_pieces(manifest, source, map_, cache_root=cache_root)
    names = [name for name in manifest.rows.column_names if not name.startswith(SPAN)]
    manifest = dataclasses.replace(manifest, rows=manifest.rows.select(names))
    if not len(manifest.rows) and not len(manifest.rejected):
        raise ManifestError(
            f"{', '.join(source.manifests)}: no audio in any of its files; correct source.manifest", code="FB204"
        )
    return manifest


def _located(
    tasks: Sequence[LocateTask],
    lister: RecordingLister,
    map_: Map,
    *,
    source: SourceConfig,
    total: int,
    is_hashed: bool = False,
) -> list[Located]:
    needs = functools.partial(lister.needs, is_hashed=is_hashed)
    return run_on_sources(map_, lister.locate, tasks, needs, is_remote=is_remote(source), total=total)


def check_pieces(config: Config) -> None:
    """Raises ManifestError where the table of a config says of one of its first rows that it is of a piece."""
    listed = read_manifest(config.source)
    is_one = np.cumsum(to_judge(listed.rows)) <= _CHECKED_ROWS
    judged = dataclasses.replace(listed, rows=listed.rows.filter(pa.array(is_one)))
    _refuse_pieces(judged, config.source, map, cache_root=config.cache_root)


def _refuse_pieces(manifest: Manifest, source: SourceConfig, map_: Map, *, cache_root: str | os.PathLike[str]) -> None:
    """Raises ManifestError for a row that its table says is of a piece of its recording."""
    rows = manifest.rows.filter(pa.array(to_judge(manifest.rows)))
    if not len(rows):
        return
    # What a table states need not be how long the recording is.
    place = ROW_SCHEMA.get_field_index("duration_s")
    seconds = pc.if_else(pc.is_null(rows["stated_s"]), rows["duration_s"], float("nan"))
    unknown = dataclasses.replace(manifest, rows=rows.set_column(place, ROW_SCHEMA.field(place), seconds))
    tasks = list(locate_tasks(unknown, source, cache_root=cache_root))
    results = _located(tasks, _lister(source), map_, source=source, total=len(manifest.files))
    found = {row["row"]: row["duration_s"] for each in results for row in each.rows.to_pylist()}
    durations = np.array([found.get(row, np.nan) for row in rows["row"].to_pylist()])
    refuse_uncovered(rows, durations, source.duration_tolerance, functools.partial(_recording, manifest))


def _recording(manifest: Manifest, file: int, member: str) -> str:
    """Returns what a recording is called in a message, with the table that names it."""
    path = shown(str(manifest.files[file].path))
    return (
        f"{shown(str(manifest.files[0].path))}: {path}{f', {member}' if member and not path.endswith(member) else ''}"
    )


def _lister(source: SourceConfig) -> RecordingLister:
    reader = reader_of(source)
    by_record = functools.partial(list_records, read=reader.read)
    return reader.recordings or RecordingLister(list=by_record, locate=locate_files)


def _finished(listed: Manifest, results: Sequence[Located], source: SourceConfig, *, is_all: bool) -> Manifest:
    found = _concatenated([result.rows for result in results])
    failed = pa.concat_tables([listed.rejected, *(result.failed for result in results)])
    manifest = dataclasses.replace(
        listed,
        rows=_merged(listed.rows, found),
        rejected=failed,
        absent=tuple(sorted({number for result in results for number in result.absent})),
        unused=merged([listed.unused, *(result.unused for result in results)]),
    )
    if _lister(source).lists_tars:
        manifest = unique_ids(manifest)
        if is_all:  # of some of the tars, more may be in the others
            name_absent_languages(manifest.rows, source)
            require_values(manifest.rows, manifest.unused, where=", ".join(source.manifests))
    manifest = apply_filters(fail_impossible(manifest), source)
    order = np.argsort(manifest.rejected["row"].to_numpy(), kind="stable")
    return dataclasses.replace(manifest, rejected=manifest.rejected.take(pa.array(order)))


def _merged(rows: pa.Table, found: pa.Table) -> pa.Table:
    """The listed rows that were found, with the columns that were found; of `found` alone where it is complete."""
    if found.column_names[: len(ROW_SCHEMA)] == ROW_SCHEMA.names:
        return found
    if len(found) < len(rows):
        rows = rows.take(pa.array(np.searchsorted(rows["row"].to_numpy(), found["row"].to_numpy())))
    for name in found.column_names:
        position = ROW_SCHEMA.get_field_index(name)
        rows = rows.set_column(position, ROW_SCHEMA.field(position), found[name].cast(ROW_SCHEMA.field(position).type))
    return rows


def _concatenated(tables: Sequence[pa.Table]) -> pa.Table:
    # A file of which nothing is left gives a table without the columns that it would have found.
    filled = [table for table in tables if len(table)] or list(tables[:1])
    return concatenated(filled).combine_chunks() if filled else pa.table({"row": pa.array([], pa.int64())})


def _cuts(group: np.ndarray[Any, Any], step: int) -> list[tuple[int, int, int]]:
    """(group, start, stop) of every run of rows of one group, none longer than `step`."""
    if not len(group):
        return []
    borders = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
    return [
        (int(group[first]), start, min(start + step, last))
        for first, last in itertools.pairwise(borders)
        for start in range(first, last, step)
    ]


def tar_places(config: Config) -> pa.Table | None:
    """Returns `sample_id`, `tar_path` (absolute, or a URL) and `tar_member_name` of all eligible samples.

    None without tars.
    Raises ManifestError where the manifest cannot be used.
    """
    if not _lister(config.source).in_tars:
        return None
    listed = read_rows(localized(config).source, cache_root=config.cache_root)
    paths = pa.array([shown(os.path.abspath(file.path)) for file in listed.files], pa.large_string())
    columns = {
        "sample_id": listed.rows["sample_id"],
        "tar_path": paths.take(listed.rows["file"].combine_chunks()),
        "tar_member_name": listed.rows["member"],
    }
    return pa.table(columns)
