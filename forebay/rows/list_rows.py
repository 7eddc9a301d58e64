"""A listing in two stages: the rows that manifests name, by reader and meaning, then what their items are.

Rows are read piece by piece, a task each; recordings that a reader lists by column are read at once. Then the media of
each source file is located, a task each, and the items that rows list are looked at, each once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SourceConfig, row_slice
from forebay.config.tree import Config
from forebay.errors import ManifestError
from forebay.rows.audio_facts import as_listed, locate_files
from forebay.rows.columns_aside import free_memory, gathered, one_heap, rows_aside
from forebay.rows.eligible import (
    FIRST_WAVE,
    apply_filters,
    name_absent_languages,
    next_wave,
    selected_rows,
    take_first,
    unique_ids,
    unneeded,
)
from forebay.rows.kept_columns import column_of, concatenated, names_of, require_values, with_kept
from forebay.rows.listed_media import ListedMedia, failed_items, num_good, with_items
from forebay.rows.manifest import (
    CONVERSATION_SCHEMA,
    ROW_SCHEMA,
    SPAN,
    Manifest,
    Meaning,
    found_rows,
    merged,
    recording,
    require_rows,
)
from forebay.rows.meanings.own import meaning_of
from forebay.rows.meanings.recordings import Recorded, refuse_differing, refuse_uncovered, to_judge
from forebay.rows.named_files import NamedFiles, manifest_files, require_folder, shown_name, stamped
from forebay.rows.reader import FilePiece, Located, LocateTask, RecordingLister, RowReader, cuts_of, reader_of
from forebay.rows.row_pieces import TEXT_AT, RowPart, candidate_rows, first_places, listed_rows, read_piece
from forebay.rows.segments import recordings_of, segmented, with_ends
from forebay.rows.source_table import SourceFiles
from forebay.rows.windows import WindowRules, windowed
from forebay.store.layout import Array
from forebay.store.remote.raw.arriving import is_remote, run_on_sources, tell_if_too_large
from forebay.store.remote.raw.raw_sources import localized, shown
from forebay.store.source_files import SourceFile
from forebay.task_map import Map

T = TypeVar("T")
R = TypeVar("R")
ROWS_PER_TASK = 4096
_TASK_COLUMNS = ("row", "sample_id", "file", "member", "offset", "size", "duration_s", "language")


@dataclass(frozen=True, kw_only=True)
class RowListing:
    """A listing of one source: where its rows are read from and what they mean.

    map_: runs the tasks, `map` or one over processes. is_hashed: of a store whole files are downloaded ahead, since
    they will be hashed, even if an index would do.
    """

    source: SourceConfig
    meaning: Meaning
    cache_root: str
    map_: Map = map
    is_hashed: bool = False
    reader: RowReader = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reader", reader_of(self.source))

    @functools.cached_property
    def lister(self) -> RecordingLister:
        """How rows that are items themselves are listed and located: by column where the reader can, else by record."""
        found, own = self.reader.recordings, self.meaning.own
        if found is not None and self.meaning.by_column and found.group == own:
            return found
        if self.reader.read is None:
            raise ManifestError(
                f'source.kind is "{self.source.kind}", which has no rows for source.meaning = '
                f'"{self.meaning.facts.name}"; list them in a table or as JSON lines',
                code="FB144",
            )
        if own is None:
            return RecordingLister(locate=as_listed)
        return RecordingLister(locate=found.locate if found is not None and self.reader.holds_media else locate_files)

    @functools.cached_property
    def manifests(self) -> Sequence[SourceFile]:
        """The source files, with the stat that they have before they are read."""
        return manifest_files(self.source, meaning=self.meaning.facts.name)

    def pieces(self) -> Iterator[FilePiece]:
        """Yields the pieces of the source files."""
        yield from self.reader.pieces_of(self.source, self.manifests, meaning=self.meaning, cache_root=self.cache_root)

    def parts(self, pieces: Sequence[FilePiece]) -> list[RowPart]:
        """Returns what the records of pieces mean."""
        read = (None if self.meaning.lists_all else self.lister.read) or self.reader.read
        assert read is not None
        task = functools.partial(read_piece, read)
        return self.run(task, pieces, lambda piece: [piece.path], total=len(self.manifests))

    def run(
        self, function: Callable[[T], R], tasks: Sequence[T], needs: Callable[[T], Sequence[str]], *, total: int
    ) -> list[R]:
        """Returns `function(task)` of every task, in their order."""
        return run_on_sources(self.map_, function, tasks, needs, is_remote=is_remote(self.source), total=total)

    def media(self) -> list[ListedMedia]:
        """Returns the items of each group that rows list, none yet; their files are numbered together."""
        files, facts = NamedFiles(self.manifests, self.source), self.meaning.facts
        return [
            ListedMedia(self.source, files, self.map_, self.reader, self.cache_root, group, facts.has_sound)
            for group in facts.groups
            if group in facts.lists
        ]

    def in_waves(
        self,
        tasks: Iterator[T],
        run: Callable[[Sequence[T]], Sequence[R]],
        judge: Callable[[Sequence[R], bool], tuple[Manifest | None, int]],
        *,
        first: int | None,
        total: int | None = None,
    ) -> Manifest:
        """Returns what a judge makes of the results of tasks, of no more of these than it takes.

        judge: (results so far, whether they are all) -> (the listing, or None where more is needed; the good rows).
        first: tasks of the first wave; None: all. total: of all tasks, where that is known.
        """
        results: list[R] = []
        wave = first
        while True:
            before = len(results)
            results += run([*itertools.islice(tasks, wave)])
            is_all = wave is None or len(results) < before + wave or len(results) == total
            manifest, rows = judge(results, is_all)
            if manifest is not None:
                return manifest
            remote = is_remote(self.source)
            wave = next_wave(wave or 1, looked_at=len(results), rows=rows, source=self.source, is_remote=remote)

    @property
    def first_wave(self) -> int:
        """Tasks that are run at once, at first, where the rest of them may be needless."""
        return 1 if is_remote(self.source) else FIRST_WAVE

    def is_enough(self, num_good: int) -> bool:
        """Whether so many rows are all that are wanted."""
        return self.source.max_samples is not None and num_good >= self.source.max_samples


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
        cuts = cuts_of(manifest.rows["group"].to_numpy(), step)
    files = SourceFiles.of(manifest.files)
    for group, start, stop in cuts:
        part = rows.slice(start, stop - start)
        numbers = np.unique(np.append(part["file"].to_numpy(), np.int32(group)))
        yield LocateTask(
            group=group,
            name=shown_name(files[group]),
            numbers=tuple(numbers.tolist()),
            files=files.take(numbers).written_paths(),
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
    durations = seconds_by_header(manifest, rows.set_column(place, ROW_SCHEMA.field(place), seconds), listing)
    refuse_uncovered(rows, durations, listing.source.duration_tolerance, functools.partial(recording, manifest))


def seconds_by_header(manifest: Manifest, rows: pa.Table, listing: RowListing) -> Array:
    """Returns how long the recordings of rows are, float64 [rows]; NaN for what cannot be found.

    rows: of the manifest; a `duration_s` of theirs that is not NaN stays.
    """
    tasks = list(locate_tasks(dataclasses.replace(manifest, rows=rows), listing))
    results = located_of(dataclasses.replace(listing, is_hashed=False), tasks, total=len(manifest.files))
    found = {row["row"]: row["duration_s"] for each in results for row in each.rows.to_pylist()}
    return np.array([found.get(row, np.nan) for row in rows["row"].to_pylist()])


def _recordings_end(manifest: Manifest, listing: RowListing, rows: pa.Table) -> Array:
    """Returns where the recordings of segments end, float64 [rows]: the header of each is read once."""
    _, first, inverse = np.unique(recordings_of(rows), return_index=True, return_inverse=True)
    place, ones = ROW_SCHEMA.get_field_index("duration_s"), rows.take(pa.array(first))
    ones = ones.set_column(place, ROW_SCHEMA.field(place), pa.array(np.full(len(ones), np.nan)))
    return seconds_by_header(manifest, ones, listing)[inverse]


def with_places(listed: Manifest, results: Sequence[Located], listing: RowListing, *, is_all: bool) -> Manifest:
    """The listed rows that were found and that filters leave now that durations are known."""
    source = listing.source
    # A file of which nothing is left gives a table without the columns that it would have found.
    tables = [result.rows for result in results if len(result.rows)] or [result.rows for result in results[:1]]
    found = concatenated(tables).combine_chunks() if tables else pa.table({"row": pa.array([], pa.int64())})
    failed = pa.concat_tables([listed.rejected, *(result.failed for result in results)])
    manifest = dataclasses.replace(
        listed,
        rows=found_rows(listed.rows, found),
        rejected=failed,
        absent=tuple(sorted({number for result in results for number in result.absent})),
        unused=merged([listed.unused, *(result.unused for result in results)]),
    )
    if listing.lister.lists_tars:
        manifest = unique_ids(manifest)
        if is_all:  # of some of the tars, more may be in the others
            name_absent_languages(manifest.rows, source)
            require_values(manifest.rows, manifest.unused, where=", ".join(source.manifests))
    manifest = apply_filters(with_ends(manifest) if source.has_segments else manifest, source)
    order = np.argsort(manifest.rejected["row"].to_numpy(), kind="stable")
    return dataclasses.replace(manifest, rejected=manifest.rejected.take(pa.array(order)))


def list_rows(
    source: SourceConfig,
    meaning: Meaning,
    *,
    cache_root: str | os.PathLike[str],
    map_: Map = map,
    is_hashed: bool = False,
) -> Manifest:
    """Returns the eligible rows, what their items are, every place and duration known, and what was left out.

    Of rows that are items themselves: ROW_SCHEMA, left out by duplicate ids, `source.exclude`, languages and durations.
    Of rows that list items: CONVERSATION_SCHEMA, with rows of one file that share an item brought together, the
    groups by first appearance; and ITEM_SCHEMAS, of these rows alone. They are left out in this order: `source.rows`,
    records of another form, ids that occur twice, `source.exclude`, items that cannot be used (a row fails with its
    first), `max_samples`; of a row that is out by an earlier one no item is read. Rows may be both.

    With `max_samples` or an end in `source.rows` only as much is read as it takes, and a bit more. Raises ManifestError
    where a manifest as a whole cannot be used, BuildError where an item kills the processes of `map_`, OSError or
    TarError where the machine fails.
    """
    listing = RowListing(
        source=source, meaning=meaning, cache_root=os.fspath(cache_root), map_=map_, is_hashed=is_hashed
    )
    with one_heap():
        manifest = _listed_alone(listing) if meaning.lists_all else _located(listing)
        manifest = dataclasses.replace(manifest, rows=rows_aside(manifest.rows, listing.cache_root))
    free_memory()
    return manifest


def _listed_alone(listing: RowListing) -> Manifest:
    """The rows of a meaning that lists all of its items, in waves of pieces."""
    source = listing.source
    manifests, media = listing.manifests, listing.media()
    require_folder(source)
    if is_remote(source):
        tell_if_too_large(manifests)
    selected = slice(None) if source.rows is None else row_slice(source.rows)

    def run(pieces: Sequence[FilePiece]) -> Sequence[RowPart]:
        found = listing.parts(pieces)
        for each in media:
            each.extend([(part.group, part.items[each.group]) for part in found])
        return found

    def judge(parts: Sequence[RowPart], is_all: bool) -> tuple[Manifest | None, int]:  # noqa: FBT001
        rows = listed_rows(parts)
        is_all = is_all or (selected.stop is not None and len(rows) >= selected.stop)
        if not is_all and source.max_samples is None:
            return None, 0
        candidates = _candidates(listing, selected_rows(rows, selected, source, is_all=is_all), parts, media)
        failed = failed_items(candidates.rows, media, source.max_samples)
        good = num_good(failed)
        if not is_all and not listing.is_enough(good):
            return None, good
        manifest = with_items(candidates, failed, media)
        require_values(manifest.rows, manifest.unused, where=", ".join(source.manifests))
        return _meant(listing, manifest, parts), good

    # Rows that are counted from the end are known when all are.
    is_counted = all(number is None or number >= 0 for number in (selected.start, selected.stop))
    may_end_early = is_counted and (source.max_samples is not None or selected.stop is not None)
    first = listing.first_wave if may_end_early else None
    return listing.in_waves(listing.pieces(), run, judge, first=first)


def list_row(
    source: SourceConfig, meaning: Meaning, sample_id: str, *, cache_root: str | os.PathLike[str]
) -> Manifest | None:
    """Returns the listing of one row of a meaning that lists all of its items, None where there is no such row.

    Items of no other row are looked at. Raises as `list_rows` does.
    """
    listing = RowListing(source=source, meaning=meaning, cache_root=os.fspath(cache_root))
    media, parts = listing.media(), listing.parts(list(listing.pieces()))
    for each in media:
        each.extend([(part.group, part.items[each.group]) for part in parts])
    listed = _candidates(listing, listed_rows(parts), parts, media)
    row = listed.rows.filter(pc.equal(listed.rows["sample_id"], sample_id))
    if not len(row):
        return None
    return with_items(dataclasses.replace(listed, rows=row), failed_items(row, media, None), media)


def _candidates(
    listing: RowListing, rows: pa.Table, parts: Sequence[RowPart], media: Sequence[ListedMedia]
) -> Manifest:
    """The rows that can be used and that filters leave, as far as their texts and names tell."""

    def places(rows: pa.Table) -> dict[str, Any]:
        if not listing.reader.lists_media:
            return {"file": rows["group"]}
        # Ids that clash are named after the items themselves.
        found = first_places(rows, parts, media[0].group, lambda paths, _: media[0].files.listed(paths))
        return {"file": found["file"]}

    manifest = candidate_rows(rows, listing.manifests, places, lists=listing.meaning.facts.lists)
    manifest = apply_filters(unique_ids(manifest), listing.source)
    rows = manifest.rows
    names = [name for name in (*CONVERSATION_SCHEMA.names, TEXT_AT) if name != "text" and name in rows.column_names]
    table = rows.select(names)
    return dataclasses.replace(
        manifest,
        rows=with_kept(table, {name: column_of(rows, name) for name in names_of(rows)}),
        absent=tuple(part.group for part in parts if part.absent),
        unused=merged(part.unused for part in parts),
    )


def _meant(listing: RowListing, manifest: Manifest, parts: Sequence[RowPart]) -> Manifest:
    """A listing whose rows are all known, with what its meaning makes of all of them."""
    lister, absent = listing.reader.recordings, manifest.absent
    is_of_tars = lister is not None and lister.lists_tars
    if is_of_tars and listing.is_enough(len(manifest.rows)):
        absent = (*absent, *unneeded(manifest, manifest.rows))
    rows, texts = manifest.rows, [part.texts.column() for part in parts]
    rows = rows.append_column("text", gathered(texts, rows[TEXT_AT].to_numpy(), listing.cache_root))
    kept = {name: column_of(rows, name) for name in names_of(rows)}
    schema = pa.schema([field for field in CONVERSATION_SCHEMA if field.name in rows.column_names])
    rows = pa.table([rows[field.name] for field in schema], schema=schema)
    rows = listing.meaning.finished(with_kept(rows, kept), [part.classes for part in parts if len(part.rows)])
    return dataclasses.replace(manifest, rows=rows, absent=absent)


@dataclass(frozen=True)
class NamedRows:
    """The rows that manifests name, whose own items are not located yet. classes: as files declare them, see `Sink`."""

    manifest: Manifest
    classes: Sequence[tuple[str, ...] | None] = ()
    media: Sequence[ListedMedia] = ()


def _named(listing: RowListing) -> NamedRows:
    """The rows of a meaning whose rows may be items themselves, and that the filters leave."""
    lister, source = listing.lister, listing.source
    if lister.list is not None:
        root = Path(listing.cache_root) if listing.cache_root else None
        named = NamedRows(lister.list(source, *([root] if lister.has_index else [])))
    else:
        named = _by_record(listing)
    listed = named.manifest
    rows = concatenated([listed.rows])
    listed = dataclasses.replace(listed, rows=rows)
    if source.has_segments:
        listed = segmented(listed)
    elif listing.meaning.own is not None:
        listed = dataclasses.replace(listed, rows=refuse_differing(rows, functools.partial(recording, listed)))
    manifest = unique_ids(listed)
    if source.window_s is not None and isinstance(listing.meaning, Recorded):
        rules, until_s = listing.meaning.windows or WindowRules(), functools.partial(_recordings_end, manifest, listing)
        manifest = unique_ids(windowed(manifest, source.window_s, rules, until_s=until_s))
    if not lister.lists_tars:
        name_absent_languages(manifest.rows, source)
    return dataclasses.replace(named, manifest=apply_filters(manifest, source))


def _by_record(listing: RowListing) -> NamedRows:
    media, own = listing.media(), listing.meaning.own
    files = media[0].files if media else NamedFiles(listing.manifests, listing.source)
    parts = listing.parts([*listing.pieces()])
    rows = listed_rows(parts)
    require_rows(len(rows), listing.manifests)

    def places(rows: pa.Table) -> dict[str, Any]:
        if own is None:
            return {"file": rows["group"], "duration_s": pa.array(np.zeros(len(rows)))}

        def numbers(paths: Any, group: int) -> Array:
            return files.numbers(paths, manifest=listing.manifests[group])

        found = first_places(rows, parts, own, numbers)
        return found | ({"group": found["file"]} if listing.lister.by_file else {})

    manifest = candidate_rows(rows, listing.manifests, places, lists=listing.meaning.facts.lists)
    unused = merged(part.unused for part in parts)
    require_values(manifest.rows, unused, where=", ".join(listing.source.manifests))
    classes = [part.classes for part in parts]
    listed = [[(part.group, part.items[each.group]) for part in parts] for each in media]
    parts.clear()  # all else of them is in the manifest
    files.stamp()
    manifest = dataclasses.replace(manifest, files=files.files, unused=unused)
    for each, items in zip(media, listed, strict=True):
        each.extend(items)
    return NamedRows(manifest, classes, media)


def read_manifest(source: SourceConfig, meaning: Meaning) -> Manifest:
    """Returns the rows that a manifest names and the filters leave, as far as it alone tells; no tar is opened.

    Tars that are listed without their rows have none yet; durations may be NaN, places UNLOCATED. No index is kept.
    Raises ManifestError where a manifest as a whole cannot be used: absent, empty, another form, columns or types.
    """
    return _named(RowListing(source=source, meaning=meaning, cache_root="")).manifest


def _located(listing: RowListing) -> Manifest:
    """The rows of a meaning whose rows may be items themselves: those are located in waves, a source file a task."""
    source, lister, named = listing.source, listing.lister, _named(listing)
    free_memory()
    rows = rows_aside(named.manifest.rows, listing.cache_root) if listing.cache_root else named.manifest.rows
    listed = dataclasses.replace(named.manifest, files=stamped(named.manifest.files), rows=rows)
    named = dataclasses.replace(named, manifest=listed)
    if is_remote(source):
        tell_if_too_large(listed.files)
    tasks = iter([*locate_tasks(listed, listing)])  # it drops them when they are done: they hold all paths

    def judge(results: Sequence[Located], is_all: bool) -> tuple[Manifest | None, int]:  # noqa: FBT001
        manifest = with_places(listed, results, listing, is_all=is_all)
        failed = failed_items(manifest.rows, named.media, source.max_samples) if named.media else {}
        good = num_good(failed) if failed else len(manifest.rows)
        if not is_all and not listing.is_enough(good):
            return None, good
        if not failed:
            return take_first(manifest, source.max_samples, is_all=is_all, is_of_tars=lister.lists_tars), good
        return with_items(manifest, failed, named.media), good

    # Where no more rows were listed than are wanted, every task is needed.
    all_at_once = source.max_samples is None or 0 < len(listed.rows) <= source.max_samples
    run = functools.partial(located_of, listing, total=len(listed.files))
    first = None if all_at_once else listing.first_wave
    manifest = listing.in_waves(tasks, run, judge, first=first, total=operator.length_hint(tasks))
    refuse_pieces(manifest, listing)
    rows = manifest.rows.select([name for name in manifest.rows.column_names if not name.startswith(SPAN)])
    manifest = dataclasses.replace(manifest, rows=listing.meaning.finished(rows, named.classes))
    if not len(manifest.rows) and not len(manifest.rejected):
        raise ManifestError(
            f"{', '.join(source.manifests)}: no audio in any of its files; correct source.manifest", code="FB204"
        )
    return manifest


def check_pieces(config: Config) -> None:
    """Raises ManifestError where the table of a config says of one of its first rows that it is of a piece."""
    listing = RowListing(source=config.source, meaning=meaning_of(config), cache_root=str(config.cache_root))
    listed = read_manifest(config.source, listing.meaning)
    is_one = np.cumsum(to_judge(listed.rows)) <= 256
    refuse_pieces(dataclasses.replace(listed, rows=listed.rows.filter(pa.array(is_one))), listing)


def tar_places(config: Config) -> pa.Table | None:
    """Returns `sample_id`, `tar_path` (absolute, or a URL) and `tar_member_name` of all eligible samples.

    None without tars.
    Raises ManifestError where the manifest cannot be used.
    """
    meaning, source = meaning_of(config), localized(config).source
    if not RowListing(source=source, meaning=meaning, cache_root="").lister.in_tars:
        return None
    listed = list_rows(source, meaning, cache_root=config.cache_root)
    paths = pa.array([shown(os.path.abspath(file.path)) for file in listed.files], pa.large_string())
    columns = {
        "sample_id": listed.rows["sample_id"],
        "tar_path": paths.take(listed.rows["file"].combine_chunks()),
        "tar_member_name": listed.rows["member"],
    }
    return pa.table(columns)
