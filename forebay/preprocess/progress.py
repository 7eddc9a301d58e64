"""The bar of a build: clips or images, how many a second, hours done, failures."""

from __future__ import annotations

import sys
from types import TracebackType

import numpy as np
from tqdm import tqdm

from forebay.preprocess.receipt import Receipt
from forebay.preprocess.shard_task import ShardTask


class Progress:
    """A tqdm bar over media rows on standard error; counts them when its media shard is finished."""

    def __init__(self, *, total: int, unit: str, shown: bool) -> None:
        self._bar = tqdm(total=total, unit=unit, desc="preprocess", disable=not shown or not total, file=sys.stderr)
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
        if task.group == "media":
            if "duration_s" in task.rows.column_names:
                self._hours += float(np.nansum(task.rows["duration_s"].to_numpy())) / 3600
            self._bar.update(len(task.rows))
        hours = f"{self._hours:.2f} h, " if self._hours else ""
        self._bar.set_postfix_str(f"{hours}{self._failed} left out", refresh=False)
