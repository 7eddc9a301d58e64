"""When the readers of this node need each shard next: what they tell each other, so that the right one is evicted.

Each reader has a small file under `<shard_dir>/readers/`, mapped by it and read by whoever makes room. Its owner holds
a lock on it, so a file without a lock is of a dead reader, and counts for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forebay.store.layout import Ints

FOLDER = "readers"
NEVER = 1 << 62
"""The step of a shard that no step which is known needs."""


class ReaderUses:
    """One reader's file. next_use: int64 [num_shards], the step that needs each shard next. now: the step it is at."""

    def __init__(self, node_folder: Path, mirror: str, *, num_shards: int) -> None:
        """mirror: name of the mirror's folder."""
        folder = node_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.path = folder / f"{mirror}.{uuid.uuid4().hex}.uses"
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # taken for that of a dead reader before it was locked
        os.ftruncate(self._descriptor, 8 * (num_shards + 1))
        self._values = np.frombuffer(mmap.mmap(self._descriptor, 0), np.int64)
        self.next_use: Ints = self._values[1:]
        self.next_use[:] = NEVER

    @property
    def now(self) -> int:
        """The step that the reader is at."""
        return int(self._values[0])

    @now.setter
    def now(self, step: int) -> None:
        self._values[0] = step

    def close(self) -> None:
        """Takes the file away: this reader needs nothing any more."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._descriptor)


def distances(node_folder: Path, mirror: str) -> Ints | None:
    """Returns in how many steps each shard of a mirror is needed by the reader that needs it first.

    int64 [num_shards]. NEVER: no step that is known needs it. None: no reader of the mirror tells. Files of dead
    readers are removed.
    """
    found: Ints | None = None
    for values in _living(node_folder / FOLDER, mirror):
        if len(values) < 2 or (found is not None and len(values) != len(found) + 1):
            continue  # its reader is about to begin
        steps = np.where(values[1:] >= NEVER, NEVER, np.maximum(values[1:] - values[0], 0))
        found = steps if found is None else np.minimum(found, steps)
    return found


def _living(folder: Path, mirror: str) -> Iterator[Ints]:
    for path in folder.glob(f"{glob.escape(mirror)}.*.uses"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _is_locked(descriptor):
                    data = os.read(descriptor, os.fstat(descriptor).st_size)
                    yield np.frombuffer(data[: len(data) // 8 * 8], np.int64)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
