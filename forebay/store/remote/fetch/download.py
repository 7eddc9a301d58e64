"""The downloads of a fetch: threads share files and their segments, and a file that is right gets its name.

A file is downloaded aside, is compared with what the manifest or the store says of it, and is refused by name where it
is something else. What stops a fetch as a whole (a store that is gone, a full disk) is raised.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from forebay.errors import RemoteError, RemoteMissingError, RemoteReplacedError, TarError
from forebay.store.remote.fetch.fetch_content import Expected, judge
from forebay.store.remote.fetch.fetch_folder import FilePart, InTheWayError, TargetFolder, read_pieces
from forebay.store.remote.fetch.fetch_list import FetchListing, FetchOptions
from forebay.store.remote.fetch.fetch_report import FetchCount

_REQUEST = 16 * 1024 * 1024
"""Bytes of a large file that one request brings, where a segment is not larger."""
_ATTEMPTS = 3
_MOST_BY_ETAG = 3
"""Files that an etag alone may refuse before any was proven by one: more, and the store's etags are no MD5s."""
_NO_MD5 = (
    "the store does not give what was put there; or its bucket encrypts with a key of its own, and etags say nothing: "
    "then --ignore-etags"
)
_DAMAGED = "it is damaged, or was replaced: have it put there again"
_NO_RANGES = "Range request not supported"

Examine = Callable[[Path, str, Any], None]
"""Looks into a tar of an evaluation set, given its path, its name and what index.json says; raises TarError."""


@dataclass(eq=False, slots=True)
class _File:
    """A file that is being downloaded.

    left: runs that are not over. problem: what ended one of them. arrived, resumed: bytes that came, and that were
    there before.
    """

    expected: Expected
    part: FilePart
    attempt: int
    left: int = 0
    problem: Exception | None = None
    arrived: int = 0
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    """Segments of a file that one request brings."""

    file: _File
    segments: tuple[int, ...]


@dataclass(slots=True)
class Queue:
    """What is to be done: files to begin with, and runs of those that have begun. Threads share it."""

    files: deque[tuple[Expected, int]]
    runs: deque[_Run] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    beginning: int = 0
    is_stopped: bool = False

    def take(self) -> _Run | tuple[Expected, int] | None:
        """Waits for and returns what is to be done next, None where nothing is left."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_stopped or self.runs or self.files or not self.beginning)
            if self.is_stopped:
                return None
            if self.runs:
                return self.runs.popleft()
            if self.files:
                self.beginning += 1
                return self.files.popleft()
            return None

    def begun(self, runs: list[_Run]) -> None:
        """Adds the runs of a file that has begun."""
        with self.changed:
            self.beginning -= 1
            self.runs.extend(runs)
            self.changed.notify_all()

    def again(self, expected: Expected, attempt: int) -> None:
        """Puts a file back, which is the next one."""
        with self.changed:
            self.files.appendleft((expected, attempt))
            self.changed.notify_all()

    def stop(self) -> None:
        """Ends all threads after the bytes that they have at hand."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()


class _StoppedError(Exception):
    """Another thread has ended the fetch."""


class _RefusedError(Exception):
    """A file is not what it should be. is_etag: an etag alone says so."""

    def __init__(self, message: str, *, is_etag: bool = False) -> None:
        super().__init__(message)
        self.is_etag = is_etag


