"""Functions that workers on other nodes import by name, in place of `make_shard`."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.task_map import mark

SLOW_S = 1.0


@dataclass(frozen=True)
class Within:
    """`make_shard` with what the environment of a node would say: its workers were started before the test."""

    environment: dict[str, str]

    def __call__(self, task: ShardTask) -> Any:
        os.environ.update(self.environment)
        return make_shard(task)


def slow_make_shard(task: ShardTask) -> Any:
    """A driver that is killed in the middle leaves shards to be made."""
    time.sleep(SLOW_S)
    return make_shard(task)


def crashing_make_shard(task: ShardTask) -> Any:
    """The decoder of one clip kills its process."""
    ids = task.rows["sample_id"].to_pylist()
    if task.group == "media" and "a6" in ids:
        mark(ids.index("a6"))
        os.kill(os.getpid(), signal.SIGSEGV)
    return make_shard(task)


def pause(seconds: float) -> None:
    """A task that a node may be lost in."""
    time.sleep(seconds)
