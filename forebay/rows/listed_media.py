"""The second stage of a listing of listed items: what they are, by content and header, each place looked at once.

Rows of one file that share an item, an image or a clip, are brought together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from forebay.config.data import SourceConfig
from forebay.errors import BuildError, SampleError
from forebay.rows.audio_facts import NamedMembers, told_info
from forebay.rows.equal_values import first_uses, share_groups
from forebay.rows.listed_frames import Frames
from forebay.rows.manifest import (
    INLINE,
    ITEM_FACTS,
    ITEM_SCHEMAS,
    LISTS,
    NOUNS,
    SHARED,
    UNLOCATED,
    WHOLE_FILE,
    Manifest,
    flattened,
    schema_of,
    storable,
    table_of,
)
from forebay.rows.media_reader import MediaReader, is_gone
from forebay.rows.named_files import NamedFiles, shown_name
from forebay.rows.reader import Failures, RowReader
from forebay.rows.readers.arrow_files import damaged, place_row
from forebay.rows.segments import SEGMENT_COLUMNS, Bounds, recordings_of, segment_columns, segment_of
from forebay.rows.source_table import SourceFiles
from forebay.steps.audio.film_sound import film_info, is_film
from forebay.steps.image.still_settings import Still
from forebay.steps.image.video_frames import video_facts
from forebay.store.image.formats import MoreImages, image_size
from forebay.store.layout import Array, Group
from forebay.store.remote.raw.arriving import is_remote, run_on_sources
from forebay.store.remote.raw.raw_sources import look_up, shown
from forebay.store.sound_containers import AudioInfo
from forebay.store.source_files import SourceFile
from forebay.task_map import Map, WorkerDied, mark

ITEMS_PER_TASK = 512
_PLACE = ("file", "member", "offset", "size")
_ASKED = frozenset(("video", "still"))
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LookTask:
    """Items of some files. places: `file` (into `files`), `member`, `offset`, `size`, as `MediaReader` takes them.

    Where `start_s` is valid too, an item is a recording of which stretches alone are wanted, of any size.
    """

    group: Group
    files: Sequence[SourceFile]
    places: pa.Table
    column: str
    cache_root: str
    max_bytes: int
    max_pixels: int
    max_video_s: float
    more_images: tuple[MoreImages, ...] = ()
    has_films: bool = False

    def name(self, position: int) -> str:
        """Returns what to call one of the items."""
        file, member, offset, size = (self.places[column][position].as_py() for column in _PLACE)
        return item_name(self.files[file], member, offset=offset, size=size)


def item_name(file: SourceFile, member: str, *, offset: int, size: int, segment: Bounds | None = None) -> str:
    """Returns what to call an item: the file, the member or the row inside it, and which stretch of that it is."""
    name = shown_name(file)
    if offset >= INLINE:
        name = f"{name}, {member} (the data stands in the line)"
    elif member:
        name = f"{name}:{member}"
    elif file.listed and size == WHOLE_FILE:
        name = f"{name}, row {place_row(offset) + 1}"
    return name if segment is None else f"{name}, {segment}"


def look_at(task: LookTask) -> pa.Table:
    """Returns hash and ITEM_FACTS of a task's items, or reason and message of those that cannot be used.

    One item is held at a time, within `max_bytes`. Raises OSError where the machine fails, TarError where a tar is not
    as its index says, ManifestError where a data file is damaged.
    """
    facts: list[tuple[Any, ...]] = []
    tars = NamedMembers(task.cache_root)
    look_up(_paths(task))
    with MediaReader(task.files, max_open=4, max_bytes=task.max_bytes, column=task.column) as read:
        places = task.places.to_pylist()
        for position, place in enumerate(places):
            file, member, offset, size = (place[name] for name in _PLACE)
            mark(position)
            name = task.name(position)
            try:
                if task.files[file].stat is None and size == 0:  # of a folder: a link to what is gone
                    raise SampleError("missing_file", "it links to what is not there; bring that, or remove the link")
                if size == UNLOCATED:
                    source = task.files[file]
                    offset, size = tars.located(str(source.path), member, name=shown_name(source))
                with _named_errors(task, file):
                    if place.get("start_s") is not None:
                        digest, told = _of_recording(read, task, (file, offset, size), name)
                    else:
                        data = read(file, offset, size)
                        digest, told = xxhash.xxh3_128_hexdigest(data), _LOOKS[task.group](data, task, place, name)
                if (asked := place.get("video") or place.get("still")) is not None:  # it is another item then
                    digest = xxhash.xxh3_128_hexdigest(repr((digest, asked)).encode())
                facts.append((offset, size, digest, *told, None, None))
            except SampleError as err:
                noun = NOUNS[task.group] if place.get("video") is None else "video"
                unknown = (0,) * len(ITEM_FACTS[task.group].split())
                facts.append((offset, size, "", *unknown, err.reason, storable(f"{noun} {name}: {err}")))
    return table_of(facts, _facts_of(task.group))


def _size_of(data: bytes, task: LookTask, place: Mapping[str, Any], name: str) -> tuple[int, int, int, float]:
    if place["video"] is None:
        frame = Still.read(place["still"]).frame
        size = image_size(data, max_pixels=task.max_pixels, sample_id=name, more=task.more_images, frame=frame)
        return *size, 0, 0.0
    found = video_facts(data, max_video_s=task.max_video_s, max_pixels=task.max_pixels, sample_id=name)
    return found.width, found.height, found.num_frames, found.fps


def _sound_of(data: bytes, task: LookTask, place: Mapping[str, Any], name: str) -> tuple[int, int]:  # noqa: ARG001
    info = _info(lambda start, count: data[start : start + count], len(data), task, name)
    return info.num_samples, info.sample_rate_hz


def _info(read: Callable[[int, int], bytes], size: int, task: LookTask, name: str) -> AudioInfo:
    if task.has_films and is_film(read(0, 16)):
        return film_info(read(0, min(size, task.max_bytes + 1)), max_s=task.max_video_s, name=name)
    return told_info(read, size)


def _of_recording(reader: MediaReader, task: LookTask, place: tuple[int, int, int], name: str) -> tuple[str, Any]:
    """Returns the hash of a recording and what its header says; a block is held at a time, of a film all of it."""
    state = xxhash.xxh3_128()
    with reader.parts(*place) as (read, count):
        for start in range(0, count, _BLOCK_BYTES):
            state.update(read(start, _BLOCK_BYTES))
        info = _info(read, count, task, name)
    return state.hexdigest(), (info.num_samples, info.sample_rate_hz)


_LOOKS: Mapping[Group, Callable[[bytes, LookTask, Mapping[str, Any], str], tuple[Any, ...]]] = {
    "audio": _sound_of,
    "image": _size_of,
}
"""The numbers of ITEM_FACTS that the header of an item says."""


def _facts_of(group: Group) -> pa.Schema:
    return schema_of(f"offset:int64 size:int64 hash:string {ITEM_FACTS[group]} reason:string? message:large_string?")


def _paths(task: LookTask) -> list[Path]:
    return [file.path for file in task.files]


@contextmanager
def _named_errors(task: LookTask, file: int) -> Iterator[None]:
    path = shown(str(task.files[file].path))
    try:
        yield
    except pa.ArrowException as err:
        raise damaged(path, err) from err
    except OSError as err:
        if err.errno is None:
            raise damaged(path, err) from err
        if not is_gone(err):
            raise
        raise SampleError("missing_file", f"cannot read {path}: {err.strerror}; correct the manifest") from err


@dataclass(slots=True)
class ListedMedia:
    """Items of a group by reference: entry i of the parts' tables of items, put together, is reference i.

    files: grows by what is looked at. file: int32 by reference, -1 before. fact: int64 by reference, into `facts()`.
    """

    source: SourceConfig
    files: NamedFiles
    map_: Map
    reader: RowReader
    cache_root: str
    group: Group
    has_films: bool = False
    """Whether clips may be films, whose sound they are."""
    file: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    fact: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    _group: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    _places: list[pa.Table] = field(default_factory=list)
    _facts: list[pa.Table] = field(init=False)
    _fact_of_file: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    _has_frames: bool = False

    def __post_init__(self) -> None:
        self._facts = [_facts_of(self.group).empty_table()]

    def extend(self, parts: Sequence[tuple[int, pa.Table]]) -> None:
        """Adds the references of more parts; nothing is looked at. parts: source file, and PART_ITEMS."""
        counts = [len(places) for _, places in parts]
        for (_, places), base in zip(parts, np.cumsum([len(self.file), *counts]).tolist(), strict=False):
            self._places.append(Frames.shifted(places, base))
            self._has_frames |= bool(len(Frames.of(places).references))
        groups = np.array([number for number, _ in parts], np.int32)
        self._group = np.append(self._group, np.repeat(groups, counts))
        self.file = np.append(self.file, np.full(sum(counts), -1, np.int32))
        self.fact = np.append(self.fact, np.full(sum(counts), -1, np.int64))

    def look(self, references: Array) -> None:
        """Makes `file` and `fact` of some references known; files of their own are numbered in the order given.

        Those of a video's frames, where these are images of their own, become known with it.
        """
        if len(frames := self._frames(references).references):
            references = np.concatenate([references, np.setdiff1d(frames, references)])
        new = references[self.fact[references] < 0]
        if not len(new):
            return
        places = self.places().take(pa.array(new))
        is_file = places["path"].is_valid().to_numpy()
        self.file[new] = np.where(is_file, -1, self._group[new])
        for group in np.unique(self._group[new[is_file]]).tolist():
            chosen = np.flatnonzero(is_file & (self._group[new] == group))
            written = places["path"].take(pa.array(chosen)).combine_chunks().dictionary_encode()
            manifest = self.files.files[group]
            names = written.dictionary
            is_manifest = self.reader.lists_media
            numbers = self.files.listed(names) if is_manifest else self.files.numbers(names, manifest=manifest)
            self.file[new[chosen]] = numbers[written.indices.to_numpy()]
        self.files.stamp()
        missing = np.full(len(self.files.files) - len(self._fact_of_file), -1, np.int64)
        self._fact_of_file = np.append(self._fact_of_file, missing)
        is_part = places["start_s"].is_valid().to_numpy() if segment_columns(places) else np.zeros(len(new), bool)
        is_asked = np.zeros_like(is_part)
        for name in _ASKED & {*places.column_names}:
            is_asked |= places[name].is_valid().to_numpy()
        is_frames = self._frames(new).is_any
        is_whole = is_file & ~is_part & ~is_asked & (places["member"].to_numpy() == "")
        own, parts = new[is_whole], new[is_part]
        _, first = np.unique(self.file[own], return_index=True)
        once = own[first[self._fact_of_file[self.file[own[first]]] < 0]]
        keys = places.filter(pa.array(is_part)).append_column("file", pa.array(self.file[parts]))
        _, first, recording = np.unique(recordings_of(keys), return_index=True, return_inverse=True)
        todo = np.concatenate([new[~is_whole & ~is_part & ~is_frames], parts[first], once])
        todo = todo[np.argsort(self.file[todo], kind="stable")]
        self.fact[todo] = self._looked_at(todo)
        self._fact_of_file[self.file[once]] = self.fact[once]
        self.fact[own] = self._fact_of_file[self.file[own]]
        if len(parts):
            self.fact[parts] = self._cut(places.filter(pa.array(is_part)), self.fact[parts[first]][recording])
        if is_frames.any():
            self._shown(new[is_frames])

    def _frames(self, references: Array) -> Frames:
        """The frames of some references, which are references as well."""
        return Frames.of(self.places().take(pa.array(references))) if self._has_frames else Frames.none(len(references))

    def _shown(self, videos: Array) -> None:
        """Makes the facts of videos known whose frames are; the file of one that cannot be used is that of its frame.

        videos: references.
        """
        frames = self._frames(videos)
        start, facts = len(self.facts()), self.facts().take(pa.array(self.fact[frames.references]))
        made, bad = frames.facts(facts)
        self._facts.append(table_of(made, facts.schema))
        self.fact[videos] = np.arange(start, start + len(videos))
        self.file[videos[bad >= 0]] = self.file[frames.references[bad[bad >= 0]]]

    def _cut(self, stretches: pa.Table, recordings: Array) -> Array:
        """Where in `facts()` those of stretches are: those of their recordings, with hashes of their own.

        Stretches of the same samples are one, however their bounds are written.
        stretches: their PART_ITEMS. recordings: where those of their recordings are.
        """
        start = len(self.facts())
        facts = self.facts().take(pa.array(recordings))
        told = zip(facts["hash"].to_pylist(), facts["sample_rate_hz"].to_pylist(), strict=True)
        cut = (segment_of(row) for row in stretches.select([*SEGMENT_COLUMNS]).to_pylist())
        hashes = [
            xxhash.xxh3_128_hexdigest(repr((found, segment.frames(rate_hz), segment.channel)).encode()) if found else ""
            for (found, rate_hz), segment in zip(told, cut, strict=True)
            if segment is not None
        ]
        place = facts.schema.get_field_index("hash")
        self._facts.append(facts.set_column(place, facts.schema.field(place), pa.array(hashes)))
        return np.arange(start, start + len(recordings))

    def failed(self, rows: pa.Table) -> Array:
        """Returns the first item of each row that cannot be used, as a reference, else -1."""
        offsets, references = flattened(rows[LISTS[self.group]])
        try:
            self.look(first_uses(references)[0])
        except WorkerDied as err:
            raise BuildError(self._death(err, rows), code="FB302") from err
        is_bad = self.facts()["reason"].is_valid().to_numpy()[self.fact[references]]
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[is_bad]
        failed = np.full(len(offsets) - 1, -1, np.int64)
        failed[owner[::-1]] = references[is_bad][::-1]
        return failed

    def _death(self, err: WorkerDied, rows: pa.Table) -> str:
        offsets, references = flattened(rows[LISTS[self.group]])
        used = np.flatnonzero(np.isin(references, self.references_to(err.task, err.position)))
        owners = pa.array(np.unique(np.searchsorted(offsets, used, side="right") - 1))
        excluded = ", ".join(f'"{sample}"' for sample in rows["sample_id"].take(owners).to_pylist())
        return (
            f"{err} at the header of {NOUNS[self.group]} {err.task.name(err.position)!r}. If that is to blame, leave "
            f"out what it is of: [source] exclude = [{excluded}]; then run: forebay preprocess CONFIG"
        )

    def _looked_at(self, references: Array) -> Array:
        """Where in `facts()` those of some references are, after running the tasks."""
        start = len(self.facts())
        tasks = list(self._tasks(references))
        total = len({file.path for task in tasks for file in task.files})
        self._facts += run_on_sources(self.map_, look_at, tasks, _paths, is_remote=is_remote(self.source), total=total)
        return np.arange(start, start + len(references))

    def places(self) -> pa.Table:
        """Returns PART_ITEMS of all references."""
        return pa.concat_tables(self._places)

    def facts(self) -> pa.Table:
        """Returns hash, ITEM_FACTS, reason and message of everything that was looked at."""
        return pa.concat_tables(self._facts)

    def references_to(self, task: LookTask, position: int) -> Array:
        """Returns every reference to one of the items of a task that was given to the tasks' map."""
        file, member, offset = (task.places[name][position].as_py() for name in _PLACE[:3])
        path = str(task.files[file].path)
        numbers = [number for number, known in enumerate(self.files.files.paths) if known == path]
        places = self.places()
        is_it = (places["member"].to_numpy() == member) & (places["offset"].to_numpy() == offset)
        found = np.flatnonzero(is_it & np.isin(self.file, numbers))
        return np.union1d(found, Frames.of(places).shown_in(found))

    def contents(self, references: Array) -> Array:
        """Returns int64 by reference, equal for items of equal bytes."""
        codes = self.facts()["hash"].combine_chunks().dictionary_encode().indices.to_numpy()
        return np.asarray(codes[self.fact[references]], np.int64)

    def used_files(self, references: Array) -> Array:
        """Returns the numbers of the files that hold some references, and the frames of videos among them."""
        return np.unique(self.file[np.concatenate([references, self._frames(references).references])])

    def absent(self) -> Array:
        """Returns the numbers of the files that are missing, or that hold a missing item."""
        known = np.flatnonzero(self.fact >= 0)
        is_missing = pc.fill_null(pc.equal(self.facts()["reason"], "missing_file"), fill_value=False).to_numpy()
        return np.unique(self.file[known[is_missing[self.fact[known]]]])

    def table(self, references: Array) -> pa.Table:
        """Returns ITEM_SCHEMAS of some references that were looked at."""
        places = self.places().take(pa.array(references))
        facts = self.facts().take(pa.array(self.fact[references]))
        own = pa.table({"file": pa.array(self.file[references])})
        if "frames" in places.column_names:
            frames = Frames.of(places)
            found = self.facts().take(pa.array(self.fact[frames.references]))
            own = own.append_column("frames", frames.flat(self.file[frames.references], found))
        schema = ITEM_SCHEMAS[self.group]
        tables = [next(each for each in (own, facts, places) if name in each.column_names) for name in schema.names]
        return pa.table([table[name] for name, table in zip(schema.names, tables, strict=True)], schema=schema)

    def _tasks(self, todo: Array) -> Iterator[LookTask]:
        """Tasks of about 512 items; places of one run are in one task."""
        places = self.places().take(pa.array(todo))
        runs = np.stack([self.file[todo], places["run"].to_numpy()])
        borders = np.append(np.flatnonzero(np.any(np.diff(runs, axis=1) != 0, axis=0)) + 1, len(todo))
        start = 0
        while start < len(todo):
            stop = int(borders[np.searchsorted(borders, min(start + ITEMS_PER_TASK, len(todo)))])
            used, inverse = np.unique(self.file[todo[start:stop]], return_inverse=True)
            files = self.files.files.take(used)
            table = places.slice(start, stop - start).take(pa.array(np.arange(stop - start)))
            table = table.select([*_PLACE[1:], *segment_columns(table)[:1], *sorted(_ASKED & {*table.column_names})])
            table = table.add_column(0, "file", pa.array(inverse.astype(np.int32)))
            yield LookTask(
                group=self.group,
                # Only data files hold items by row: a manifest that is named as an item is a file like others.
                files=replace(files, is_listed=files.is_listed & self.reader.holds_media),
                places=table,
                column=getattr(self.source.columns, self.group),
                cache_root=self.cache_root,
                max_bytes=self.source.max_sample_bytes,
                max_pixels=self.source.max_pixels,
                max_video_s=self.source.max_video_s,
                more_images=self.source.more_images,
                has_films=self.has_films,
            )
            start = stop