class Downloads:
    """The downloads: what their threads share."""

    def __init__(
        self, listing: FetchListing, folder: TargetFolder, count: FetchCount, options: FetchOptions, examine: Examine
    ) -> None:
        self.bucket, self.folder, self.count, self.options = listing.bucket, folder, count, options
        self.tars, self.examine = listing.tars, examine
        self.etags_are_md5 = self.bucket.url.scheme == "s3" and options.etags
        self.is_web = self.bucket.url.scheme in ("http", "https")
        self.queue = Queue(deque())
        self.open: set[_File] = set()
        self._by_etag = 0
        self._lock = threading.Lock()

    def run(self, to_come: list[Expected]) -> None:
        """Downloads all files. Raises what stops a fetch as a whole: RemoteError, OSError."""
        self.queue.files.extend((expected, 1) for expected in to_come)
        num_threads = self.bucket.settings.max_concurrent
        try:
            with ThreadPoolExecutor(num_threads) as threads:
                try:
                    for future in as_completed([threads.submit(self._work) for _ in range(num_threads)]):
                        future.result()
                finally:  # an interrupt too
                    self.queue.stop()
        finally:
            for file in self.open:
                file.part.close()

    def _work(self) -> None:
        try:
            while (found := self.queue.take()) is not None:
                if isinstance(found, _Run):
                    self._bring(found)
                else:
                    self._begin(*found)
        except _StoppedError:
            return
        except BaseException:
            self.queue.stop()
            raise

    def _begin(self, expected: Expected, attempt: int) -> None:
        runs: list[_Run] = []
        try:
            file = self._opened(expected, attempt)
            if file is not None:
                runs = self._runs(file)
                file.left = len(runs)
        finally:
            self.queue.begun(runs)
        if file is not None and not runs:
            self._finish(file)

    def _opened(self, expected: Expected, attempt: int) -> _File | None:
        """Returns a file that is to be downloaded; None where that is refused, or nothing is to come."""
        try:
            if not (expected.modified_ns and expected.size_bytes):
                expected = self._known(expected)
            file = _File(expected, self.folder.part(expected, str(self.bucket.url)), attempt)
        except RemoteMissingError as err:
            # An object of no bytes that is not there is `folder/`, which a listing calls `folder`.
            if expected.size_bytes or expected.hashes:
                self._refuse(expected, err)
            return None
        except _RefusedError as err:
            self._refuse(expected, err)
            return None
        with self._lock:
            self.open.add(file)
        return file

    def _known(self, expected: Expected) -> Expected:
        """Returns a file with what the store says of it, of which only a manifest is known, or which has no bytes."""
        info = self.bucket.info(expected.key)
        if info.size_bytes != expected.size_bytes:
            raise _RefusedError(f"the store has {info.size_bytes} bytes, {expected.size_bytes} are wanted")
        return expected.of(info)

    def _runs(self, file: _File) -> list[_Run]:
        missing = file.part.missing()
        if self.is_web and missing:  # in one go: some servers give no ranges
            missing = list(range(missing[0], file.part.num_segments))
        to_come = sum(stop - start for start, stop in map(file.part.bounds, missing))
        self._resumed(file, file.expected.size_bytes - to_come)
        at_once = len(missing) if self.is_web else max(1, _REQUEST // file.part.segment)
        return [_Run(file, segments) for segments in _neighbours(missing, at_once)]

    def _resumed(self, file: _File, size_bytes: int) -> None:
        self.count.resumed(size_bytes - file.resumed)
        file.resumed = size_bytes

    def _bring(self, run: _Run) -> None:
        file = run.file
        try:
            if file.problem is None:
                self._stream(run)
        except (_RefusedError, RemoteMissingError, RemoteReplacedError) as err:
            file.problem = err
        with self._lock:
            file.left -= 1
            is_last = not file.left
        if is_last:
            self._finish(file)

    def _stream(self, run: _Run) -> None:
        try:
            self._stream_once(run)
        except RemoteError as err:
            if not (self.is_web and run.segments[0] and _NO_RANGES in str(err)):
                raise
            self._resumed(run.file, 0)
            self._stream_once(_Run(run.file, tuple(range(run.file.part.num_segments))))

    def _stream_once(self, run: _Run) -> None:
        """Writes the segments of a run, and notes each that is there."""
        part, expected = run.file.part, run.file.expected
        at, end = part.bounds(run.segments[0])[0], part.bounds(run.segments[-1])[1]
        stop = None if end == expected.size_bytes else end
        stream = self.bucket.stream(expected.key, start=at, stop=stop, etag=expected.etag)
        segments, state = deque(run.segments), xxhash.xxh3_64()
        with contextlib.closing(stream):  # type: ignore[type-var]
            for piece in stream:
                if at + len(piece) > end:
                    raise _RefusedError(f"it has more than the {expected.size_bytes} bytes that are wanted")
                part.write(at, piece)
                self._arrived(run.file, len(piece))
                rest = memoryview(piece)
                while rest:
                    taken = rest[: part.bounds(segments[0])[1] - at]
                    state.update(taken)
                    at, rest = at + len(taken), rest[len(taken) :]
                    if at == part.bounds(segments[0])[1]:
                        part.ended(segments.popleft(), state)
                        state = xxhash.xxh3_64()
                if self.queue.is_stopped:
                    raise _StoppedError
        if at != end:
            raise _RefusedError(f"it has {at} bytes, {expected.size_bytes} are wanted")

    def _arrived(self, file: _File, size_bytes: int) -> None:
        with self._lock:
            file.arrived += size_bytes
        self.count.arrived(size_bytes)

    def _finish(self, file: _File) -> None:
        """Gives a file its name, or has it downloaded again, or refuses it."""
        try:
            by = self._checked(file)
            self._publish(file)
        except (_RefusedError, RemoteMissingError, RemoteReplacedError, InTheWayError, TarError) as err:
            self._give_up(file, err)
            return
        finally:
            with self._lock:
                self.open.discard(file)
            file.part.close()
        self.count.add("moved", file.expected.size_bytes, by=by)

    def _checked(self, file: _File) -> str:
        if file.problem is not None:
            raise file.problem
        verdict = judge(file.part.pieces(), file.expected, etags_are_md5=self.etags_are_md5)
        if verdict.problem:
            raise _RefusedError(verdict.problem, is_etag=verdict.by == "etag")
        file.part.trim()
        if file.expected.name in self.tars:
            self._look_into(file.part.path, file.expected.name)
        return verdict.by

    def _look_into(self, path: Path, name: str) -> None:
        try:
            self.examine(path, name, self.tars[name])
        except TarError as err:  # some name the file, and it has another name now
            raise TarError(f"{self.bucket.url}: {str(err).replace(str(path), name)}") from err

    def _publish(self, file: _File) -> None:
        """Gives a file its name, unless another file has had it meanwhile."""
        name, size = file.expected.name, file.expected.size_bytes
        found = self.folder.stat(name)
        if found is not None and not self.options.overwrite:
            with self.folder.open(name) as descriptor:
                is_same = found.st_size == size and _same(read_pieces(descriptor, 0, size), file.part.pieces())
            if not is_same:
                raise InTheWayError(f"{self.folder.path / name} has come meanwhile, with other bytes; try --overwrite")
        file.part.publish()

    def _give_up(self, file: _File, err: Exception) -> None:
        """Has a file downloaded once more where that may help, else refuses it."""
        file.part.remove()
        self.count.arrived(-file.arrived)
        self._resumed(file, 0)
        again = self._again(file, err)
        if again is None:
            self._refuse(file.expected, err)
        else:
            self.queue.again(again, file.attempt + 1)

    def _again(self, file: _File, err: Exception) -> Expected | None:
        """Returns what to download in place of a file that is not right; None where that would not help."""
        if isinstance(err, _RefusedError):
            return file.expected if file.attempt == 1 else None
        if not isinstance(err, RemoteReplacedError) or file.attempt == _ATTEMPTS:
            return None
        with contextlib.suppress(RemoteMissingError):
            now = file.expected.of(self.bucket.info(file.expected.key))
            if self.count.total_bytes - file.expected.size_bytes + now.size_bytes <= self.options.bounds.size_bytes:
                return now
        return None

    def _refuse(self, expected: Expected, err: Exception) -> None:
        """Counts a file that does not come. Raises RemoteError where the etags of the store seem to say nothing."""
        reason = str(err)
        if isinstance(err, _RefusedError):
            reason = f"{self.bucket.url / expected.key}: {err}; {_NO_MD5 if err.is_etag else _DAMAGED}"
        self.count.refuse(expected.name, reason)
        if isinstance(err, _RefusedError) and err.is_etag:
            with self._lock:
                self._by_etag += 1
            if self._by_etag >= _MOST_BY_ETAG and not self.count.checked_by["etag"]:
                raise RemoteError(reason)


def _neighbours(numbers: list[int], at_most: int) -> Iterator[tuple[int, ...]]:
    """Yields the numbers in groups in which each follows the one before."""
    group: list[int] = []
    for number in numbers:
        if group and (number != group[-1] + 1 or len(group) == at_most):
            yield tuple(group)
            group = []
        group.append(number)
    if group:
        yield tuple(group)


def _same(one: Any, other: Any) -> bool:
    states = [xxhash.xxh3_128(), xxhash.xxh3_128()]
    for state, pieces in zip(states, (one, other), strict=True):
        for piece in pieces:
            state.update(piece)
    return states[0].digest() == states[1].digest()
