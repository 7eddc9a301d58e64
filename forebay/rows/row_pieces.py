"""The first stage of a listing: the rows of pieces of files, a task each, and all of these as one table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ManifestError, SampleError
from forebay.rows.columns_aside import TextsAside
from forebay.rows.kept_columns import column_of, concatenated, names_of, parts_of_rows, values_in, with_kept
from forebay.rows.manifest import (
    ITEM_BOUNDS,
    LISTS,
    REJECTED_SCHEMA,
    ROW_SCHEMA,
    SPAN,
    Kind,
    Manifest,
    Meaning,
    MediaPlace,
    Record,
    Unused,
    file_place,
    flattened,
    joined,
    row_table,
    schema_of,
    storable,
    table_of,
)
from forebay.rows.meanings.image_class import EXCLUDED
from forebay.rows.meanings.recordings import span_columns
from forebay.rows.named_files import path_stem
from forebay.rows.reader import FilePiece, Sink
from forebay.rows.readers.json_lines import JsonError
from forebay.rows.source_table import SourceFiles
from forebay.store.layout import Array, Group
from forebay.store.source_files import SourceFile

_TEXT = pa.large_string()
_ROWS_PER_BATCH = 4096
PART_ROWS = schema_of(
    "sample_id:large_string? explicit_id:bool text:large_string? kind:string? reason:string? message:large_string?"
)
"""One entry a row of the manifest, in order: `sample_id` null where it is `<file>/<row>`; `kind`, `reason` and
`message` of a row that cannot be used, else null. Behind them stand _SPOKEN where rows may be items themselves, and by
group lists of places in the part's table of items."""
_SPOKEN = schema_of("language:large_string? prompt:large_string? duration_s:float64")
PART_ITEMS = {
    group: schema_of(f"path:large_string? member:large_string offset:int64 size:int64 run:int64 {bounds}")
    for group, bounds in ITEM_BOUNDS.items()
}
"""Places of items: `path`, as written, of a file of its own, else null and a place in the part's file; ITEM_BOUNDS."""
_OF_PLACE = 5
"""Fields of a `MediaPlace` before those of ITEM_BOUNDS."""
TEXT_AT = "text_at"
"""The column of rows whose texts lie aside: their places among the texts of all parts."""
_NOUNS: Mapping[Group, str] = {"audio": "a recording", "image": "an image"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The result of a task: PART_ROWS, and by group PART_ITEMS. texts: those of the rows, if these have TEXT_AT.

    absent: the file cannot be opened. unused: rows by the name of a field that nothing takes. classes: the names of all
    classes, in their order, where the file itself says them.
    """

    group: int
    rows: pa.Table
    items: Mapping[Group, pa.Table]
    texts: TextsAside
    absent: bool = False
    unused: Mapping[str, int] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None


@dataclass(slots=True)
class RowSink:
    """The rows of a piece, gathered one by one; Python objects are held of at most 4096 rows, and of different places.

    keep: fields of rows that are kept. home: what their files are named in. stem: see `FilePiece`. The rest as a `Sink`
    has it.
    """

    meaning: Meaning
    keep: tuple[str, ...] = ()
    home: Path = field(default_factory=Path)
    stem: str = ""
    unused: Unused = field(default_factory=Unused)
    classes: tuple[str, ...] | None = None
    is_absent: bool = False
    _tables: list[pa.Table] = field(default_factory=list)
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _kept: list[tuple[Any, ...]] = field(default_factory=list)
    _bounds: list[Mapping[str, Any]] = field(default_factory=list)
    _places: dict[Group, dict[MediaPlace, int]] = field(init=False)
    _schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        groups = self.meaning.facts.groups
        self._places = {group: {} for group in groups}
        lists = [pa.field(group, pa.list_(pa.int32()), nullable=False) for group in groups]
        self._schema = pa.schema([*PART_ROWS, *lists, *(() if self.meaning.lists_all else _SPOKEN)])

    def take(
        self, record: Record | Callable[[], Record], *, where: str, stem: str | None = None, number: int = 0
    ) -> None:
        """Takes a row; one that cannot be used is rejected. Raises ManifestError where such a row costs the build."""
        given: str | None = None
        try:
            made = record() if callable(record) else record
            given = self.meaning.identifier(made.fields)
            self._add(made, stem, given)
        except (SampleError, JsonError) as err:
            message, reason = f"{where}: {err}{self.meaning.advice}", err.reason or self.meaning.bad
            if reason is None:
                raise ManifestError(message, code="FB203") from err
            last = f"{self.stem}/{number}" if self.meaning.bad is None else None
            self.reject(stem or given or last, reason, message)

    def reject(self, sample_id: str | None, reason: str, message: str, *, kind: Kind = "failed") -> None:
        """Takes a row that cannot be used."""
        kind = "excluded" if reason in EXCLUDED else kind
        if reason == "bad_conversation" and self.meaning.bad is not None:
            reason = self.meaning.bad
        failed = (sample_id, False, None, kind, reason, storable(message))
        self._append(failed, {}, (None, None, float("nan")), (None,) * len(self.keep), {})

    def part(self, group: int, *, cache_root: str = "") -> RowPart:
        """Returns what was gathered. cache_root: below it large texts are put aside."""
        self._flush()
        rows, texts = concatenated(self._tables, is_last=False), TextsAside(None)
        if self.meaning.lists_all:  # nothing looks at their texts until all rows are known
            texts = TextsAside.of([rows["text"].combine_chunks()], cache_root)
            place = rows.schema.get_field_index("text")
            rows = rows.set_column(place, TEXT_AT, pa.array(np.arange(len(rows))))
        return RowPart(
            group=group,
            rows=rows,
            texts=texts,
            items={name: table_of(_flat(places, name), PART_ITEMS[name]) for name, places in self._places.items()},
            absent=self.is_absent,
            unused=self.unused.counts,
            classes=self.classes,
        )

    def _add(self, record: Record, stem: str | None, given: str | None) -> None:
        unknown: set[str] = set()
        try:
            row = self.meaning.row(record, unknown=unknown, home=self.home)
        finally:  # of a row that lacks its class too: it may have one under another name
            if unknown and (others := unknown.difference(self.keep)):
                self.unused.add(others)
        values = values_in(record.fields if record.kept is None else record.kept, self.keep) if self.keep else ()
        items = {
            group: [file_place(place, self.home, of=_NOUNS[group]) for place in places]
            for group, places in row.items.items()
        }
        given = given or row.sample_id
        found = (given or stem or row.name, given is not None, row.text, None, None, None)
        self._append(found, items, (row.language, row.prompt, row.seconds), values, row.bounds)

    def _append(
        self,
        row: tuple[Any, ...],
        items: Mapping[Group, Sequence[MediaPlace]],
        spoken: tuple[Any, ...],
        kept: tuple[Any, ...],
        bounds: Mapping[str, Any],
    ) -> None:
        for group, places in self._places.items():
            for frame in (frame for place in items.get(group, ()) for frame in place.frames):
                places.setdefault(frame, len(places))
        lists = [
            [places.setdefault(place, len(places)) for place in items.get(group, ())]
            for group, places in self._places.items()
        ]
        self._rows.append((*row, *lists, *(() if self.meaning.lists_all else spoken)))
        self._kept.append(kept)
        self._bounds.append(bounds)
        if len(self._rows) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        table = table_of(self._rows, self._schema)
        names = sorted({name for bounds in self._bounds for name in bounds})
        for name, column in span_columns(self._bounds, names).items():
            table = table.append_column(SPAN + name, column)
        self._tables.append(with_kept(table, parts_of_rows(self._kept, self.keep)))
        for gathered in (self._rows, self._kept, self._bounds):
            gathered.clear()


def _flat(places: Mapping[MediaPlace, int], group: Group) -> list[tuple[Any, ...]]:
    if group == "image":
        asked = [(place.still, place.video, [places[frame] for frame in place.frames]) for place in places]
        return [(*place[:_OF_PLACE], *each) for place, each in zip(places, asked, strict=True)]
    return [(*place[:_OF_PLACE], *(place.segment or (None, None, None))) for place in places]


def read_piece(read: Callable[[FilePiece, Sink], None], piece: FilePiece) -> RowPart:
    """Returns the rows of a piece, and the places of their items, as a task."""
    home = Path(piece.source.media_dir or piece.path)
    rows = RowSink(piece.meaning, keep=piece.source.keep_columns, home=home, stem=piece.stem)
    read(piece, rows)
    return rows.part(piece.group, cache_root=piece.cache_root)


def listed_rows(parts: Sequence[RowPart]) -> pa.Table:
    """Returns all rows: those of parts with `row`, `group` and `offset`, the place in its file.

    Items of a group are references: entry i of the parts' tables of items, put together, is reference i.
    """
    group = np.repeat([part.group for part in parts], [len(part.rows) for part in parts]).astype(np.int32)
    row = np.arange(len(group), dtype=np.int64)
    in_file = row - np.searchsorted(group, group)
    columns = {"row": pa.array(row), "group": pa.array(group), "offset": pa.array(in_file)}
    if not parts:
        return pa.table(columns)
    tables = [part.rows for part in parts]
    for name in parts[0].items:
        bases = np.cumsum([0, *(len(part.items[name]) for part in parts)])
        tables = [_with_base(table, name, base) for table, base in zip(tables, bases[:-1].tolist(), strict=True)]
    table = concatenated(tables)
    columns |= {name: table[name] for name in table.column_names}
    return pa.table(columns | ({TEXT_AT: columns["row"]} if TEXT_AT in columns else {}))


def candidate_rows(
    rows: pa.Table,
    files: Sequence[SourceFile],
    places: Callable[[pa.Table], Mapping[str, Any]],
    *,
    lists: Sequence[Group],
) -> Manifest:
    """Returns the rows that can be used, as ROW_SCHEMA and columns of LISTS behind it, and the others.

    rows: of `listed_rows`. places: gives more columns of those that can be used, `file` among them: where they lie.
    lists: the groups whose items rows list.
    """
    shown = SourceFiles.of(files).shown_names
    stems = pa.array((path_stem(name.rpartition("/")[2]) for name in shown), pa.large_string())
    derived = joined(stems.take(rows["group"].combine_chunks()), "/", rows["offset"])
    place = rows.schema.get_field_index("sample_id")
    rows = rows.set_column(place, "sample_id", pc.coalesce(rows["sample_id"], derived))
    rejected = rows.filter(rows["reason"].is_valid()).select(REJECTED_SCHEMA.names).cast(REJECTED_SCHEMA)
    rows = rows.filter(rows["reason"].is_null()) if len(rejected) else rows
    names = [name for name in rows.column_names if name in ROW_SCHEMA.names or name.startswith(SPAN)]
    kept = {name: column_of(rows, name) for name in names_of(rows)}
    table = row_table({name: rows[name] for name in names} | {**places(rows)}, num_rows=len(rows))
    for name, column in {TEXT_AT: TEXT_AT, **{group: LISTS[group] for group in lists}}.items():
        table = table.append_column(column, rows[name]) if name in rows.column_names else table
    return Manifest(files=files, rows=with_kept(table, kept), rejected=rejected)


def first_places(
    rows: pa.Table, parts: Sequence[RowPart], group: Group, numbers: Callable[[Any, int], Array]
) -> dict[str, Any]:
    """Returns where the first item of each row lies, as columns; each row has one.

    numbers: (names, source file) -> the numbers of files of their own, asked for in the order of the rows.
    """
    found = []
    for own, run in itertools.groupby(parts, key=lambda part: part.group):
        paths = pa.chunked_array([c for part in run for c in part.items[group]["path"].chunks], _TEXT).combine_chunks()
        is_file = np.asarray(paths.is_valid())
        of_run = np.full(len(paths), own, np.int32)
        if is_file.any():
            of_run[is_file] = numbers(paths.drop_null(), own)
        found.append(of_run)
    offsets, references = flattened(rows[group])
    first = pa.array(references[offsets[:-1]])
    places = pa.concat_tables([part.items[group] for part in parts]).take(first)
    file = pa.array(np.concatenate([np.zeros(0, np.int32), *found])).take(first)
    return {"file": file, **{name: places[name] for name in ("member", "offset", "size")}}


def _with_base(rows: pa.Table, name: str, base: int) -> pa.Table:
    offsets, values = flattened(rows[name].combine_chunks())
    shifted = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values + np.int64(base), pa.int32()))
    return rows.set_column(rows.schema.get_field_index(name), name, shifted)