def failed_items(rows: pa.Table, media: Sequence[ListedMedia], max_samples: int | None) -> dict[Group, Array]:
    """Returns by group what `ListedMedia.failed` says. Rows behind the one that fills `max_samples` are looked at not.

    A row that has failed by one group is looked at for the others too: a run of it more costs as much.
    """
    count = len(rows) if max_samples is None else max_samples
    while True:
        part = rows.slice(0, count)
        found = {each.group: each.failed(part) for each in media}
        good = np.flatnonzero(np.all([failed < 0 for failed in found.values()], axis=0))
        if max_samples is not None and len(good) >= max_samples:
            return {group: failed[: good[max_samples - 1] + 1] for group, failed in found.items()}
        if count >= len(rows):
            return found
        count *= 2


def num_good(failed: Mapping[Group, Array]) -> int:
    """Returns how many rows have no item that cannot be used."""
    return int(np.count_nonzero(np.all([found < 0 for found in failed.values()], axis=0)))


def with_items(manifest: Manifest, failed: Mapping[Group, Array], media: Sequence[ListedMedia]) -> Manifest:
    """Returns the listing of the rows that were looked at, with their items. failed: of `failed_items`."""
    first = media[0]
    num_files, there = len(manifest.files), np.flatnonzero(SourceFiles.of(manifest.files).has_stat)
    rows, rejected = manifest.rows.slice(0, len(failed[first.group])), manifest.rejected
    if num_good(failed) == first.source.max_samples:  # `max_samples` left out what follows
        rejected = rejected.filter(pc.less(rejected["row"], rows["row"][-1]))
    failures, absent, is_good = Failures(), {*manifest.absent}, np.ones(len(rows), bool)
    for each in media:
        found = failed[each.group]
        bad = np.flatnonzero(is_good & (found >= 0))
        is_good[bad] = False
        facts, gone = each.facts().take(pa.array(each.fact[found[bad]])), rows.take(pa.array(bad))
        columns = (gone["row"], gone["sample_id"], facts["reason"], facts["message"])
        for values in zip(*(column.to_pylist() for column in columns), strict=True):
            failures.add(*values)
        used = each.used_files(flattened(rows[LISTS[each.group]])[1])
        absent |= {*used[np.isin(used, each.absent()) & ~np.isin(used, there)].tolist()}
        num_files = max(num_files, int(used.max(initial=0)) + 1)
    rejected = pa.concat_tables([rejected, failures.table()])
    rows, tables = _brought_together(rows if is_good.all() else rows.filter(pa.array(is_good)), media)
    return dataclasses.replace(
        manifest,
        files=first.files.files[:num_files],
        rows=rows,
        rejected=rejected.take(pa.array(np.argsort(rejected["row"].to_numpy(), kind="stable"))),
        absent=tuple(sorted(absent)),
        items=tables,
    )


