"""The first stage of a conversation source: parts of its files as tasks, and the rows that all of these give.

What puts rows and images together is arithmetic over their numbers, and knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import PICTURES, Reads, SourceConfig
from forebay.errors import SampleError
from forebay.rows.eligible import apply_filters, unique_ids
from forebay.rows.kept_columns import (
    column_of,
    concatenated,
    names_of,
    parts_of_rows,
    values_in,
    with_kept,
)
from forebay.rows.manifest import (
    REJECTED_SCHEMA,
    WHOLE_FILE,
    Kind,
    Manifest,
    Unused,
    joined,
    rejections,
    row_table,
    storable,
    table_of,
)
from forebay.rows.meanings.conversation import text_error
from forebay.rows.meanings.reading import EXCLUDED, read_row
from forebay.rows.named_files import path_stem, shown_name, usable_name
from forebay.rows.readers.json_lines import JsonError
from forebay.store.layout import Array
from forebay.store.remote.raw.origin import Place as StorePlace
from forebay.store.remote.raw.sources import is_elsewhere, place_of
from forebay.store.source_files import SourceFile

_ROWS_PER_BATCH = 4096

PART_ROWS = pa.schema(
    [
        pa.field("sample_id", pa.large_string()),
        pa.field("explicit_id", pa.bool_(), nullable=False),
        pa.field("text", pa.large_string()),
        pa.field("images", pa.list_(pa.int32()), nullable=False),
        pa.field("kind", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("message", pa.large_string()),
    ]
)
"""One entry a row of the manifest, in order: `sample_id` null where it is `<file>/<row>`; `images` point into the
part's images; `kind`, `reason` and `message` of a row that cannot be used, else null."""

