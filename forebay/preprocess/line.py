"""What the speech and the vision-language line have of their own; all else of a build is shared by both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from forebay.config.recipe import AnyRecipe
from forebay.preprocess.coded import Coded
from forebay.preprocess.cut import Cut
from forebay.preprocess.listing import Listing
from forebay.preprocess.receipt import Failure
from forebay.preprocess.samples import Read, Values
from forebay.store.layout import FieldSpec, Group
from forebay.store.shard import ShardEntry
from forebay.store.sources import SourceFile

if TYPE_CHECKING:
    from forebay.preprocess.shard_task import ShardTask

Array = np.ndarray[Any, Any]
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
