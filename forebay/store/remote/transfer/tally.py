"""What a transfer does, counted by its threads and shown while it works: bytes, rate and the time that is left."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from forebay.progress import Progress
from forebay.visible import from_here, human_bytes

T = TypeVar("T")
Action = Literal["push", "pull"]
Kind = Literal["moved", "linked", "kept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """What `forebay cache push|pull --json` prints; its fields are an interface. metadata.json counts nowhere here."""

    action: Action
    source: str
    target: str
    key: str
    files: int
    """Files of the cache."""
    size_bytes: int
    moved_files: int
    """Files that this command sent, or downloaded."""
    moved_bytes: int
    linked_files: int
    """Files that a cache of this machine gave to a pull, or that the store copied from a stage."""
    linked_bytes: int
    kept_files: int
    """Files that were there already."""
    kept_bytes: int
    read_back_bytes: int
    """Bytes that a push read from the store again, since no etag proved them."""
    already_there: bool
    """Whether the whole cache was there before."""
    seconds: float
    stored_bytes: int | None = None
    """Bytes of the objects of the zarr form, whose other figures are those of the values inside."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self)

    def lines(self) -> Iterator[str]:
        """Yields what `forebay cache push|pull` prints."""
        done = "already there" if self.already_there else {"push": "pushed", "pull": "pulled"}[self.action]
        yield (
            f"{done}: {from_here(self.target)} ({self.files} files, {human_bytes(self.size_bytes)}, "
            f"{self.seconds:.1f} s)"
        )
        if not self.already_there:
            rate = human_bytes(self.moved_bytes / max(self.seconds, 1e-3))
            moved = {"push": "sent", "pull": "downloaded"}[self.action]
            yield (
                f"files: {self.moved_files} {moved} ({human_bytes(self.moved_bytes)}, {rate}/s), "
                f"{self.linked_files} linked, {self.kept_files} kept"
            )
        if self.stored_bytes is not None:
            share = self.stored_bytes / max(self.size_bytes, 1)
            yield f"zarr: {human_bytes(self.stored_bytes)} compressed, {share:.2f} of the values"
        if self.action == "push":
            yield f"read back: {human_bytes(self.read_back_bytes)}; the store's checksums proved the rest"


class Tally:
    """Counts files and bytes by what became of them, and shows a bar. Threads share it."""

    def __init__(self, sizes_bytes: Sequence[int], *, label: str, progress: bool) -> None:
        self._num_files, self._total_bytes = len(sizes_bytes), sum(sizes_bytes)

        self.files: Counter[Kind] = Counter()
        self.bytes: Counter[Kind] = Counter()
        self.read_back_bytes = 0
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._bar = Progress(self._total_bytes, unit="B", desc=label, is_shown=progress)

    def __enter__(self) -> Tally:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def report(self, action: Action, *, source: str, target: str, key: str, already_there: bool) -> TransferReport:
        """Returns what was counted."""
        return TransferReport(
            action=action,
            source=source,
            target=target,
            key=key,
            files=self._num_files,
            size_bytes=self._total_bytes,
            moved_files=self.files["moved"],
            moved_bytes=self.bytes["moved"],
            linked_files=self.files["linked"],
            linked_bytes=self.bytes["linked"],
            kept_files=self.files["kept"],
            kept_bytes=self.bytes["kept"],
            read_back_bytes=self.read_back_bytes,
            already_there=already_there,
            seconds=time.monotonic() - self._started_s,
        )

    def add(self, kind: Kind, size_bytes: int) -> None:
        """Counts one file."""
        with self._lock:
            self.files[kind] += 1
            self.bytes[kind] += size_bytes
            self._bar.update(size_bytes, is_kept=kind == "kept")

    def add_read_back(self, size_bytes: int) -> None:
        """Counts bytes that were read from the store to be compared."""
        with self._lock:
            self.read_back_bytes += size_bytes


def for_each(work: Callable[[T], object], items: Iterable[T], *, num_threads: int) -> None:
    """Does the work for every item in threads. After the first error no further item is begun, and it is raised."""
    with ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:  # an interrupt too
            threads.shutdown(wait=False, cancel_futures=True)
            raise
