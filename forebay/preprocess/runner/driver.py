"""The one driver of a build on a cluster: it says who it is in the folder of the build, and a second one is refused.

Two drivers would be right, and do the same work twice on many nodes. A build by the processes of one machine may go on
beside a driver: they share the work by the locks of the shards.
"""

from __future__ import annotations

import contextlib
import json
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
from forebay.store.shared_disk import try_alone

_LOCK = "driver.lock"
_RECORD = "driver.json"
_BEAT_S = 10.0
_DEAD_S = 4 * _BEAT_S
"""A driver of another machine that has not been heard of for so long is gone."""


@contextlib.contextmanager
def sole_driver(folder: Path, *, config: str) -> Iterator[str]:
    """Makes this process the driver of the build in a folder within the block, and yields what tells it from others.

    Raises BuildError, with host, process and time, where there is another driver. A lock tells of one, and where a file
    system has none, or one for each machine, the time of the record. config: the config file.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if try_alone(descriptor) == "taken" or _is_living(folder):
            raise BuildError(_two(_record(folder), config), code="FB310")
        token = uuid.uuid4().hex
        record = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time(), "token": token}
        write_bytes(folder / _RECORD, json.dumps(record).encode("ascii"))
        try:
            with _beating(folder / _RECORD):
                yield token
        finally:
            if token_in(folder) == token:
                (folder / _RECORD).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def token_in(folder: Path) -> str | None:
    """Returns what the last driver of a build wrote into its folder, None where there is nothing."""
    record = _record(folder)
    return None if record is None else str(record["token"])


def _is_living(folder: Path) -> bool:
    """Whether a driver was heard of lately, by the clock of the file system; one of this machine is looked for here."""
    record = _record(folder)
    if record is None:
        return False
    if record["host"] == socket.gethostname():
        return record["pid"] != os.getpid() and os.path.exists(f"/proc/{record['pid']}")
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as now:
        return os.fstat(now.fileno()).st_mtime - (folder / _RECORD).stat().st_mtime <= _DEAD_S
    return False


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
        f"it finished is kept; then run: forebay preprocess {config} --runner ray. One that was lost with its machine "
        f"is forgotten {_DEAD_S:.0f} s later"
    )
