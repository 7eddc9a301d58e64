"""What a fetch did: counted by its threads, shown while it works, printed at its end."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from forebay.progress import Progress
from forebay.visible import from_here, human_bytes

Kind = Literal["moved", "kept"]
_SAID = {"etag": "etag (MD5)", "size": "size alone"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchReport:
    """What `forebay fetch --json` prints; its fields are an interface."""

    source: str
    target: str
    files: int
    """Files that were to come."""
    size_bytes: int
    moved_files: int
    """Files that were downloaded, checked and given their name."""
    moved_bytes: int
    kept_files: int
    """Files that were there already, with the right bytes."""
    kept_bytes: int
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
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self)

    def lines(self) -> Iterator[str]:
        """Yields what `forebay fetch` prints."""
        if self.dry_run:
            yield from self.names
            yield f"would fetch: {len(self.names)} of {self.files} files, {human_bytes(self._to_come)}"
            yield from refusals(self.refused)
            return
        rate = human_bytes((self.moved_bytes - self.resumed_bytes) / max(self.seconds, 1e-3))
        done = "not all is there" if self.refused else "fetched" if self.moved_files else "already there"
        yield (
            f"{done}: {from_here(self.target)} ({self.files} files, {human_bytes(self.size_bytes)}, "
            f"{self.seconds:.1f} s)"
        )
        resumed = f", {human_bytes(self.resumed_bytes)} of it from before" if self.resumed_bytes else ""
        yield (
            f"files: {self.moved_files} downloaded ({human_bytes(self.moved_bytes)}{resumed}, {rate}/s), "
            f"{self.kept_files} kept, {len(self.refused)} refused"
        )
        checked = ", ".join(f"{count} by {_SAID.get(by, by)}" for by, count in sorted(self.checked_by.items()))
        yield f"checked: {checked or 'nothing'}"
        yield from refusals(self.refused)
        if self.tars and not self.refused:
            yield (
                f'to evaluate on it: a config of kind = "webdataset" and manifest = "{self.target}/*_eval.tar", which '
                '[[train.eval]] names by config = "..."'
            )

    @property
    def _to_come(self) -> int:
        return self.size_bytes - self.kept_bytes


def refusals(refused: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a line for each file that does not come."""
    return [f"refused: {one['name']}: {one['reason']}" for one in refused]


class FetchCount:
    """Counts files and bytes, and shows a bar. Threads share it."""

    def __init__(self, num_files: int, total_bytes: int, *, progress: bool) -> None:
        self.num_files, self.total_bytes = num_files, total_bytes
        self.files: Counter[Kind] = Counter()
        self.bytes: Counter[Kind] = Counter()
        self.checked_by: Counter[str] = Counter()
        self.refused: list[dict[str, str]] = []
        self.resumed_bytes = 0
        self.started_s = time.monotonic()
        self._lock = threading.Lock()
        self._bar = Progress(total_bytes, unit="B", desc="fetch", is_shown=progress)
        self._say()

    def __enter__(self) -> FetchCount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if error is not None:
            for line in refusals(self.refused):
                error.add_note(line)

    def add(self, kind: Kind, size_bytes: int, *, by: str) -> None:
        """Counts one file, whose bytes were compared with something."""
        with self._lock:
            self.files[kind] += 1
            self.bytes[kind] += size_bytes
            self.checked_by[by] += 1
            if kind == "kept":
                self._skip(size_bytes)
            self._say()

    def refuse(self, name: str, reason: str) -> None:
        """Counts a file that does not come."""
        with self._lock:
            self.refused.append({"name": name, "reason": reason})

    def arrived(self, size_bytes: int) -> None:
        """Counts bytes on the bar; less than 0 where they have to come again."""
        with self._lock:
            self._bar.update(size_bytes)

    def resumed(self, size_bytes: int) -> None:
        """Counts bytes that an interrupted fetch had left."""
        with self._lock:
            self.resumed_bytes += size_bytes
            self._skip(size_bytes)

    def _skip(self, size_bytes: int) -> None:
        self._bar.update(size_bytes, is_kept=True)

    def _say(self) -> None:
        done = sum(self.files.values())
        self._bar.rename(f"fetch: {done}/{self.num_files} files")
