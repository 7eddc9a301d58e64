"""The record of each run of a build while it works, its rate, and the one driver of a build on a cluster.

A record is a small file below the workspace, read by `forebay status`. No run ever reads the record of another: a
record decides nothing, and where it cannot be written the build goes on. A second driver would be right, and do the
same work twice on many nodes, so it is refused. A build by the processes of one machine may go on beside a driver: they
share the work by the locks of the shards.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from forebay.errors import BuildError
from forebay.store.files import is_running, temporary_name, this_place, write_bytes
from forebay.store.layout import Group, is_group_name
from forebay.store.shared_disk import try_alone

Point = tuple[float, int, int]
"""A time, and the shards and rows that a run had made until then."""
WINDOW_S = 300.0
"""The last minutes, over which a rate is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRate:
    """The rate of all runs of a build in a second. window_s: the seconds that it was taken over."""

    shards: float = 0.0
    rows: float = 0.0
    window_s: float = 0.0


def rate_of(histories: Iterable[Sequence[Point]], *, now: float, window_s: float = WINDOW_S) -> BuildRate:
    """Returns what runs have made in the last `window_s` seconds, a second; a build that is younger counts its age.

    histories: of each run its points in their order, the first from before its first shard.
    """
    inside = [history for history in histories if history and history[-1][0] > now - window_s]
    if not inside:
        return BuildRate()
    since = max(now - window_s, min(history[0][0] for history in inside))
    elapsed_s = now - since
    if elapsed_s <= 0:  # the clock of the machine that wrote it is ahead of this one
        return BuildRate()
    made = [(history[-1], _at(history, since)) for history in inside]
    shards = sum(max(0.0, last[1] - first[0]) for last, first in made)
    rows = sum(max(0.0, last[2] - first[1]) for last, first in made)
    return BuildRate(shards=shards / elapsed_s, rows=rows / elapsed_s, window_s=elapsed_s)


def _at(history: Sequence[Point], time_s: float) -> tuple[float, float]:
    """Returns the shards and rows of a run at a time, as if they had come evenly between two points."""
    before = history[0]
    for point in history:
        if point[0] >= time_s:
            between = point[0] - before[0]
            share = (time_s - before[0]) / between if between > 0 and time_s > before[0] else 0.0
            return before[1] + share * (point[1] - before[1]), before[2] + share * (point[2] - before[2])
        before = point
    return float(before[1]), float(before[2])


def seconds_left(left: float, a_second: float) -> float | None:
    """Returns how long the rest takes; None where nothing moves."""
    if left <= 0:
        return 0.0
    return left / a_second if a_second > 0 else None


