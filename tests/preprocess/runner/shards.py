"""Functions that workers on other nodes import by name, in place of `make_shard`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from forebay.preprocess.shard_task import ShardTask, make_shard
from forebay.preprocess.worker import mark

SLOW_S = 0.5


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


def lost_raw_data(task: ShardTask) -> Any:
    """A table or tar that is not there any more, as far as the node sees."""
    raise FileNotFoundError(2, "No such file or directory", str(task.files[0].path))


def node_of(seconds: float) -> str:
    """Returns the Ray node that this runs on, after a while."""
    time.sleep(seconds)
    return os.environ["RAY_NODE_ID"] if "RAY_NODE_ID" in os.environ else str(os.getppid())
