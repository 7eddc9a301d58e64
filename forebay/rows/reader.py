"""Readers of the files of a kind of source: pieces of files, and the records of each, whatever its rows mean.

A reader gives every record to a `Sink`, which knows what rows mean: recordings, conversations, images with a class.
Members of tars are found by name here, many at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SOURCE_KINDS, SourceColumns, SourceConfig
from forebay.errors import TarError
from forebay.rows.manifest import (
    REJECTED_SCHEMA,
    UNLOCATED,
    Kind,
    Manifest,
    Meaning,
    Record,
    Unused,
    reduced,
    storable,
    table_of,
)
from forebay.rows.media_reader import is_gone, read_fully
from forebay.rows.named_files import path_stem
from forebay.rows.readers.json_lines import JsonError
from forebay.store.layout import Array, Group
from forebay.store.memo import SIZE
from forebay.store.remote.raw.raw_sources import is_hash_known, is_readable, shown, source_stat
from forebay.store.source_files import SourceFile
from forebay.tar.header import RefusedHeader, TarIndex
from forebay.tar.index import has_index, load_index

NAMELESS = frozenset(("bad_checksum", "bad_extended_header", "extended_header_too_large", "truncated", "no_name"))
"""Reasons after which a member's name cannot be believed: any of them may have been a clip."""
MAX_SIDECAR_BYTES = 16 * 1024 * 1024
"""The largest member that may describe another one."""
NOT_FOUND = -1
IMAGE_EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp"))
AUDIO = frozenset((".wav", ".flac", ".ogg", ".mp3", ".opus"))
TEXT_FIELDS = ("transcription", "text", "transcript")


@dataclass(frozen=True, slots=True)
class UnreadableTar:
    """Why a tar has no index; `absent` where it cannot even be opened."""

    message: str
    absent: bool
    reason: str = "unreadable_tar"


def tar_index(path: str, *, cache_root: str) -> TarIndex | UnreadableTar:
    """Returns the index of a tar, or why there is none.

    An error of the machine (EIO, ENOMEM, ...) is raised as it is: it says nothing about the tar.
    """
    try:
        return load_index(path, cache_root=cache_root)
    except TarError as err:
        cause = err.__cause__
        if isinstance(cause, OSError) and not is_gone(cause):
            raise
        is_absent = not is_readable(path)
        is_empty = not is_absent and not source_stat(path)[SIZE]
        return UnreadableTar(storable(shown(str(err))), is_absent, "empty_file" if is_empty else "unreadable_tar")


def find_rows(wanted: pa.Array, index: TarIndex) -> Array:
    """Returns the member of each wanted name, int64, else NOT_FOUND; of equal names the last counts.

    A tar's names are bytes, UTF-8 or not.
    """
    parts = (pa.py_buffer(np.ascontiguousarray(values)) for values in (index.name_bounds, index.name_bytes))
    names = pa.Array.from_buffers(pa.large_binary(), len(index), [None, *parts])
    backwards = names.take(pa.array(np.arange(len(names))[::-1]))
    found = pc.fill_null(pc.index_in(wanted.cast(names.type), value_set=backwards), len(names))
    return np.asarray(len(names) - 1 - found.to_numpy().astype(np.int64))


def missing_reason(index: TarIndex, name: str, tar_name: str) -> tuple[str, str]:
    """Returns reason and message for a member that the index does not have."""
    refused = index.find_refused(name)
    if refused is None:
        return "missing_member", f"{tar_name} has no member {name}; correct the manifest or the tar"
    return refused.reason, refusal(refused, tar_name)


def refusal(refused: RefusedHeader, tar_name: str) -> str:
    """Returns the message for a member that a tar's index refuses."""
    where = f"{tar_name}: member {refused.name} at offset {refused.offset}"
    return f"{where} is refused: {refused.reason}; write the tar again"


def read_sidecar(descriptor: int, index: TarIndex, row: int) -> bytes:
    """Returns the bytes of a member that describes another one.

    Raises JsonError where it is larger than any description, TarError where the tar ends before it does.
    """
    size, offset = int(index.sizes[row]), int(index.offsets[row])
    if size > MAX_SIDECAR_BYTES:
        raise JsonError(f"has {size} bytes, wanted at most {MAX_SIDECAR_BYTES}")
    data = read_fully(descriptor, size, offset)
    if len(data) < size:
        raise TarError(
            f"{index.path}: member at offset {offset} ends after {len(data)} of {size} bytes; write the tar again",
            code="FB212",
        )
    return data


