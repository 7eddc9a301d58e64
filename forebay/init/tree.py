"""A look at what lies below a folder, bounded in time and in files: names alone, no file is opened."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from forebay.config.data import RECORDINGS, TEXTS_BESIDE
from forebay.rows.readers.tar_members import IMAGE_EXTENSIONS
from forebay.store.remote.raw.raw_sources import leads_up

T = TypeVar("T")

SECONDS = 2.5
"""A walk ends after so long, and what it has found by then counts."""
MAX_FILES = 2_000_000
MAX_DEPTH = 12
SAMPLE = 200
"""Files, or rows, that are opened of what was found."""

TABLES = frozenset((".csv", ".tsv", ".parquet", ".jsonl", ".json", ".arrow"))
MAX_TABLES = 24
"""Tables of a folder whose heads are read."""
MAX_HEADS = 500
"""Tables of texts whose heads are read."""
AUDIO_DIRS = ("clips", "wavs", "audio", "wav", "images", "photos")
"""Usual names of folders beside a table."""
TRANSCRIPTS = frozenset(TEXTS_BESIDE)
_AUDIO = frozenset(RECORDINGS)
_CACHE_FILES = frozenset(("metadata.json", "slots.npy"))
_PASSED_OVER = frozenset(("__MACOSX", "__pycache__", "node_modules"))


@dataclass(frozen=True, slots=True)
class Tree:
    """What lies below `root`: `by_extension` has the names, relative to it and sorted, by extension in lower case.

    is_whole: False where the walk ended at its bounds. folders: relative names of those with files. cut: which of these
    files were not looked into because there are many, in sentences; added later.
    """

    root: Path
    by_extension: dict[str, list[str]]
    folders: frozenset[str]
    is_whole: bool = True
    cut: list[str] = field(default_factory=list)

    def names(self, extensions: frozenset[str]) -> list[str]:
        """Returns the names with one of the extensions, sorted."""
        found = [self.by_extension[each] for each in self.by_extension if each in extensions]
        return found[0] if len(found) == 1 else sorted(name for names in found for name in names)

    @property
    def audio(self) -> list[str]:
        """The names of recordings."""
        return self.names(_AUDIO)

    @property
    def images(self) -> list[str]:
        """The names of pictures."""
        return self.names(IMAGE_EXTENSIONS)

    def counts(self) -> Counter[str]:
        """Returns how many names there are of each extension."""
        return Counter({extension: len(names) for extension, names in self.by_extension.items()})

    def path(self, name: str) -> Path:
        """Returns the path of a name."""
        return self.root / name


@dataclass(slots=True)
class _Walk:
    root: str
    deadline: float
    found: dict[str, list[str]] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    count: int = 0
    is_whole: bool = True

    def run(self) -> None:
        todo = deque([("", 0)])
        while todo and self.is_whole:
            folder, depth = todo.popleft()
            todo += self._look(folder, depth)

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                yield entry
                if number % 4096 == 4095 and (number >= MAX_FILES or time.monotonic() > self.deadline):
                    self.is_whole = False
                    return

    def _look(self, folder: str, depth: int) -> list[tuple[str, int]]:
        try:
            entries = list(self._entries(os.path.join(self.root, folder)))
        except OSError:
            return []
        if {entry.name for entry in entries} >= _CACHE_FILES:  # a cache of forebay is no raw data
            return []
        below = []
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith(".") or entry.name in _PASSED_OVER:
                continue
            if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):
                below += [] if leads_up(entry.path, self.root) else [(name, depth + 1)]
            else:
                self.found.setdefault(extension_of(entry.name), []).append(name)
                self.count += 1
        if len(below) < len(entries):
            self.folders.add(folder)
        if self.count >= MAX_FILES or time.monotonic() > self.deadline:
            self.is_whole = False
        if depth >= MAX_DEPTH and below:
            self.is_whole = False
            return []
        return sorted(below)


def extension_of(name: str) -> str:
    """Returns the extension of a name in lower case, with its dot; empty where it has none."""
    stem, dot, extension = name.rpartition(".")
    return f".{extension.lower()}" if dot and stem else ""


def walk(root: Path, *, seconds: float = SECONDS) -> Tree:
    """Returns what lies below a folder, as far as `seconds` and `MAX_FILES` go.

    Hidden names, caches of forebay and links in circles are passed over; a folder that cannot be read is empty.
    """
    walked = _Walk(os.fspath(root), time.monotonic() + seconds)
    walked.run()
    return Tree(
        root,
        {extension: sorted(names) for extension, names in sorted(walked.found.items())},
        frozenset(walked.folders),
        is_whole=walked.is_whole,
    )


def spread(values: Sequence[T], count: int = SAMPLE) -> list[T]:
    """Returns up to `count` of some values, evenly spread over all of them, in order."""
    if len(values) <= count:
        return list(values)
    return [values[number * len(values) // count] for number in range(count)]


class Clock:
    """Says when a stretch of work has taken long enough."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def is_over(self) -> bool:
        """Returns whether the time is up."""
        return time.monotonic() > self._deadline

    def while_left(self, values: Sequence[T]) -> Iterator[T]:
        """Yields the values until the time is up; the first one always."""
        for number, value in enumerate(values):
            if number and self.is_over():
                return
            yield value
