"""The first stage of a conversation source as tasks: part of a manifest, a tar or a data file, and the rows it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.errors import SampleError
from forebay.preprocess.sources.naming import usable_name
from forebay.preprocess.sources.rows import WHOLE_FILE, Kind, storable
from forebay.preprocess.sources.unused import Unused
from forebay.preprocess.sources.vision.canonical import canonical

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
"""One entry a row of the manifest, in order: `sample_id` null where it is `<file>/<row>`; `images` point into the part's
images; `kind`, `reason` and `message` of a row that cannot be used, else null."""


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
    """Where an image lies. run: places of one run lie together and are read by one task: a row group, a stretch of a tar."""

    path: str | None = None
    member: str = ""
    offset: int = 0
    size: int = WHOLE_FILE
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """Part of one file. group: its number. name: in messages. start, stop: bytes of a jsonl, row groups of a data file.

    first: number of the first line of a jsonl, from 1; of the first row of a data file, from 0.
    """

    source: SourceConfig
    group: int
    name: str
    path: str
    cache_root: str
    start: int = 0
    stop: int = 0
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a task found: PART_ROWS and PART_IMAGES.

    absent: the file cannot be opened. unused: rows by the name of a field that nothing takes.
    """

    group: int
    rows: pa.Table
    images: pa.Table
    absent: bool = False
    unused: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class PartRows:
    """The rows of a part, gathered one by one; Python objects of at most 4096 rows are held, and of the different
    places.

    unused: fields that no row's conversation takes; the caller adds those that it knows of a whole file.
    """

    unused: Unused = field(default_factory=Unused)
    _batches: list[pa.RecordBatch] = field(default_factory=list)
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _places: dict[Place, int] = field(default_factory=dict)

    def add(self, fields: dict[str, Any], images: Iterable[Place], *, sample_id: str | None, explicit: bool) -> None:
        """Adds a conversation. Raises TextError where it is none, SampleError `missing_file` for an impossible name."""
        unknown: set[str] = set()
        text, used = canonical(fields, list(images), unknown=unknown)
        if unknown:
            self.unused.add(unknown)
        places = [file_place(image) if isinstance(image, str) else image for image in used]
        numbers = [self._places.setdefault(place, len(self._places)) for place in places]
        self._append((sample_id, explicit, text, numbers, None, None, None))

    def reject(self, sample_id: str | None, reason: str, message: str, *, kind: Kind = "failed") -> None:
        """Adds a row that cannot be used."""
        self._append((sample_id, False, None, [], kind, reason, storable(message)))

    def part(self, group: int, *, absent: bool = False) -> Part:
        """Returns what was gathered."""
        self._flush()
        columns: list[Any] = list(zip(*self._places, strict=True)) or [()] * len(PART_IMAGES)
        images = pa.table([pa.array(c, f.type) for c, f in zip(columns, PART_IMAGES, strict=True)], PART_IMAGES)
        return Part(
            group=group,
            rows=pa.Table.from_batches(self._batches, PART_ROWS),
            images=images,
            absent=absent,
            unused=self.unused.counts,
        )

    def _append(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        columns: list[Any] = list(zip(*self._rows, strict=True)) or [()] * len(PART_ROWS)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, PART_ROWS, strict=True)]
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=PART_ROWS))
        self._rows.clear()


def file_place(written: str) -> Place:
    """Returns the place of an image that is a file of its own. Raises SampleError `missing_file` for an impossible name."""
    problem = usable_name(written)
    if problem:
        raise SampleError("missing_file", f"the name of an image {problem}")
    return Place(path=written)
