"""The second stage as tasks: what finding the media of one source file needs, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from forebay.config.data import SourceKind
from forebay.preprocess.sources.rows import REJECTED_SCHEMA, rejections, storable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateTask:
    """The rows of one source file, or a run of rows whose media are files of their own.

    group: its number. name: of the source file. paths: by `file` number, the files to open. rows: columns of ROW_SCHEMA
    that the kind asks for; empty for `webdataset`, whose rows are only known from the tar.
    """

    kind: SourceKind
    group: int
    name: str
    paths: dict[int, str]
    rows: pa.Table
    cache_root: str
    audio_column: str = "audio"

    def with_rows(self, rows: pa.Table) -> LocateTask:
        """Returns the task for other rows."""
        return replace(self, rows=rows)

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


def all_failed(task: LocateTask, *, reason: str, message: str, absent: bool) -> Located:
    """Returns a task's rows as failed, all for one reason."""
    rows = task.rows
    failed = rejections(rows["row"], rows["sample_id"], kind="failed", reason=reason, message=message)
    empty = rows.select(["row"]).slice(0, 0)
    return Located(rows=empty, failed=failed, absent=(task.group,) if absent else ())


def reduced(task: DataclassInstance) -> tuple[Any, ...]:
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
