"""The common form of every manifest: a table of candidate samples, what was left out and why, and what is unused.

A record of a file becomes a row by a meaning: a class with a line in a table, `MEANINGS` of `forebay.config.data`. A
reader gives records whatever they mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import MEANINGS, MeaningFacts, SourceColumns, SourceConfig
from forebay.errors import ManifestError, SampleError
from forebay.rows.kept_columns import with_kept
from forebay.rows.named_files import shown_name, usable_name
from forebay.store.layout import Array, Group
from forebay.store.remote.raw.raw_sources import shown
from forebay.store.source_files import SourceFile
from forebay.terminal import first_of
from forebay.visible import printable

Kind = Literal["excluded", "failed"]


def schema_of(columns: str) -> pa.Schema:
    """Returns a schema of `name:type` parted by spaces; `[]` behind a type is a list of it, `?` that it may be null."""
    fields = []
    for name, kind in (column.split(":") for column in columns.split()):
        plain = pa.type_for_alias(kind.removesuffix("?").removesuffix("[]"))
        fields.append(pa.field(name, pa.list_(plain) if "[]" in kind else plain, nullable=kind.endswith("?")))
    return pa.schema(fields)


ROW_SCHEMA = schema_of(
    "row:int64 sample_id:large_string explicit_id:bool group:int32 file:int32 member:large_string offset:int64 "
    "size:int64 duration_s:float64 stated_s:float64? language:large_string? prompt:large_string? text:large_string?"
)
"""Columns of `Manifest.rows`; those of `source.keep_columns` stand behind them, see `kept`.

