"""The bar of a build: clips, images or texts, how many a second; hours done, failures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

import numpy as np
from tqdm import tqdm

from forebay.preprocess.shard_task import ShardTask
from forebay.preprocess.workspace import Receipt
from forebay.store.layout import Group


class Progress:
    """A tqdm bar on standard error; a row counts when its shard is finished.

    One bar: where media are made they take the time, and a second bar would have to move the cursor of the terminal.
    """

    def __init__(self, rows: Mapping[Group, int], *, media_unit: str, shown: bool) -> None:
        """rows: how many are to be made; texts are counted where no media are. media_unit: what a media row is called."""
        self._counted: Group = "media" if rows.get("media") else "text"
        unit = media_unit if self._counted == "media" else "text"
        total = rows[self._counted]
        self._bar = tqdm(total=total, unit=unit, desc="preprocess", disable=not (shown and total), file=sys.stderr)
        self._hours = 0.0
        self._failed = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def shard_done(self, task: ShardTask, receipt: Receipt) -> None:
        """Counts a finished shard."""
        self._failed += len(receipt.failures)
        if task.group == "media" and "duration_s" in task.rows.column_names:
            self._hours += float(np.nansum(task.rows["duration_s"].to_numpy())) / 3600
        if task.group == self._counted:
            self._bar.update(len(task.rows))
        hours = f"{self._hours:.2f} h, " if self._hours else ""
        self._bar.set_postfix_str(f"{hours}{self._failed} left out", refresh=False)