PART_IMAGES = pa.schema(
    [
        pa.field("path", pa.large_string()),
        pa.field("member", pa.large_string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("run", pa.int64(), nullable=False),
    ]
)
"""Places of images: `path`, as written, of a file of its own, else null and a place in the part's file."""


class Place(NamedTuple):
    """Where an image lies. run: of places that are read by one task: a row group, a stretch of a tar."""

    path: str | None = None
    member: str = ""
    offset: int = 0
    size: int = WHOLE_FILE
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """Part of one file. group: its number. name: in messages. start, stop: bytes of a jsonl, row groups of a data file.

    first: number of the first line of a jsonl, from 1; of the first row of a data file, from 0. reads: what rows are
    read as.
    """

    source: SourceConfig
    group: int
    name: str
    path: str
    cache_root: str
    start: int = 0
    stop: int = 0
    first: int = 0
    reads: Reads = "conversations"

    def rows(self) -> PartRows:
        """Returns what gathers the rows of the part."""
        home = place_of(Path(self.source.audio_dir or self.path))
        return PartRows(keep=self.source.keep_columns, reads=self.reads, home=home)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a task found: PART_ROWS and PART_IMAGES.

    absent: the file cannot be opened. unused: rows by the name of a field that nothing takes. classes: the names of all
    classes, in their order, where the file itself says them.
    """

    group: int
    rows: pa.Table
    images: pa.Table
    absent: bool = False
    unused: Mapping[str, int] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionKind:
    """How sources of one kind are read. parts: (source, manifests, cache root) -> tasks. read: what a task gives.

    holds_images: rows of a data file hold images; the manifests of other kinds only name them. lists_images: the
    manifests are the images themselves.
    """

    parts: Callable[[SourceConfig, Sequence[SourceFile], str], Iterator[PartTask]]
    read: Callable[[PartTask], Part]
    holds_images: bool = False
    lists_images: bool = False


def part_tasks(
    source: SourceConfig,
    files: Iterable[tuple[int, SourceFile]],
    cache_root: str,
    runs: Callable[[Path], Iterable[tuple[int, int, int]]] = lambda _: [(0, 0, 0)],
) -> Iterator[PartTask]:
    """Yields the parts of some numbered files. runs: `start`, `stop` and `first` of each part of one; a whole file."""
    for group, file in files:
        for start, stop, first in runs(file.path):
            yield PartTask(
                source=source,
                group=group,
                name=shown_name(file),
                path=str(file.path),
                cache_root=cache_root,
                start=start,
                stop=stop,
                first=first,
            )


@dataclass(slots=True)
class PartRows:
    """The rows of a part, gathered one by one; Python objects are held of at most 4096 rows, and of different places.

    keep: fields of rows that are kept. unused: fields that no row's conversation takes; the caller adds those that it
    knows of a whole file. reads: what the rows are read as. home: the place in a store of what names their files.
    """

    keep: tuple[str, ...] = ()
    reads: Reads = "conversations"
    home: StorePlace | None = None
    unused: Unused = field(default_factory=Unused)
    _tables: list[pa.Table] = field(default_factory=list)
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _kept: list[tuple[Any, ...]] = field(default_factory=list)
    _places: dict[Place, int] = field(default_factory=dict)

    def add(
        self,
        fields: dict[str, Any],
        images: Iterable[Place],
        *,
        sample_id: str | None,
        explicit: bool,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds a row. kept: the values that are kept, where they are not among the fields.

        Raises TextError as `read_row`, SampleError `missing_file` for an impossible name.
        """
        unknown: set[str] = set()
        try:
            text, used = read_row(self.reads, fields, list(images), unknown=unknown)
        finally:  # of a row that lacks its class too: it may have one under another name
            if unknown.difference(self.keep):
                self.unused.add(unknown.difference(self.keep))
        try:
            values = values_in(fields if kept is None else kept, self.keep)
        except JsonError as err:
            raise text_error(err) from err
        places = [file_place(image) if isinstance(image, str) else image for image in used]
        for place in places:
            if place.path is not None and is_elsewhere(place.path, self.home):
                raise SampleError(
                    "missing_file",
                    f"its image is {place.path[:200]!r}, and no image is fetched from elsewhere; put it "
                    "beside the manifest, under a name",
                )
        numbers = [self._places.setdefault(place, len(self._places)) for place in places]
        self._append((sample_id, explicit, text, numbers, None, None, None), values)

    def reject(self, sample_id: str | None, reason: str, message: str, *, kind: Kind = "failed") -> None:
        """Adds a row that cannot be used."""
        kind = "excluded" if reason in EXCLUDED else kind
        if reason == "bad_conversation" and self.reads != "conversations":
            reason = "bad_row"
        self._append((sample_id, False, None, [], kind, reason, storable(message)), (None,) * len(self.keep))

    def part(self, group: int, *, absent: bool = False, classes: tuple[str, ...] | None = None) -> Part:
        """Returns what was gathered."""
        self._flush()
        rows, images = concatenated(self._tables, is_last=False), table_of([*self._places], PART_IMAGES)
        return Part(group=group, rows=rows, images=images, absent=absent, unused=self.unused.counts, classes=classes)

    def _append(self, row: tuple[Any, ...], kept: tuple[Any, ...]) -> None:
        self._rows.append(row)
        self._kept.append(kept)
        if len(self._rows) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        self._tables.append(with_kept(table_of(self._rows, PART_ROWS), parts_of_rows(self._kept, self.keep)))
        self._rows.clear()
        self._kept.clear()


def file_place(written: str) -> Place:
    """Returns the place of an image that is a file. Raises SampleError `missing_file` for an impossible name."""
    problem = usable_name(written)
    if problem:
        raise SampleError("missing_file", f"the name of an image {problem}")
    return Place(path=written)


_KINDS: tuple[Kind, ...] = ("excluded", "failed")


def listed_rows(parts: Sequence[Part]) -> pa.Table:
    """Returns all rows: PART_ROWS with `row`, `group` and `offset` (the place in its file); images as references."""
    group = np.repeat([part.group for part in parts], [len(part.rows) for part in parts]).astype(np.int32)
    bases = np.cumsum([0, *(len(part.images) for part in parts)])
    tables = [_with_base(part.rows, base) for part, base in zip(parts, bases[:-1].tolist(), strict=True)]
    row = np.arange(len(group), dtype=np.int64)
    starts = np.searchsorted(group, group)
    columns = {"row": pa.array(row), "group": pa.array(group), "offset": pa.array(row - starts)}
    if not tables:
        return pa.table(columns)
    table = concatenated(tables)
    return pa.table(columns | {name: table[name] for name in table.column_names})


def flattened(lists: Any) -> tuple[Array, Array]:
    """Returns offsets int64 [rows + 1] and values of a column of lists, whatever it was sliced from."""
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.concatenate(([0], np.cumsum(lengths))), pc.list_flatten(lists).to_numpy(zero_copy_only=False)


def candidate_rows(
    rows: pa.Table, manifests: Sequence[SourceFile], source: SourceConfig, *, lists_images: bool = False
) -> Manifest:
    """Returns the rows that are conversations, with the columns that ids and filters look at, and `images`.

    lists_images: a row is an image of the manifests, see `VisionKind`; ids that clash are then named after its file.
    """
    stems = pa.array([path_stem(shown_name(file).rpartition("/")[2]) for file in manifests], pa.large_string())
    derived = joined(stems.take(rows["group"].combine_chunks()), "/", rows["offset"])
    rows = rows.set_column(
        rows.schema.get_field_index("sample_id"), "sample_id", pc.coalesce(rows["sample_id"], derived)
    )
    unusable = rows.filter(rows["reason"].is_valid())
    if len(unusable):
        rows = rows.filter(rows["reason"].is_null())
    rejected = [
        rejections(part["row"], part["sample_id"], kind=kind, reason=part["reason"], message=part["message"])
        for kind in _KINDS
        if len(part := unusable.filter(pc.equal(unusable["kind"], kind)))
    ]
    names = ("row", "sample_id", "explicit_id", "group", "offset", "text")
    file = pa.array(_listed_images(rows, manifests), pa.int32()) if lists_images else rows["group"]
    columns = {**{name: rows[name] for name in names}, "file": file}
    kept = {name: column_of(rows, name) for name in names_of(rows)}
    table = row_table(columns, num_rows=len(rows), kept=kept)
    manifest = Manifest(
        files=tuple(manifests),
        rows=table.append_column("images", rows["images"]),
        rejected=pa.concat_tables([REJECTED_SCHEMA.empty_table(), *rejected]),
    )
    return apply_filters(unique_ids(manifest), source)


def _listed_images(rows: pa.Table, manifests: Sequence[SourceFile]) -> Array:
    """Returns the number of the file of each row: rows of a group are the images of one entry, in their order."""
    group, offset = rows["group"].to_numpy(), rows["offset"].to_numpy()
    found = np.zeros(len(rows), np.int64)
    for first in np.unique(group).tolist():
        entry = manifests[first].entry
        numbers = [number for number, file in enumerate(manifests) if file.entry == entry and is_picture(file)]
        found[group == first] = np.asarray(numbers)[offset[group == first]]
    return found


def is_picture(file: SourceFile) -> bool:
    """Whether a file is an image by its name."""
    return file.path.name.lower().endswith(PICTURES)


def _with_base(rows: pa.Table, base: int) -> pa.Table:
    lists = rows["images"].combine_chunks()
    offsets, values = flattened(lists)
    shifted = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values + np.int64(base), pa.int32()))
    return rows.set_column(rows.schema.get_field_index("images"), "images", shifted)


