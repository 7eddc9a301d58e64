"""Rows that are items themselves: what the media of their source files tell of them, a task each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.rows.eligible import apply_filters, name_absent_languages, unique_ids
from forebay.rows.kept_columns import concatenated, require_values
from forebay.rows.manifest import ROW_SCHEMA, Manifest, merged
from forebay.rows.meanings.recording_pieces import refuse_uncovered, to_judge
from forebay.rows.named_files import shown_name
from forebay.rows.reader import Located, LocateTask
from forebay.rows.row_listing import RowListing
from forebay.store.remote.raw.arriving import is_remote
from forebay.store.remote.raw.raw_sources import shown

ROWS_PER_TASK = 4096

_TASK_COLUMNS = ("row", "sample_id", "file", "member", "offset", "size", "duration_s", "language")


def locate_tasks(manifest: Manifest, listing: RowListing) -> Iterator[LocateTask]:
    """Yields a task for every tar that has rows left, in their order; of other kinds, for runs of 4096 rows of a file.

    A tar is not divided: its index would be loaded for each run.
    """
    kind, source, rows = listing.lister, listing.source, manifest.rows.select(_TASK_COLUMNS)
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
            cache_root=listing.cache_root,
            column=source.columns.media,
            keep=tuple(sorted(source.keep_columns)),
        )


def located_of(listing: RowListing, tasks: Sequence[LocateTask], *, total: int) -> list[Located]:
    """Returns what the files of tasks tell of their rows."""
    needs = functools.partial(listing.lister.needs, is_hashed=listing.is_hashed)
    return listing.run(listing.lister.locate, tasks, needs, total=total)


def refuse_pieces(manifest: Manifest, listing: RowListing) -> None:
    """Raises ManifestError for a row that its table says is of a piece of its recording."""
    rows = manifest.rows.filter(pa.array(to_judge(manifest.rows)))
    if not len(rows):
        return
    # What a table states need not be how long the recording is.
    place = ROW_SCHEMA.get_field_index("duration_s")
    seconds = pc.if_else(pc.is_null(rows["stated_s"]), rows["duration_s"], float("nan"))
    unknown = dataclasses.replace(manifest, rows=rows.set_column(place, ROW_SCHEMA.field(place), seconds))
    tasks = list(locate_tasks(unknown, listing))
    results = located_of(dataclasses.replace(listing, is_hashed=False), tasks, total=len(manifest.files))
    found = {row["row"]: row["duration_s"] for each in results for row in each.rows.to_pylist()}
    durations = np.array([found.get(row, np.nan) for row in rows["row"].to_pylist()])
    refuse_uncovered(rows, durations, listing.source.duration_tolerance, functools.partial(recording, manifest))


def recording(manifest: Manifest, file: int, member: str) -> str:
    """Returns what a recording is called in a message, with the table that names it."""
    path = shown(str(manifest.files[file].path))
    return (
        f"{shown(str(manifest.files[0].path))}: {path}{f', {member}' if member and not path.endswith(member) else ''}"
    )


def with_places(listed: Manifest, results: Sequence[Located], listing: RowListing, *, is_all: bool) -> Manifest:
    """The listed rows that were found and that filters leave now that durations are known."""
    source = listing.source
    found = _concatenated([result.rows for result in results])
    failed = pa.concat_tables([listed.rejected, *(result.failed for result in results)])
    manifest = dataclasses.replace(
        listed,
        rows=_merged(listed.rows, found),
        rejected=failed,
        absent=tuple(sorted({number for result in results for number in result.absent})),
        unused=merged([listed.unused, *(result.unused for result in results)]),
    )
    if listing.lister.lists_tars:
        manifest = unique_ids(manifest)
        if is_all:  # of some of the tars, more may be in the others
            name_absent_languages(manifest.rows, source)
            require_values(manifest.rows, manifest.unused, where=", ".join(source.manifests))
    manifest = apply_filters(manifest, source)
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
