"""The one driver of a build on a cluster: it says who it is in the folder of the build, and a second one is refused.

Two drivers would be right, and do the same work twice on many nodes. A build by the processes of one machine may go on
beside a driver: they share the work by the locks of the shards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.errors import BuildError
from forebay.store.files import write_bytes

logger = logging.getLogger(__name__)

_LOCK = "driver.lock"
_RECORD = "driver.json"
_BEAT_S = 20.0
_DEAD_S = 4 * _BEAT_S
"""A driver that has not been heard of for so long is gone, where a file system has no locks to tell."""


@contextlib.contextmanager
def sole_driver(folder: Path, *, config: str) -> Iterator[str]:
    """Makes this process the driver of the build in a folder within the block, and yields what tells it from others.

    Raises BuildError, with host, process and time, where there is another driver. config: the config file.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        has_locks = _locked(descriptor, folder, config)
        other = None if has_locks else _living(folder)
        if other is not None:
            raise BuildError(_two(other, config))
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.time(),
            "token": uuid.uuid4().hex,
        }
        write_bytes(folder / _RECORD, json.dumps(record).encode("ascii"))
        with _beating(folder / _RECORD) if not has_locks else contextlib.nullcontext():
            yield str(record["token"])
        if not has_locks and token_in(folder) == record["token"]:
            (folder / _RECORD).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def token_in(folder: Path) -> str | None:
    """Returns what the last driver of a build wrote into its folder, None where there is nothing."""
    record = _record(folder)
    return None if record is None else str(record["token"])


def _locked(descriptor: int, folder: Path, config: str) -> bool:
    """Takes the lock; returns False where the file system has none. Raises BuildError where another driver has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BuildError(_two(_record(folder), config)) from err
        return False
    return True


def _living(folder: Path) -> dict[str, Any] | None:
    """Returns the record of a driver that was heard of lately, by the clock of the file system."""
    record = _record(folder)
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as now:
        if os.fstat(now.fileno()).st_mtime - (folder / _RECORD).stat().st_mtime <= _DEAD_S:
            return record
    return None


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads((folder / _RECORD).read_bytes())
        return {name: document[name] for name in ("host", "pid", "since", "token")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Touches a file again and again while the block runs."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="driver", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _two(other: dict[str, Any] | None, config: str) -> str:
    who = "another process"
    if other is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(other["since"])))
        who = f"process {other['pid']} on {other['host']}, since {since}"
    return (
        f"this build has a driver already ({who}): wait until it is done, or end it there (Ctrl-C, or kill), and what "
        f"it finished is kept; then run: forebay preprocess {config} --runner ray. A driver that was lost is forgotten "
        f"at once, on a file system without locks after {_DEAD_S:.0f} s"
    )