def compressed(numbers: Iterable[int]) -> str:
    """Returns numbers as `sbatch --array` takes them: sorted, those in a row as a range: `0-3,7,12-13`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


HEARTBEAT_S = 20.0
"""A run that works says so at least this often."""
LOST_S = 180.0
"""A run that has said nothing for this long is taken for lost."""
_LEAST_S = 3.0
"""Between two writings: a store of many nodes is not to be asked for every shard."""
_POINT_S = 15.0
_FOLDER, _ENDING = "parts", ".run"
State = Literal["running", "done", "failed", "interrupted", "lost"]


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """One run of a build: of one part of it, or of all of it.

    part: (i, n) of `--shards i::n`; None: all of it. place: what process numbers are unique in. job: Slurm's, with the
    task of an array: `123_4`. log: the file that the run writes its messages to, if it is one. started, last_sign: in
    seconds since 1970, by the clock of `host`.
    samples, shards: those of the whole build; shards of one group, of which `groups` are the names.
    to_make, rows_to_make: what was missing of this run's shards; made, rows: what of this it has made. kept, linked:
    shards that were there. under_way: rows of shards that are not finished. unit: what a row is called.
    history: `Point`s of the last minutes.
    """

    runner: str
    host: str
    place: str
    pid: int
    started: float
    last_sign: float
    state: State = "running"
    part: tuple[int, int] | None = None
    job: str | None = None
    log: str | None = None
    error: str | None = None
    samples: int = 0
    shards: int = 0
    groups: tuple[Group, ...] = ()
    to_make: int = 0
    made: int = 0
    kept: int = 0
    linked: int = 0
    rows_to_make: int = 0
    rows: int = 0
    under_way: int = 0
    unit: str = "sample"
    history: tuple[Point, ...] = field(default=(), repr=False)

    def seen(self, now: float) -> PartRecord:
        """Returns the record as it is to be read now: one whose process is gone, or silent, is lost."""
        is_gone = self.place == this_place() and not is_running(self.pid)
        is_lost = self.state == "running" and (is_gone or now - self.last_sign > LOST_S)
        return replace(self, state="lost") if is_lost else self


class PartLog:
    """Writes the record of a run while the `with` block works; the record then says how the block ended."""

    def __init__(self, workspace: Path, *, part: tuple[int, int] | None, runner: str | None = None, **facts: Any):
        """runner: who runs this; None: this process, which a job of Slurm may have started. facts: of the record."""
        now = time.time()
        self.record = PartRecord(
            runner=runner or ("slurm" if "SLURM_JOB_ID" in os.environ else "local"),
            host=socket.gethostname(),
            place=this_place(),
            pid=os.getpid(),
            started=now,
            last_sign=now,
            part=part,
            job=_job(os.environ),
            log=_log(),
            history=((now, 0, 0),),
            **facts,
        )
        self._label = label = "all" if part is None else f"{part[0]}-of-{part[1]}"
        self._folder = workspace / _FOLDER
        self._path = self._folder / f"{label}.{this_place()}-{os.getpid():x}{_ENDING}"
        self._is_written = True
        self._under_way: Callable[[], int] = lambda: 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="forebay-part", daemon=True)

    def __enter__(self) -> PartLog:
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            self._forget_ended()
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        state: State = "done"
        if kind is not None:
            state = "failed" if issubclass(kind, Exception) else "interrupted"
        text = None if error is None else (str(error).strip() or kind.__name__ if kind else "").splitlines()[0]
        self._set(state=state, error=None if text is None else text[:500])
        self._write()

    def begin(
        self, *, to_make: int, rows_to_make: int, unit: str, kept: int, linked: int, under_way: Callable[[], int]
    ) -> None:
        """Notes what is to be made, before the first shard. under_way: says how many rows of it are done by now."""
        self._under_way = under_way
        self._set(to_make=to_make, rows_to_make=rows_to_make, unit=unit, kept=kept, linked=linked)
        self._write()

    def made(self, *, rows: int, by_this_run: bool) -> None:
        """Notes a finished shard, with its rows if they are those that are counted; it is written within seconds."""
        counted = {"made": self.record.made + 1} if by_this_run else {"kept": self.record.kept + 1}
        self._set(**counted, rows=self.record.rows + rows)

    def _set(self, **values: Any) -> None:
        with self._lock:
            self.record = replace(self.record, **values)
            self._is_written = False

    def _beat(self) -> None:
        while not self._stop.wait(_LEAST_S):
            if not self._is_written or time.time() - self.record.last_sign >= HEARTBEAT_S:
                self._write()

    def _write(self) -> None:
        with self._lock:
            now, under_way = time.time(), self._under_way() if self.record.state == "running" else 0
            history = _extended(self.record.history, (now, self.record.made, self.record.rows + under_way))
            self.record = replace(self.record, last_sign=now, history=history, under_way=under_way)
            self._is_written = True
            data = json.dumps(asdict(self.record)).encode("ascii")
        aside = temporary_name(self._path)
        # Not fsynced: after a crash of the machine the run is lost, whatever its record says.
        with contextlib.suppress(OSError):
            try:
                aside.write_bytes(data)
                os.replace(aside, self._path)
            except OSError:
                aside.unlink()

    def _forget_ended(self) -> None:
        """Removes what earlier runs of the same part said; those that may still work are left."""
        for path in self._folder.glob(f"{self._label}.*{_ENDING}"):
            found = _read(path)
            if found is None or found.seen(time.time()).state != "running":
                path.unlink(missing_ok=True)


def read_parts(workspace: Path, *, now: float) -> list[PartRecord]:
    """Returns what the runs of a build say of themselves, oldest first; what cannot be read is left out."""
    try:
        with os.scandir(workspace / _FOLDER) as entries:
            paths = [Path(entry.path) for entry in entries if entry.name.endswith(_ENDING)]
    except OSError:
        return []
    found = [record for record in map(_read, paths) if record is not None]
    return sorted((record.seen(now) for record in found), key=lambda record: record.started)


def _read(path: Path) -> PartRecord | None:
    known = {each.name for each in fields(PartRecord)}
    try:
        # By the clock of the file system too: that of the machine that wrote it may be behind.
        written = path.stat().st_mtime
        document = {name: value for name, value in json.loads(path.read_bytes()).items() if name in known}
        part = document.pop("part", None)
        named = document.pop("groups", ())
        groups = tuple(str(group) for group in named if is_group_name(group))
        history = tuple((float(at), int(shards), int(rows)) for at, shards, rows in document.pop("history", ()))
        numbers = None if part is None else (int(part[0]), int(part[1]))
        record = PartRecord(**document, part=numbers, groups=groups, history=history)
        return replace(record, last_sign=max(record.last_sign, written))
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None


def _extended(history: tuple[Point, ...], point: Point) -> tuple[Point, ...]:
    """Returns the points of the last minutes with another one, which replaces one that is only seconds old."""
    kept = history[:-1] if len(history) > 1 and history[-1][0] - history[-2][0] < _POINT_S else history
    first = max((i for i, known in enumerate(kept) if known[0] <= point[0] - 2 * WINDOW_S), default=0)
    return (*kept[first:], point)


def _job(environment: Mapping[str, str]) -> str | None:
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


def _log() -> str | None:
    """Returns the file that standard error goes to, None where that is a terminal or a pipe."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None


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
