"""What a kind of recordings is: it lists rows, and finds the media of one source file a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceConfig
from forebay.preprocess.sources.members import UnreadableTar, tar_index
from forebay.preprocess.sources.rows import REJECTED_SCHEMA, Manifest, reduced, rejections, storable
from forebay.tar.members import TarIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateTask:
    """The rows of one source file, or a run of rows whose media are files of their own.

    group: its number. name: of the source file. paths: by `file` number, the files to open. rows: columns of ROW_SCHEMA
    that a kind asks for; empty where only the tar tells the rows. column: that holds the audio of an `hf` source.
    """

    group: int
    name: str
    paths: dict[int, str]
    rows: pa.Table
    cache_root: str
    column: str = ""

    def with_rows(self, rows: pa.Table) -> LocateTask:
        """Returns the task for other rows."""
        return replace(self, rows=rows)

    def tar_index(self) -> TarIndex | UnreadableTar:
        """Returns the index of the task's tar, or why there is none."""
        return tar_index(self.paths[self.group], cache_root=self.cache_root)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What a task found. rows: `row` and the columns that are known now, of the rows that are left. failed: the others.

    absent: numbers of files that cannot be opened. unused: rows by field of their JSON that nothing takes.
    """

    rows: pa.Table
    failed: pa.Table
    absent: tuple[int, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Failures:
    """The rows of a task that cannot be used, gathered one by one."""

    rows: list[int] = field(default_factory=list)
    sample_ids: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def add(self, row: int, sample_id: str, reason: str, message: str, *, kind: str = "failed") -> None:
        """Notes one row."""
        self.rows.append(row)
        self.sample_ids.append(storable(sample_id))
        self.reasons.append(reason)
        self.messages.append(storable(message))
        self.kinds.append(kind)

    def table(self) -> pa.Table:
        """Returns them as a table of REJECTED_SCHEMA."""
        columns = [self.rows, self.sample_ids, self.kinds, self.reasons, self.messages]
        return pa.table(
            [pa.array(c, f.type) for c, f in zip(columns, REJECTED_SCHEMA, strict=True)], schema=REJECTED_SCHEMA
        )


def located(task: LocateTask, columns: dict[str, Any], failures: Failures, *, absent: Sequence[int] = ()) -> Located:
    """Returns the columns of a task's rows, without the rows that failed."""
    table = pa.table({"row": task.rows["row"], **columns})
    if failures.rows:
        bad = np.isin(task.rows["row"].to_numpy(), failures.rows)
        table = table.filter(pa.array(~bad))
    return Located(rows=table, failed=failures.table(), absent=tuple(absent))


def all_failed(task: LocateTask, tar: UnreadableTar) -> Located:
    """Returns a task's rows as failed, all because their tar cannot be read."""
    rows = task.rows
    failed = rejections(rows["row"], rows["sample_id"], kind="failed", reason=tar.reason, message=tar.message)
    empty = rows.select(["row"]).slice(0, 0)
    return Located(rows=empty, failed=failed, absent=(task.group,) if tar.absent else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechKind:
    """How sources of one kind are read.

    list: the rows that the manifests name. locate: what the files of a task tell of its rows.
    in_tars: clips are members of tars. lists_tars: the manifests name tars alone, and only `locate` knows their rows.
    """

    list: Callable[[SourceConfig], Manifest]
    locate: Callable[[LocateTask], Located]
    in_tars: bool = False
    lists_tars: bool = False
