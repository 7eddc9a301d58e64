"""A record of a file, the row that it becomes, and what says so: a meaning.

A reader gives records whatever they mean, and a meaning is a class with a line in a table: `MEANINGS` of
`forebay.config.data`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from forebay.config.data import MEANINGS, MeaningFacts, SourceColumns, SourceConfig
from forebay.errors import SampleError
from forebay.rows.manifest import LISTS, WHOLE_FILE
from forebay.rows.named_files import shown_name, usable_name
from forebay.store.layout import Group
from forebay.store.source_files import SourceFile


class MediaPlace(NamedTuple):
    """Where a recording or an image lies. run: of places that are read by one task: a row group, a stretch of a tar."""

    path: str | None = None
    member: str = ""
    offset: int = 0
    size: int = WHOLE_FILE
    run: int = 0


class Record(NamedTuple):
    """A row as its file has it.

    media: what the row is of, a place in the file, the name of another file, or None for one that is missing; left out:
    the fields name it. kept: the values that are kept, where they are not among the fields. nested: fields whose text
    is JSON.
    """

    fields: dict[str, Any]
    media: Sequence[MediaPlace | str | None] | None = None
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
    def own(self) -> Group | None:
        """The group of which each row is an item itself; None: rows have none, or list all that they have."""
        return next((group for group in self.facts.groups if group not in LISTS), None)

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


def file_place(written: str | MediaPlace, home: Path | None = None, *, of: str = "an image") -> MediaPlace:
    """Returns the place of an item, of a name that of the file. home: as `usable_name` has it.

    Raises SampleError `missing_file` for no name.
    """
    place = MediaPlace(path=written) if isinstance(written, str) else written
    if place.path is not None and (problem := usable_name(place.path, home)) is not None:
        raise SampleError("missing_file", f"the name of {of} {problem}")
    return place


def meaning_named(name: str) -> Meaning:
    """Returns one of `MEANINGS`."""
    meaning: Meaning = resolve_name(MEANINGS[name].target)(MEANINGS[name])
    return meaning
