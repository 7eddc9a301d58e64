"""One task of a build: one shard of one group, named by its key, made by a worker; and the bar that counts tasks.

A task carries its own rows alone. Its files are compared before and after, so that no shard holds what its key does
not say. A shard is written aside, fsynced and renamed. Its receipt comes after it: a receipt means a whole shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.errors import BuildError
from forebay.preprocess.group import ItemGroup, Read
from forebay.preprocess.groups import Groups
from forebay.preprocess.prepared import locked
from forebay.preprocess.stage import Stage
from forebay.preprocess.workspace import Failure, Receipt, load_receipt, save_receipt
from forebay.rows.manifest import reduced
from forebay.rows.media_reader import MediaReader
from forebay.rows.named_files import unchanged_stats
from forebay.store.layout import TEXT, Group
from forebay.store.shard import Columns, shard_fields, write_columns
from forebay.store.source_files import SourceFile
from forebay.terminal import Progress

Made = tuple[Columns, list[Failure]]
_ATTEMPTS = 3
_PATIENCE_S = 1800.0
"""No shard takes as long: who has its lock has died, on a machine whose locks a server of NFS still keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """All that a worker needs to make one shard. `files` by the `file` column of `rows`."""

    group: Group
    key: str
    folder: Path
    rows: pa.Table
    files: Sequence[SourceFile]
    groups: Groups
    max_open_tars: int
    stage: Stage | None = None
    """Where the shard is put instead of left in `folder`, which is of another node then."""

    @property
    def path(self) -> Path:
        """Where the shard stands until the cache is sealed."""
        return self.folder / self.group / f"{self.key}.tdz"

    def __str__(self) -> str:
        return f"{self.group} shard of {self.files[0].name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


def make_shard(task: ShardTask) -> tuple[Receipt, bool]:
    """Returns the receipt of a shard and whether this call made it; one that is whole already is left as it is.

    The lock only keeps two builders from doing the same work: both would write the same bytes, each aside.
    """
    if (stage := task.stage) is not None:
        return stage.made(
            task.group,
            task.key,
            lambda folder: _make(replace(task, folder=folder, files=stage.here(task.files), stage=None)),
        )
    task.path.parent.mkdir(parents=True, exist_ok=True)
    with locked(task.path.with_suffix(".lock"), patience_s=_PATIENCE_S):
        receipt = load_receipt(task.path, task.key)
        if receipt is not None:
            return receipt, False
        return _make(task), True


def _make(task: ShardTask) -> Receipt:
    rows, failures = _rows_of_listed_bytes(task)
    receipt = Receipt(entry=write_columns(task.path, rows, key=task.key), failures=tuple(failures))
    save_receipt(task.path, receipt)
    return receipt


def _rows_of_listed_bytes(task: ShardTask) -> Made:
    """Returns the rows of a shard, read from files that were what the shard's key says from before to after.

    Rows whose files moved meanwhile, if only their times, are made again. Raises BuildError for files that changed,
    also where that made the reading fail.
    """
    if task.group == TEXT:  # made of the listing alone
        return _rows(task)
    for _ in range(_ATTEMPTS):
        before = unchanged_stats(task.files)
        try:
            made = _rows(task)
        finally:
            after = unchanged_stats(task.files)
        if after == before:
            return made
    raise BuildError(
        f"{task.files[0].path}, or another file of its shard, was touched each of {_ATTEMPTS} times that it was read; "
        "finished shards are kept; wait until nothing writes to it, then run: forebay preprocess CONFIG",
        code="FB303",
    )


def _rows(task: ShardTask) -> Made:
    rows = Columns(shard_fields(task.groups.fields(), task.group))
    failures: list[Failure] = []
    for sample_id, values in zip(task.rows["sample_id"].to_pylist(), _samples(task), strict=True):
        if "failure" in values:
            message = values.pop("message")
            failures.append(Failure(sample_id=sample_id, reason=values["failure"], message=message))
        rows.add(values)
    return rows, failures


def _samples(task: ShardTask) -> Iterator[dict[str, Any]]:
    with reading(task) as read:
        yield from task.groups.samples(task.group, task.rows, task.files, read)


@contextlib.contextmanager
def reading(task: ShardTask) -> Iterator[Callable[[ItemGroup], Read]]:
    """Yields what opens the reader of a group's items; readers are closed at the end of the block."""
    with contextlib.ExitStack() as stack:

        def read(group: ItemGroup) -> Read:
            limit, column = group.max_sample_bytes, group.column
            reader = MediaReader(task.files, max_open=task.max_open_tars, max_bytes=limit, column=column)
            return stack.enter_context(reader)

        yield read


class BuildProgress:
    """How far the shards of a build are; a row counts when its shard is finished.

    One bar: where media are made they take the time, and a second bar would have to move the cursor of the terminal.
    """

    def __init__(
        self,
        rows: Mapping[Group, int],
        *,
        groups: Groups,
        shown: bool,
        at_work: Callable[[], Iterable[tuple[Any, int]]] = tuple,
    ) -> None:
        """rows: how many are to be made; texts are counted if no items are. groups: says which are counted.

        at_work: the tasks that are worked on, and how many of their rows are done.
        """
        has_items = bool(rows.get(groups.counted))
        self._counted: Group = groups.counted if has_items else TEXT
        unit = groups.unit if has_items else groups.text.unit
        total = rows[self._counted]
        desc = TEXT if self._counted == TEXT else "preprocess"
        self._bar = Progress(total, unit=unit, desc=desc, is_shown=shown)
        self._bar.under_way = lambda: sum(
            done for task, done in at_work() if getattr(task, "group", "") == self._counted
        )
        self._hours = 0.0
        self._failed = 0

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def shard_done(self, task: ShardTask, receipt: Receipt) -> None:
        """Counts a finished shard."""
        self._failed += len(receipt.failures)
        if "duration_s" in task.rows.column_names:
            self._hours += float(np.nansum(task.rows["duration_s"].to_numpy())) / 3600
        if task.group == self._counted:
            self._bar.update(len(task.rows))
        hours = f"{self._hours:.2f} h, " if self._hours else ""
        self._bar.say(f"{hours}{self._failed} left out")