Strings have 64-bit offsets, so that 75 million rows fit one chunk.
"""

REJECTED_SCHEMA = schema_of("row:int64 sample_id:large_string kind:string reason:string message:large_string")
"""Columns of `Manifest.rejected`."""

SHARED = "item_group"
CONVERSATION_SCHEMA = schema_of(
    "row:int64 sample_id:large_string explicit_id:bool group:int32 text:large_string audios:int32[] images:int32[] "
    f"{SHARED}:int64"
)
"""Columns of `Manifest.rows` of conversations: `text` in the canonical form, by group LISTS (into `Manifest.items`, one
for each part of that kind, in order; a group that rows have not has no column), `item_group` (rows of one number share
items; they are consecutive, numbers rise). Because of that order `row`, the place in the listing, does not rise."""

ITEM_FACTS: Mapping[Group, str] = {
    "audio": "num_samples:int64 sample_rate_hz:int32",
    "image": "width:int32 height:int32 num_frames:int32 fps:float64",
}
"""What the header of an item says: samples of one channel at its own rate; pixels as displayed, of a still 0 frames."""
ITEM_BOUNDS: Mapping[Group, str] = {
    "audio": "start_s:float64? end_s:float64? channel:int32?",
    "image": "still:string? video:string? frames:int64[]",
}
"""The stretch of a recording that an item is, see `Bounds`; null of one that is all of it. `still`, `video`:
what is asked of an image or of a video, see `Still.to_text`, `Sampling.to_text`; null of any other. `frames`, of a
video whose frames are files of their own: file, offset and size of each, one behind the other; before a listing knows
them, their places among the items of their part."""
ITEM_SCHEMAS = {
    group: schema_of(f"file:int32 member:large_string offset:int64 size:int64 hash:string {facts} {ITEM_BOUNDS[group]}")
    for group, facts in ITEM_FACTS.items()
}
"""Columns of `Manifest.items`, each content once: a place that `MediaReader` takes (that of its first use), the
xxh3-128 of the encoded bytes, of a stretch also of its bounds, as 32 hex digits, ITEM_FACTS, and ITEM_BOUNDS."""

VIDEO_FIELDS = ("videos", "video")
"""The fields of a row that name its videos, which are items of the group `image`."""
LISTS: Mapping[Group, str] = {"audio": "audios", "image": "images"}
"""The columns of rows that list items, by group."""
NOUNS: Mapping[Group, str] = {"audio": "clip", "image": "image"}
"""The words for an item of a group that rows list."""
WHOLE_FILE = -1
"""`size` of a row whose media is a file of its own (offset 0), or a row of an `hf` file (offset: the row number)."""
SPAN = "span:"
"""Before the names of columns that a listing has until it is finished, see `pieces`."""
INLINE = 1 << 61
"""Added to the `offset` of an item whose bytes stand in a line of its manifest, as base64."""
UNLOCATED = -2
"""`size` of a row of a tar whose member has not been looked up yet."""
_UNKNOWN = {"explicit_id": False, "member": "", "offset": 0, "size": WHOLE_FILE, "duration_s": float("nan")}
"""The value of a column that is left out, null of any other."""
OTHERS = "(others)"
_MAX_NAMES = 100
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Candidate samples in the order in which shards are cut.

    files: every file whose content defines the samples, manifests first; an index into it is called a file below.
    rows: `row` int64 (position in the listing, rising), `sample_id`, `explicit_id` (given by the manifest, not derived
    from a name), `group` int32 (file that the shards are cut by: the tar, the hf file, else the manifest; rows of one
    group are consecutive), `file` int32 (file that holds the media), `member` (its name in a tar, or ""), `offset` and
    `size` int64 in bytes (see WHOLE_FILE, UNLOCATED), `duration_s` float64 (NaN: not known yet), `stated_s` float64
    (what the manifest says of the duration, or the metadata beside the clip; null: nothing), `language`, `prompt`,
    `text` (null: not given). rejected: `row`, `sample_id`, `kind` ("excluded" by a setting, "failed" because of the
    data), `reason`, `message`. absent: files that are named but cannot be opened; all their rows have failed; and tars
    behind the last row of `max_samples`. items: the different items of each group that rows list (see
    CONVERSATION_SCHEMA, which conversations are of), see ITEM_SCHEMAS.
    unused: rows by the name of a field or column that they have and nothing takes, as far as they were looked at.
    """

    files: Sequence[SourceFile]
    rows: pa.Table
    rejected: pa.Table = field(default_factory=lambda: REJECTED_SCHEMA.empty_table())
    absent: tuple[int, ...] = ()
    items: Mapping[Group, pa.Table] = field(default_factory=dict)
    unused: Mapping[str, int] = field(default_factory=dict)

    def failed(self) -> Iterator[tuple[str, str, str]]:
        """Yields (sample id, reason, message) of every sample that failed, in the order of the listing."""
        failed = self.rejected.filter(pc.equal(self.rejected["kind"], "failed"))
        yield from zip(*(failed[name].to_pylist() for name in ("sample_id", "reason", "message")), strict=True)

    def counts(self) -> dict[Kind, dict[str, int]]:
        """Returns the number of rejected samples by kind and reason."""
        counts: dict[Kind, dict[str, int]] = {"excluded": {}, "failed": {}}
        grouped = self.rejected.group_by(["kind", "reason"], use_threads=False).aggregate([([], "count_all")])
        for entry in sorted(grouped.to_pylist(), key=lambda e: str(e["reason"])):
            counts[entry["kind"]][entry["reason"]] = entry["count_all"]
        return counts


def row_table(columns: Mapping[str, Any], *, num_rows: int, kept: Mapping[str, Any] | None = None) -> pa.Table:
    """Returns `columns` as a table of ROW_SCHEMA; a column left out gets its "not known" value in every row.

    A `duration_s` is what the manifest says, so it is `stated_s` too. An empty `language` is none: a TSV cannot say it
    otherwise. kept: the columns of `source.keep_columns`, which stand behind those of the schema, as those of SPAN do.
    """
    given_s = columns.get("duration_s")
    if given_s is not None:
        columns = {**columns, "stated_s": pc.if_else(pc.is_nan(given_s), pa.scalar(None, pa.float64()), given_s)}
    language = columns.get("language")
    if language is not None:
        named = pc.if_else(pc.equal(language, ""), pa.scalar(None, pa.large_string()), language)
        columns = {**columns, "language": named}
    known = {"row": pa.array(np.arange(num_rows)), **{name: c for name, c in columns.items() if c is not None}}
    arrays = [
        _typed(known[f.name], f.type) if f.name in known else constant(_UNKNOWN.get(f.name), num_rows, f.type)
        for f in ROW_SCHEMA
    ]
    table = with_kept(pa.table(arrays, schema=ROW_SCHEMA), kept or {})
    for name in columns:
        table = table.append_column(name, columns[name]) if name.startswith(SPAN) else table
    return table


