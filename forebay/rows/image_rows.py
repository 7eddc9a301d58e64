"""The first stage of a listing of images: the rows of pieces of files, and the candidates among all of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import Reads, SourceConfig
from forebay.errors import SampleError
from forebay.rows.eligible import apply_filters, unique_ids
from forebay.rows.kept_columns import column_of, concatenated, names_of, parts_of_rows, values_in, with_kept
from forebay.rows.manifest import (
    REJECTED_SCHEMA,
    Kind,
    Manifest,
    Unused,
    joined,
    rejections,
    row_table,
    storable,
    table_of,
)
from forebay.rows.meanings.canonical_chat import IMAGES, identifier, image_names, text_error
from forebay.rows.meanings.image_class import EXCLUDED, read_row
from forebay.rows.named_files import is_picture, path_stem, shown_name
from forebay.rows.reader import FilePiece, MediaPlace, Record, Sink, file_place
from forebay.rows.readers.json_lines import JsonError, parse_nested
from forebay.rows.shared_images import flattened
from forebay.store.layout import Array
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
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


@dataclass(slots=True)
class ImageSink:
    """The rows of a piece, gathered one by one; Python objects are held of at most 4096 rows, and of different places.

    keep: fields of rows that are kept. home: what their files are named in. The rest as a `Sink` has it.
    """

    keep: tuple[str, ...] = ()
    reads: Reads = "conversations"
    home: Path | None = None
    unused: Unused = field(default_factory=Unused)
    classes: tuple[str, ...] | None = None
    is_absent: bool = False
    _tables: list[pa.Table] = field(default_factory=list)
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _kept: list[tuple[Any, ...]] = field(default_factory=list)
    _places: dict[MediaPlace, int] = field(default_factory=dict)

    def take(
        self,
        record: Record | Callable[[], Record],
        *,
        where: str,
        stem: str | None = None,
        number: int = 0,  # noqa: ARG002
    ) -> None:
        """Takes a row; one that cannot be used is rejected."""
        given: str | None = None
        try:
            made = record() if callable(record) else record
            given = identifier(made.fields)
            fields, images = _with_images(made)
            self._add(fields, images, given or stem, is_given=given is not None, kept=made.kept)
        except SampleError as err:
            self.reject(stem or given, err.reason, f"{where}: {err}")

    def reject(self, sample_id: str | None, reason: str, message: str, *, kind: Kind = "failed") -> None:
        """Takes a row that cannot be used."""
        kind = "excluded" if reason in EXCLUDED else kind
        if reason == "bad_conversation" and self.reads != "conversations":
            reason = "bad_row"
        self._append((sample_id, False, None, [], kind, reason, storable(message)), (None,) * len(self.keep))

    def part(self, group: int) -> ImagePart:
        """Returns what was gathered."""
        self._flush()
        return ImagePart(
            group=group,
            rows=concatenated(self._tables, is_last=False),
            images=table_of([*self._places], PART_IMAGES),
            absent=self.is_absent,
            unused=self.unused.counts,
            classes=self.classes,
        )

    def _add(
        self,
        fields: dict[str, Any],
        images: Sequence[MediaPlace],
        sample_id: str | None,
        *,
        is_given: bool,
        kept: Mapping[str, Any] | None,
    ) -> None:
        """Raises TextError as `read_row`, SampleError `missing_file` for an impossible name."""
        unknown: set[str] = set()
        try:
            text, used = read_row(self.reads, fields, images, unknown=unknown)
        finally:  # of a row that lacks its class too: it may have one under another name
            if unknown.difference(self.keep):
                self.unused.add(unknown.difference(self.keep))
        try:
            values = values_in(fields if kept is None else kept, self.keep)
        except JsonError as err:
            raise text_error(err) from err
        places = [file_place(image, self.home) for image in used]
        numbers = [self._places.setdefault(place, len(self._places)) for place in places]
        self._append((sample_id, is_given, text, numbers, None, None, None), values)

    def _append(self, row: tuple[Any, ...], kept: tuple[Any, ...]) -> None:
        self._rows.append(row)
        self._kept.append(kept)
        if len(self._rows) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        self._tables.append(with_kept(table_of(self._rows, PART_ROWS), parts_of_rows(self._kept, self.keep)))
        self._rows.clear()
        self._kept.clear()


def _with_images(record: Record) -> tuple[dict[str, Any], list[MediaPlace]]:
    """Returns the fields of a row, nested JSON decoded, and its images."""
    fields, images = record.fields, []
    if record.media is not None:
        found = [place if place is None else file_place(place) for place in record.media]
        images = [place for place in found if place is not None]
        if len(images) < len(found):
            raise SampleError("missing_file", "its image has neither bytes nor a path")
    for name in record.nested:
        text = fields.get(name)
        if isinstance(text, str) and (name not in IMAGES or text.lstrip().startswith("[")):
            fields = {**fields, name: _decoded(name, text)}
    if record.media is None:
        images = [*map(file_place, image_names(fields))]
    return fields, images


def _decoded(name: str, text: str) -> Any:
    try:
        return parse_nested(text)
    except JsonError as err:
        raise text_error(JsonError(f"field {name}: {err}", reason=err.reason)) from err


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """Reads a piece, as a task."""

    read: Callable[[FilePiece, Sink], None]

    def __call__(self, piece: FilePiece) -> ImagePart:
        """Returns the rows of a piece, and the places of their images."""
        source = piece.source
        home = Path(source.media_dir or piece.path)
        rows = ImageSink(keep=source.keep_columns, reads=piece.reads, home=home)
        self.read(piece, rows)
        return rows.part(piece.group)


_KINDS: tuple[Kind, ...] = ("excluded", "failed")


def listed_rows(parts: Sequence[ImagePart]) -> pa.Table:
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


def candidate_rows(
    rows: pa.Table, manifests: Sequence[SourceFile], source: SourceConfig, *, lists_images: bool = False
) -> Manifest:
    """Returns the rows that are conversations, with the columns that ids and filters look at, and `images`.

    lists_images: a row is an image of the manifests, see `Reader`; ids that clash are then named after its file.
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


def _with_base(rows: pa.Table, base: int) -> pa.Table:
    lists = rows["images"].combine_chunks()
    offsets, values = flattened(lists)
    shifted = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values + np.int64(base), pa.int32()))
    return rows.set_column(rows.schema.get_field_index("images"), "images", shifted)