def share_groups(files: Array, offsets: Array, images: Array) -> Array:
    """Returns int64 [rows]: rows of one file that share an image, also by way of others, have one number.

    Numbers are those of the first row of a group. A row without images is a group of its own. Rows of other files join
    nothing: what a file's rows are must not depend on the files beside it.

    files: int [rows], rising. offsets, images: the images of row i are `images[offsets[i] : offsets[i + 1]]`.
    """
    rows = np.repeat(np.arange(len(files), dtype=np.int64), np.diff(offsets))
    groups = np.arange(len(files), dtype=np.int64)
    if not len(images):
        return groups
    keys = files[rows].astype(np.int64) * (int(images.max()) + 1) + images
    _, nodes = np.unique(keys, return_inverse=True)
    first = np.full(nodes.max() + 1, len(files), np.int64)
    np.minimum.at(first, nodes, rows)
    same_row = np.flatnonzero(rows[1:] == rows[:-1])
    labels = _components(len(first), nodes[same_row], nodes[same_row + 1])
    lowest = np.full(len(first), len(files), np.int64)
    np.minimum.at(lowest, labels, first)
    groups[rows] = lowest[labels[nodes]]
    return groups


def first_uses(values: Array) -> tuple[Array, Array]:
    """Returns (the different values in order of first appearance, for every value its place among them), int64."""
    unique, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    places = np.empty(len(unique), np.int64)
    places[order] = np.arange(len(unique))
    return unique[order], places[inverse.reshape(-1)]


def _components(count: int, left: Array, right: Array) -> Array:
    """The lowest node that each of `count` nodes is connected with, by edges (left, right).

    Every round hooks each component's root under its lowest neighbour and shortens all paths; as a component is joined
    to another in any two rounds, there are at most 2 log2(count).
    """
    labels = np.arange(count, dtype=np.int64)
    while True:
        low = np.minimum(labels[left], labels[right])
        hooked = labels.copy()
        np.minimum.at(hooked, labels[left], low)
        np.minimum.at(hooked, labels[right], low)
        while np.any((jumped := hooked[hooked]) != hooked):
            hooked = jumped
        if np.array_equal(hooked, labels):
            return labels
        labels = hooked