def member_stems(names: Any) -> Any:
    """Returns member names without their extension; folders stay, so that ids are unique across them."""
    return pc.replace_substring_regex(names, r"([^/])\.[^./]*$", r"\1")


def split_name(name: str) -> tuple[str, str]:
    """Returns (name without its extension, extension in lower case with its dot); `.hidden` has no extension."""
    stem, dot, extension = name.rpartition(".")
    if not dot or "/" in extension or not stem or stem.endswith("/"):
        return name, ""
    return stem, f".{extension.lower()}"


IDS, DURATIONS = ("sample_id", "id"), ("duration_s", "duration")
"""Fields and columns that hold ids and durations, the first of them that is there."""


def id_names(columns: SourceColumns) -> tuple[str, ...]:
    """Returns the columns of ids, the first of them that is there."""
    return IDS if columns.id is None else (columns.id,)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """Part of one file. group: its number. name: in messages. start, stop: bytes of lines, row groups of a data file.

    first: number of the first line, from 1; of the first row of a data file, from 0. files: those of a folder. stem: of
    the ids of lines that give none.
    """

    source: SourceConfig
    meaning: Meaning
    group: int
    name: str
    path: str
    cache_root: str = ""
    start: int = 0
    stop: int = 0
    first: int = 0
    files: Any = None
    stem: str = ""


class Sink(Protocol):
    """Takes the records of a piece, and what is known of the piece as a whole.

    unused: fields that nothing takes; a reader adds those that it knows of a whole file. classes: the names of all
    classes, where the file itself says them. is_absent: the file cannot be opened.
    """

    unused: Unused
    classes: tuple[str, ...] | None
    is_absent: bool

    def take(
        self, record: Record | Callable[[], Record], *, where: str, stem: str | None = None, number: int = 0
    ) -> None:
        """Takes a row. record: it, or what gives it, or raises SampleError.

        where: it stands, in messages. stem: the id that its names give, if its fields give none. number: of its line.
        """

    def reject(self, sample_id: str | None, reason: str, message: str, *, kind: Kind = "failed") -> None:
        """Takes a row that cannot be used."""


def one_a_file(path: Path) -> Iterator[tuple[int, int, int]]:  # noqa: ARG001
    """Yields the one run of a file that is read as a whole."""
    yield 0, 0, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """How the files of a kind of source are read.

    read: gives the records of a piece to what takes them; None: rows are listed by column alone. runs: `start`, `stop`
    and `first` of the pieces of a file. files: those that hold rows, with their numbers; None: all of them. pieces: in
    the place of both, where a piece is of many files. recordings: what lists recordings where these are read in another
    way, by columns or a tar a task. holds_media: rows of a data file hold images; other manifests only name them.
    lists_media: the manifests are the images themselves.
    """

    read: Callable[[FilePiece, Sink], None] | None = None
    runs: Callable[[Path], Iterable[tuple[int, int, int]]] = one_a_file
    files: Callable[[SourceConfig, Sequence[SourceFile]], Sequence[tuple[int, SourceFile]]] | None = None
    pieces: Callable[[FilePiece, Sequence[SourceFile]], Iterator[FilePiece]] | None = None
    recordings: RecordingLister | None = None
    holds_media: bool = False
    lists_media: bool = False

    def pieces_of(
        self, source: SourceConfig, files: Sequence[SourceFile], *, meaning: Meaning, cache_root: str
    ) -> Iterator[FilePiece]:
        """Yields the pieces of a source, in the order of its files."""
        whole = FilePiece(source=source, meaning=meaning, group=0, name="", path="", cache_root=cache_root)
        if self.pieces is not None:
            yield from self.pieces(whole, files)
            return
        for group, file in enumerate(files) if self.files is None else self.files(source, files):
            stem = storable(path_stem(file.name))
            own = replace(whole, group=group, name=meaning.called(file), path=str(file.path), stem=stem)
            yield from (
                replace(own, start=start, stop=stop, first=first) for start, stop, first in self.runs(file.path)
            )


