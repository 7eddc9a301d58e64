"""What the speech and the vision-language line have of their own; all else of a build is shared by both.

Columns of few different strings, a number a row: reasons and languages of millions of rows are no Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from forebay.preprocess.cut import Cut
from forebay.preprocess.listing import Listing
from forebay.preprocess.speech.samples import Read, Values
from forebay.preprocess.workspace import Failure
from forebay.steps.recipe import AnyRecipe
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.shard import Shard, ShardEntry
from forebay.store.source_files import SourceFile

if TYPE_CHECKING:
    from forebay.preprocess.shard_task import ShardTask

Finished = Mapping[Group, Sequence[tuple[Path, ShardEntry]]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Every row of every text shard, in order, which is that of the listing: what `assemble` decides about.

    slots: int64 [rows]. reasons: why a row is no sample, empty where it is one. languages: empty where a row has none.
    lengths: int32 [names, rows], as the line's `length_names`. failures: the bad samples among them that no receipt lists.
    """

    slots: Array
    reasons: Coded
    languages: Coded
    lengths: Array
    failures: tuple[Failure, ...] = ()


class Line(Protocol):
    """The steps of a config and what they make. Picklable and hashable: a worker keeps what it loaded for one."""

    @property
    def recipe(self) -> AnyRecipe:
        """The steps."""
        ...

    @property
    def max_sample_bytes(self) -> int:
        """Of one encoded recording or image."""
        ...

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of fields that its samples have, "text" among them."""
        ...

    @property
    def length_names(self) -> tuple[str, ...]:
        """What `lengths.npy` holds a row of."""
        ...

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns every field, media first, without the `failure` field that shards add."""
        ...

    def shard_rows(self, rows_per_shard: int) -> int:
        """Returns how many rows a shard holds at most. rows_per_shard: `layout.rows_per_shard`."""
        ...

    def cuts(self, listing: Listing, *, probe: Mapping[Group, str], rows_per_shard: int) -> Iterator[Cut]:
        """Yields every shard with its keys. rows_per_shard: `layout.rows_per_shard`."""
        ...

    def task_rows(self, listing: Listing, cut: Cut, group: Group) -> tuple[tuple[SourceFile, ...], pa.Table]:
        """Returns the rows of one shard, one an element of it, and the files that they use."""
        ...

    def media_samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        """Yields the media fields of every row in order; a row that fails yields its table fields and `failure`, `message`."""
        ...

    def text_samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        """Yields the text fields of every row in order, in the same way. names: of the source files, by `file`."""
        ...

    def used_by(self, listing: Listing, task: ShardTask, position: int) -> tuple[str, list[str]]:
        """Returns what to call one row of a task, and the ids of the samples that need it."""
        ...

    def constants(self) -> dict[str, Any]:
        """Returns what collating needs and is equal for all samples: kinds, rates, token ids, tables."""
        ...

    def probe(self, group: Group) -> str:
        """Returns the xxh3-128 of what a group's steps give for small built-in inputs."""
        ...

    def estimate_bytes(self, listing: Listing) -> int:
        """Returns the expected size of the cache in bytes, from what the listing knows."""
        ...

    def read_rows(self, finished: Finished, listing: Listing) -> Rows:
        """Returns every row of finished shards, which are those of a listing in its order."""
        ...

    def summary(self, listing: Listing, rows: Rows, keep: Array) -> dict[str, Any]:
        """Returns what metadata.json says of the samples that are kept, beside their number."""
        ...


@dataclass(frozen=True, slots=True)
class Coded:
    """A column of strings: `names[codes[i]]` is that of row i, `names[0]` is empty. codes: int32 [rows]."""

    names: tuple[str, ...]
    codes: Array

    def counts(self, chosen: Array | None = None, weights: Array | None = None) -> Array:
        """Returns how many rows have each name, or the sum of their weights. chosen: bool [rows], those that count."""
        rows = slice(None) if chosen is None else chosen
        return np.bincount(self.codes[rows], None if weights is None else weights[rows], len(self.names))


@dataclass(slots=True)
class Coder:
    """Numbers for strings, in order of first appearance, one for all shards that it is asked about; 0 is the empty one."""

    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    def number(self, name: str) -> int:
        """Returns the number of a string."""
        return self._numbers.setdefault(name, len(self._numbers))

    def column(self, shard: Shard, name: str) -> Array:
        """Returns the numbers of a shard's string field, int32 [rows], after checking its CRC-32."""
        values, offsets = shard.column(name)
        rows = len(offsets) - 1
        if not len(values):
            return np.zeros(rows, np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        encoded = pa.Array.from_buffers(pa.large_binary(), rows, buffers).dictionary_encode()
        texts = (data.decode("utf-8", "surrogateescape") for data in encoded.dictionary.to_pylist())
        numbers: Array = np.array([self.number(text) for text in texts], np.int32)
        return np.asarray(numbers[encoded.indices.to_numpy()])

    def coded(self, codes: Array) -> Coded:
        """Returns a column of numbers that were given here."""
        return Coded(tuple(self._numbers), codes)