def flattened(lists: Any) -> tuple[Array, Array]:
    """Returns offsets int64 [rows + 1] and values of a column of lists, whatever it was sliced from."""
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.concatenate(([0], np.cumsum(lengths))), pc.list_flatten(lists).to_numpy(zero_copy_only=False)


def columns_of(rows: Sequence[Sequence[Any]], types: Mapping[str, pa.DataType]) -> dict[str, pa.Array]:
    """Returns rows as columns, their values in the order of some names."""
    columns = list(zip(*rows, strict=True)) or [()] * len(types)
    return {name: pa.array(values, kind) for values, (name, kind) in zip(columns, types.items(), strict=True)}


def table_of(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Returns rows as a table of a schema, their values in the order of its fields."""
    return pa.table(columns_of(rows, {f.name: f.type for f in schema}), schema=schema)


def rejections(rows: Any, sample_ids: Any, *, kind: Kind, reason: str | Sequence[str], message: Any) -> pa.Table:
    """Returns a table of REJECTED_SCHEMA; `reason` and `message` are one for all rows or one a row."""
    columns = zip((rows, sample_ids, kind, reason, message), REJECTED_SCHEMA.types, strict=True)
    arrays = [constant(of, len(rows), t) if isinstance(of, str) else _typed(of, t) for of, t in columns]
    return pa.table(arrays, schema=REJECTED_SCHEMA)


def constant(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    """Returns `count` times one value."""
    return pa.repeat(pa.scalar(value, kind), count)


def joined(*parts: Any) -> Any:
    """Returns strings put together row by row; a part is one string for all rows or a column of them."""
    text = pa.large_string()
    typed = [pa.scalar(part, text) if isinstance(part, str) else pc.cast(part, text) for part in parts]
    return pc.binary_join_element_wise(*typed, pa.scalar("", text))


def storable(text: str) -> str:
    r"""Returns a name as UTF-8 can hold it: bytes that are not UTF-8 (surrogate escapes) become `\udcXX`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def grouped(table: pa.Table) -> pa.Table:
    """Returns the rows of each `group` made consecutive, groups by their first appearance; `row` is numbered anew."""
    group = table["group"].to_numpy()
    if np.any(np.diff(group) < 0):
        # Groups are numbered by first appearance, so a stable sort by number keeps manifest order inside each.
        table = table.take(pa.array(np.argsort(group, kind="stable")))
    return table.set_column(0, ROW_SCHEMA.field("row"), pa.array(np.arange(len(table))))


def without_rows(table: pa.Table, places: Sequence[int]) -> pa.Table:
    """Returns a table without the rows at some places, most often none: a filter copies every column."""
    return table.filter(pa.array(~np.isin(np.arange(len(table)), places))) if places else table


def require_rows(num_rows: int, manifests: Sequence[SourceFile]) -> None:
    """Raises ManifestError where the manifests name no sample at all."""
    if not num_rows:
        raise ManifestError(
            f"{', '.join(str(m.path) for m in manifests)}: no rows; add samples or name another manifest", code="FB204"
        )


def _typed(values: Any, kind: pa.DataType) -> Any:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values if values.type == kind else pc.cast(values, kind)
    return pa.array(values, kind)


def reduced(task: Any) -> tuple[Any, ...]:
    """Returns what `__reduce__` of a task with a table `rows` gives.

    A pickled slice of an arrow table carries the whole table; its IPC form carries the slice.
    """
    state = {f.name: getattr(task, f.name) for f in fields(task)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, state["rows"].schema) as writer:
        writer.write_table(state["rows"])
    return _restored, (type(task), {**state, "rows": sink.getvalue().to_pybytes()})


def _restored(kind: type[Any], state: dict[str, Any]) -> Any:
    return kind(**{**state, "rows": pa.ipc.open_stream(state["rows"]).read_all()})


@dataclass(slots=True)
class Unused:
    """Rows by the name of a field that they have and nothing takes.

    At most 100 names of 60 characters are kept, those that come first; the rest is counted as OTHERS, so that data with
    a name of its own in every row fills no memory.
    """

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, names: Iterable[str], *, rows: int = 1) -> None:
        """Counts rows that have these fields; sorted, because the names of a set come in another order every time."""
        for name in sorted(names):
            self._count(storable(name[:60]), rows)

    def add_of(self, fields: Mapping[str, Any], taken: frozenset[str]) -> None:
        """Counts a row with these fields; null is no value."""
        if not fields.keys() <= taken:
            self.add(name for name in fields.keys() - taken if fields[name] is not None)

    def merge(self, counts: Mapping[str, int]) -> None:
        """Adds what another counted."""
        for name, rows in counts.items():
            self._count(name, rows)

    def _count(self, name: str, rows: int) -> None:
        if name not in self.counts and len(self.counts) >= _MAX_NAMES:
            name = OTHERS
        if rows:
            self.counts[name] = self.counts.get(name, 0) + rows