def reader_of(source: SourceConfig) -> RowReader:
    """Returns the reader of a source's kind."""
    reader: RowReader = resolve_name(SOURCE_KINDS[source.kind].reader)
    return reader


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingLister:
    """How rows that are items themselves are listed.

    list: the rows that the manifests name, by column; None: they are read record by record. locate: what the files of a
    task tell of its rows. group: whose items the rows are, None: of texts. read: gives their records, where those are
    others than the reader's. has_index: `list` takes the cache root too, under which it keeps an index. in_tars: clips
    are members of tars. lists_tars: the manifests name tars alone, and only `locate` knows their rows. by_file: shards
    are cut by the files of the items.
    """

    list: Callable[..., Manifest] | None = None
    locate: Callable[[LocateTask], Located]
    group: Group | None = "audio"
    read: Callable[[FilePiece, Sink], None] | None = None
    has_index: bool = False
    in_tars: bool = False
    lists_tars: bool = False
    by_file: bool = False

    def needs(self, task: LocateTask, *, is_hashed: bool) -> Sequence[str]:
        """Returns the files that a task opens: a tar unless its index alone will do, clips of unknown duration.

        is_hashed: and a tar whose hash the node does not know: it is needed soon.
        """
        is_unknown = pc.is_nan(task.rows["duration_s"])
        unknown = task.rows.filter(is_unknown)
        if self.in_tars:
            path = task.paths[task.group]
            is_enough = not self.lists_tars and not len(unknown) and has_index(path, cache_root=task.cache_root)
            return [path] if not is_enough or (is_hashed and not is_hash_known(path)) else []
        unknown = task.rows.filter(pc.or_(is_unknown, pc.equal(task.rows["size"], UNLOCATED)))
        paths = task.paths if len(unknown) else {}
        return [paths[number] for number in pc.unique(unknown["file"]).to_pylist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateTask:
    """The rows of one source file, or a run of rows whose media are files of their own.

    group: its number. name: of the source file. numbers, files: of the files to open, these as arrow's bytes. rows:
    columns of ROW_SCHEMA that a kind asks for; empty where only the tar tells the rows. column: that holds the audio of
    an `hf` source. keep: the fields of `source.keep_columns`, sorted.
    """

    group: int
    name: str
    numbers: tuple[int, ...]
    files: Any
    rows: pa.Table
    cache_root: str
    column: str = ""
    keep: tuple[str, ...] = ()

    @property
    def paths(self) -> dict[int, str]:
        """The paths by `file` number, made when they are asked for: tasks of millions of files wait together."""
        return dict(zip(self.numbers, map(os.fsdecode, self.files.to_pylist()), strict=True))

    def tar_index(self) -> TarIndex | UnreadableTar:
        """Returns the index of the task's tar, or why there is none."""
        return tar_index(self.paths[self.group], cache_root=self.cache_root)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The result of a task. rows: `row` and the columns known now, of the rows that are left. failed: the others.

    absent: numbers of files that cannot be opened. unused: rows by field of their JSON that nothing takes.
    """

    rows: pa.Table
    failed: pa.Table
    absent: tuple[int, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Failures:
    """The rows of a task that cannot be used, gathered one by one: values of REJECTED_SCHEMA."""

    found: list[tuple[int, str, str, str, str]] = field(default_factory=list)

    def add(self, row: int, sample_id: str, reason: str, message: str, *, kind: str = "failed") -> None:
        """Notes one row."""
        self.found.append((row, storable(sample_id), kind, reason, storable(message)))

    def table(self) -> pa.Table:
        """Returns them as a table of REJECTED_SCHEMA."""
        return table_of(self.found, REJECTED_SCHEMA)


def cuts_of(group: Array, step: int) -> list[tuple[int, int, int]]:
    """Returns (group, start, stop) of every run of rows of one group, none longer than `step`."""
    if not len(group):
        return []
    borders = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
    return [
        (int(group[first]), start, min(start + step, last))
        for first, last in itertools.pairwise(borders)
        for start in range(first, last, step)
    ]
