"""A transfer while its threads work (a loop, a count, a bar) and what it reports at its end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from forebay.terminal import CommandReport, Progress
from forebay.visible import from_here, human_bytes

T = TypeVar("T")
Kind = Literal["moved", "linked", "kept"]
_SAID = {"etag": "etag (MD5)", "size": "size alone"}


def for_each(
    work: Callable[[T], object], items: Iterable[T], *, num_threads: int, stopped: threading.Event | None = None
) -> None:
    """Does the work for every item in threads. After the first error no further item is begun, and it is raised.

    stopped: is set then, so that work that looks at it may end early, by any error.
    """
    stopped = stopped or threading.Event()

    def work_unless_stopped(item: T) -> None:
        try:
            if not stopped.is_set():
                work(item)
        except BaseException:
            if not stopped.is_set():
                stopped.set()
                raise

    with ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(work_unless_stopped, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:  # an interrupt too
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True, kw_only=True, slots=True)
class CarryReport(CommandReport):
    """The fields that every transfer reports."""

    source: str
    target: str
    files: int
    """Files that were to come."""
    size_bytes: int
    moved_files: int
    """Files that this command sent, or downloaded and checked."""
    moved_bytes: int
    kept_files: int
    """Files that were there already, with the right bytes."""
    kept_bytes: int
    seconds: float

    def headline(self, done: str) -> str:
        """Returns the first line for a person."""
        size = human_bytes(self.size_bytes)
        return f"{done}: {from_here(self.target)} ({self.files} files, {size}, {self.seconds:.1f} s)"

    def rate(self, size_bytes: int) -> str:
        """Returns how many bytes of so many came each second."""
        return f"{human_bytes(size_bytes / max(self.seconds, 1e-3))}/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport(CarryReport):
    """The document of `forebay cache push|pull --json`; its fields are an interface. metadata.json is not counted."""

    action: Literal["push", "pull"]
    key: str
    linked_files: int
    """Files that a cache of this machine gave to a pull, or that the store copied from a stage."""
    linked_bytes: int
    read_back_bytes: int
    """Bytes that a push read from the store again, since no etag proved them."""
    already_there: bool
    """Whether the whole cache was there before."""
    stored_bytes: int | None = None
    """Bytes of the objects of the zarr form, whose other figures are those of the values inside."""

    def lines(self) -> Iterator[str]:
        """Yields what `forebay cache push|pull` prints."""
        yield self.headline("already there" if self.already_there else f"{self.action}ed")
        if not self.already_there:
            moved = {"push": "sent", "pull": "downloaded"}[self.action]
            yield (
                f"files: {self.moved_files} {moved} ({human_bytes(self.moved_bytes)}, {self.rate(self.moved_bytes)}), "
                f"{self.linked_files} linked, {self.kept_files} kept"
            )
        if self.stored_bytes is not None:
            share = self.stored_bytes / max(self.size_bytes, 1)
            yield f"zarr: {human_bytes(self.stored_bytes)} compressed, {share:.2f} of the values"
        if self.action == "push":
            yield f"read back: {human_bytes(self.read_back_bytes)}; the store's checksums proved the rest"


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchReport(CarryReport):
    """The document of `forebay fetch --json`; its fields are an interface."""

    resumed_bytes: int
    """Of `moved_bytes`, what an interrupted fetch had left."""
    checked_by: dict[str, int]
    """Files by what their bytes were compared with: `xxh3_128`, `sha256` and `md5` of a manifest, `etag`, `size`."""
    refused: list[dict[str, str]]
    """Files that did not come: `name` and `reason`."""
    tars: int
    """Of the files, tars of evaluation sets."""
    names: list[str]
    """With --dry-run the files that would be downloaded, else empty."""
    dry_run: bool

    def lines(self) -> Iterator[str]:
        """Yields what `forebay fetch` prints."""
        if self.dry_run:
            yield from self.names
            to_come = human_bytes(self.size_bytes - self.kept_bytes)
            yield f"would fetch: {len(self.names)} of {self.files} files, {to_come}"
            yield from _refusals(self.refused)
            return
        yield self.headline("not all is there" if self.refused else "fetched" if self.moved_files else "already there")
        resumed = f", {human_bytes(self.resumed_bytes)} of it from before" if self.resumed_bytes else ""
        rate = self.rate(self.moved_bytes - self.resumed_bytes)
        yield (
            f"files: {self.moved_files} downloaded ({human_bytes(self.moved_bytes)}{resumed}, {rate}), "
            f"{self.kept_files} kept, {len(self.refused)} refused"
        )
        checked = ", ".join(f"{count} by {_SAID.get(by, by)}" for by, count in sorted(self.checked_by.items()))
        yield f"checked: {checked or 'nothing'}"
        yield from _refusals(self.refused)
        if self.tars and not self.refused:
            yield (
                f'to evaluate on it: a config of kind = "webdataset" and manifest = "{self.target}/*_eval.tar", which '
                '[[train.eval]] names by config = "..."'
            )


def _refusals(refused: Iterable[dict[str, str]]) -> list[str]:
    return [f"refused: {one['name']}: {one['reason']}" for one in refused]


class Tally:
    """Counts files and bytes by what became of them, and shows a bar. A context; threads share it."""

    def __init__(self, sizes_bytes: Sequence[int], *, label: str, progress: bool, has_file_count: bool = False) -> None:
        """has_file_count: the bar says how many files are done, too."""
        self.num_files, self.total_bytes = len(sizes_bytes), sum(sizes_bytes)
        self.files: Counter[Kind] = Counter()
        self.bytes: Counter[Kind] = Counter()
        self.read_back_bytes = self.resumed_bytes = 0
        self.checked_by: Counter[str] = Counter()
        self.refused: list[dict[str, str]] = []
        self._label, self._started_s = label, time.monotonic()
        self._lock = threading.Lock()
        self._bar = Progress(self.total_bytes, unit="B", desc=label, is_shown=progress)
        if has_file_count:
            self._say_files()

    def __enter__(self) -> Tally:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if error is not None:
            for line in _refusals(self.refused):
                error.add_note(line)

    def figures(self) -> dict[str, Any]:
        """Returns what was counted, as every report has it."""
        return {
            "files": self.num_files,
            "size_bytes": self.total_bytes,
            "moved_files": self.files["moved"],
            "moved_bytes": self.bytes["moved"],
            "kept_files": self.files["kept"],
            "kept_bytes": self.bytes["kept"],
            "seconds": time.monotonic() - self._started_s,
        }

    def report(
        self, action: Literal["push", "pull"], *, source: object, target: object, key: str, already_there: bool
    ) -> TransferReport:
        """Returns what was counted, of a push or a pull of a cache."""
        return TransferReport(
            action=action,
            source=str(source),
            target=str(target),
            key=key,
            linked_files=self.files["linked"],
            linked_bytes=self.bytes["linked"],
            read_back_bytes=self.read_back_bytes,
            already_there=already_there,
            **self.figures(),
        )

    def add(self, kind: Kind, size_bytes: int, *, by: str = "") -> None:
        """Counts one file. by: what its bytes were compared with; those that were moved are on the bar already then."""
        with self._lock:
            self.files[kind] += 1
            self.bytes[kind] += size_bytes
            if by:
                self.checked_by[by] += 1
                self._say_files()
            if kind == "kept" or not by:
                self._bar.update(size_bytes, is_kept=kind == "kept")

    def keep_all(self) -> None:
        """Counts every file as one that was there already."""
        self.files["kept"], self.bytes["kept"] = self.num_files, self.total_bytes
        self._bar.update(self.total_bytes, is_kept=True)

    def _say_files(self) -> None:
        self._bar.rename(f"{self._label}: {self.files.total()}/{self.num_files} files")

    def refuse(self, name: str, reason: str) -> None:
        """Counts a file that does not come."""
        with self._lock:
            self.refused.append({"name": name, "reason": reason})

    def arrived(self, size_bytes: int) -> None:
        """Counts bytes on the bar; less than 0 where they have to come again."""
        self._bar.update(size_bytes)

    def resumed(self, size_bytes: int) -> None:
        """Counts bytes that an interrupted transfer had left; less than 0 where they have to come again."""
        with self._lock:
            self.resumed_bytes += size_bytes
        self._bar.update(size_bytes, is_kept=True)

    def add_read_back(self, size_bytes: int) -> None:
        """Counts bytes that were read from the store to be compared."""
        with self._lock:
            self.read_back_bytes += size_bytes