def merged(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the counts of several parts of a data set, put together in their order."""
    unused = Unused()
    for counts in parts:
        unused.merge(counts)
    return unused.counts


def described(counts: Mapping[str, int]) -> str:
    """Returns a line for a person, the most frequent first: `2 fields are not used: "a" (9 rows), "b" (1 row)`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = first_of([f'"{printable(name)}" ({rows} row{"s" * (rows != 1)})' for name, rows in ordered], _SHOWN)
    are = "fields are" if len(ordered) != 1 else "field is"
    return f"{len(ordered)} {are} not used: {listed}"


class MediaPlace(NamedTuple):
    """Where a recording or an image lies. run: of places that are read by one task: a row group, a stretch of a tar.

    segment: the `Bounds` of a stretch of a recording, None of all of it. still, video: what is asked of an image or of
    a video, None of any other. frames: the places of a video's frames, whose first one this is, where these are images
    of their own.
    """

    path: str | None = None
    member: str = ""
    offset: int = 0
    size: int = WHOLE_FILE
    run: int = 0
    segment: tuple[float, float, int | None] | None = None
    video: str | None = None
    frames: tuple[MediaPlace, ...] = ()
    still: str | None = None


class Record(NamedTuple):
    """A row as its file has it.

    media: by group what the row is of, a place in the file, the name of another file, None for one that is missing, or
    why there is none; left out: the fields name it. kept: the values kept, where they are not among the fields. nested:
    fields whose text is JSON.
    """

    fields: dict[str, Any]
    media: Mapping[Group, Sequence[MediaPlace | str | Exception | None]] | None = None
    kept: Mapping[str, Any] | None = None
    nested: tuple[str, ...] = ()


class MeantRow(NamedTuple):
    """The row that a record becomes.

    items: by group the places of its media, or names of files. sample_id: the id that the record gives. name: the id
    that its media give, which is taken where nothing else gives one. seconds: how long its own item is said to be, NaN
    where nothing says it. bounds: what is said of where in its recording it lies.
    """

    text: str | None = None
    items: Mapping[Group, Sequence[MediaPlace | str]] = {}
    sample_id: str | None = None
    name: str | None = None
    language: str | None = None
    prompt: str | None = None
    seconds: float = math.nan
    bounds: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Meaning(ABC):
    """The meaning of a record: which row it becomes. Picklable, and hashable.

    facts: its name, its groups and the columns that it reads. beside, refuses: further columns of tables, those that it
    reads by their own names, and those of which it wants to know whether they hold anything. lists_any: a row may list
    any number of items. in_fields: items in the rows of a data file are among the fields. bad: the reason of a record
    of another form; None: such a record costs the build. advice: behind messages. by_column: a reader may list its rows
    by column, see `RecordingLister`.
    """

    facts: MeaningFacts
    beside: ClassVar[tuple[str, ...]] = ()
    refuses: ClassVar[frozenset[str]] = frozenset()
    lists_any: ClassVar[bool] = False
    in_fields: ClassVar[bool] = False
    bad: ClassVar[str | None] = "bad_row"
    advice: ClassVar[str] = ""
    by_column: ClassVar[bool] = False

    @abstractmethod
    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:
        """Returns the row of a record. Raises SampleError or JsonError for one that is none.

        unknown: the names of fields that nothing takes are added. home: what files are named in.
        """

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of `[source.columns]` that it reads."""
        return self.facts.columns

    @property
    def read_beside(self) -> tuple[str, ...]:
        """The further columns of tables that it reads by their own names."""
        return (*self.beside, *(VIDEO_FIELDS if self.facts.has_videos else ()))

    @property
    def own(self) -> Group | None:
        """The group of which each row is an item itself; None: rows have none, or list all that they have."""
        return next((group for group in self.facts.groups if group not in self.facts.lists), None)

    @property
    def lists_all(self) -> bool:
        """Whether rows have items and list all of them."""
        return bool(self.facts.groups) and self.own is None

    def identifier(self, fields: Mapping[str, Any]) -> str | None:  # noqa: ARG002
        """Returns the id by which a row that fails is known. Raises SampleError for what is no id."""
        return None

    def called(self, file: SourceFile) -> str:
        """Returns what messages call a file of records."""
        return shown_name(file)

    def lacking(self, found: Collection[str], columns: SourceColumns) -> str | None:  # noqa: ARG002
        """Returns what a table with these fields lacks, as a person says it; None where it has all that is needed."""
        return None

    def finished(self, rows: pa.Table, classes: Sequence[tuple[str, ...] | None]) -> pa.Table:  # noqa: ARG002
        """Returns the rows when all are known. classes: as files declare them, see `Sink`."""
        return rows

    def doubts(self, source: SourceConfig, rows: pa.Table) -> Iterator[str]:  # noqa: ARG002
        """Yields what a person should know of the listed rows."""
        return iter(())


class InlineName(str):
    """The name of an item whose base64 stands in its manifest: a type of its own, for a manifest may name anything."""

    __slots__ = ("offset", "size")
    offset: int
    size: int

    @classmethod
    def of(cls, name: str, *, offset: int, size: int) -> InlineName:
        """Takes bytes of the manifest."""
        found = cls(name)
        found.offset, found.size = offset, size
        return found


def file_place(written: str | MediaPlace, home: Path | None = None, *, of: str = "an image") -> MediaPlace:
    """Returns the place of an item, of a name that of the file. home: as `usable_name` has it.

    Raises SampleError `missing_file` for no name.
    """
    if isinstance(written, InlineName):
        return MediaPlace(None, str(written), INLINE + written.offset, written.size)
    place = MediaPlace(path=written) if isinstance(written, str) else written
    if place.frames:
        return place._replace(frames=tuple(file_place(frame, home, of=of) for frame in place.frames))
    if place.path is not None and place.path.startswith(_LOCAL):
        place = place._replace(path=place.path[len(_LOCAL) - 1 :])
    if place.path is not None and (problem := usable_name(place.path, home)) is not None:
        raise SampleError("missing_file", f"the name of {of} {problem}")
    return place


_LOCAL = "file:///"
"""Before the names of files of this machine, as Qwen's guides write them in conversations; nothing in it is escaped."""


def meaning_named(name: str, facts: MeaningFacts | None = None) -> Meaning:
    """Returns one of `MEANINGS`. facts: of rows of fewer groups."""
    meaning: Meaning = resolve_name(MEANINGS[name].target)(facts or MEANINGS[name])
    return meaning


def found_rows(rows: pa.Table, found: pa.Table) -> pa.Table:
    """Returns the listed rows that were found, with the columns that were found; `found` alone where it is complete."""
    if found.column_names[: len(ROW_SCHEMA)] == ROW_SCHEMA.names:
        return found
    if len(found) < len(rows):
        rows = rows.take(pa.array(np.searchsorted(rows["row"].to_numpy(), found["row"].to_numpy())))
    for name in found.column_names:
        position = ROW_SCHEMA.get_field_index(name)
        rows = rows.set_column(position, ROW_SCHEMA.field(position), found[name].cast(ROW_SCHEMA.field(position).type))
    return rows


def recording(manifest: Manifest, file: int, member: str) -> str:
    """Returns what a recording is called in a message, with the table that names it."""
    path = shown(str(manifest.files[file].path))
    return (
        f"{shown(str(manifest.files[0].path))}: {path}{f', {member}' if member and not path.endswith(member) else ''}"
    )