def _brought_together(rows: pa.Table, media: Sequence[ListedMedia]) -> tuple[pa.Table, dict[Group, pa.Table]]:
    """The rows, and ITEM_SCHEMAS, where all items can be used."""
    groups = share_groups(rows["group"].to_numpy(), *_contents(rows, media))
    order = np.argsort(groups, kind="stable")
    if np.any(order[1:] < order[:-1]):  # a copy of all texts
        rows = rows.take(pa.array(order))
    tables = {}
    for each in media:
        column = LISTS[each.group]
        offsets, references = flattened(rows[column])
        different, numbers = first_uses(each.contents(references))
        first = np.empty(len(different), np.int64)
        first[numbers[::-1]] = references[::-1]
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(numbers, pa.int32()))
        rows = rows.set_column(rows.schema.get_field_index(column), pa.field(column, lists.type, nullable=False), lists)
        tables[each.group] = each.table(first)
    shared = pa.field(SHARED, pa.int64(), nullable=False)
    place = rows.schema.get_field_index(LISTS[media[-1].group]) + 1
    return rows.add_column(place, shared, pa.array(first_uses(groups[order])[1])), tables


def _contents(rows: pa.Table, media: Sequence[ListedMedia]) -> tuple[Array, Array]:
    """Returns offsets and contents of the items of all groups of each row, equal where the bytes are."""
    owners, contents, base = [], [], 0
    for each in media:
        offsets, references = flattened(rows[LISTS[each.group]])
        found = each.contents(references)
        owners.append(np.repeat(np.arange(len(rows)), np.diff(offsets)))
        contents.append(found + base)
        base += int(found.max(initial=-1)) + 1
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(rows)))))
    return offsets, np.concatenate(contents)[order]
