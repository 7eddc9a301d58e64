"""The child process of a Ray worker, in which shards are made: a sample that kills it does not take Ray's worker along.

The child stays between the tasks of its Ray worker, has one thread, and ends with it. Nothing here imports more than a
pool needs: what a shard needs is loaded in the child.
"""

from __future__ import annotations

import pickle
import socket
from typing import Any

from forebay.errors import BuildError
from forebay.preprocess.pool import Pool
from forebay.task_map import WorkerDied

_pool: Pool | None = None


def answer(payload: bytes) -> bytes:
    """Returns what came of `function(task)`, given as `pickle.dumps((function, task))`, as the pickle of three parts.

    The name of this machine; what came: done, raised, died; and the result, the exception, or (row, status) of the
    second death.
    """
    global _pool
    if _pool is None:
        _pool = Pool(1)
    try:
        return _pool.map(_answer_of, [payload])[0]
    except WorkerDied as err:
        _pool = None
        return pickle.dumps((socket.gethostname(), "died", (err.position, err.status)))


def _answer_of(payload: bytes) -> bytes:
    host = socket.gethostname()
    try:
        function, task = pickle.loads(payload)  # noqa: S301  of our own driver
        return pickle.dumps((host, "done", function(task)))
    except Exception as err:  # noqa: BLE001  it is raised in the driver
        return pickle.dumps((host, "raised", _as_sent(err)))


def _as_sent(err: Exception) -> Any:
    """Returns an exception as the driver will see it; one that does not survive the way becomes a BuildError."""
    try:
        pickle.loads(pickle.dumps(err))  # noqa: S301
    except Exception:  # noqa: BLE001  of any library
        return BuildError(f"{type(err).__name__}: {err}; finished shards are kept; run the command again")
    return err
