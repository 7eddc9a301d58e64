"""The bars of a build: clips or images, and texts, how many a second; hours done, failures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

import numpy as np
from tqdm import tqdm

from forebay.preprocess.receipt import Receipt
from forebay.preprocess.shard_task import ShardTask
from forebay.store.layout import Group


class Progress:
    """A tqdm bar on standard error for each group that has rows to make; a row counts when its shard is finished."""

    def __init__(self, rows: Mapping[Group, int], *, media_unit: str, shown: bool) -> None:
        """rows: how many are to be made. media_unit: what a media row is called."""
        units: Mapping[Group, str] = {"media": media_unit, "text": "text"}
        self._bars = {
            group: tqdm(total=total, unit=units[group], desc="preprocess", disable=not shown, file=sys.stderr)
            for group, total in rows.items()
            if total
        }
        self._hours = 0.0
        self._failed = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bar in self._bars.values():
            bar.close()

    def shard_done(self, task: ShardTask, receipt: Receipt) -> None:
        """Counts a finished shard."""
        self._failed += len(receipt.failures)
        if task.group == "media" and "duration_s" in task.rows.column_names:
            self._hours += float(np.nansum(task.rows["duration_s"].to_numpy())) / 3600
        bar = self._bars[task.group]
        bar.update(len(task.rows))
        hours = f"{self._hours:.2f} h, " if self._hours and task.group == "media" else ""
        bar.set_postfix_str(f"{hours}{self._failed} left out", refresh=False)
