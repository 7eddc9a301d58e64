"""A look at what lies below a folder, bounded in time and in files, and what names of folders and files say.

They say which files are of the train split, and what a config is called. No file is opened, but for `text_head`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from forebay.config.data import RECORDINGS, TEXTS_BESIDE
from forebay.errors import ManifestError
from forebay.rows.readers.line_blocks import head_of
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
_CACHE_FILES = frozenset(("metadata.json", "slots.npy"))
_PASSED_OVER = frozenset(("__MACOSX", "__pycache__", "node_modules"))

_SPLITS = {
    "train": re.compile(r"(^|[^a-z])(train|training)([^a-z]|$)"),
    "dev": re.compile(r"(^|[^a-z])(dev|valid|validation|val)([^a-z]|$)"),
    "test": re.compile(r"(^|[^a-z])(test|eval|evaluation)([^a-z]|$)"),
}
_MEANS_NOTHING = re.compile(
    r"((train(ing)?|dev|val(id(ation)?)?|test|eval|data(set)?|audio|wavs?|clips?|images?|photos?|metadata|manifest|"
    r"hf|default|parts?|shards?|texts?|transcripts?|tars?|files?|raw|corpus|tmp)(?![^\W\d_])|[-_.\d])*",
    re.IGNORECASE,
)
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Tree:
    """The files below `root`: `by_extension` has the names, relative to it and sorted, by extension in lower case.

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
        return sorted(name for each in extensions for name in self.by_extension.get(each, ()))

    @property
    def audio(self) -> list[str]:
        """The names of recordings."""
        return self.names(frozenset(RECORDINGS))

    def paths(self, *extensions: str) -> list[Path]:
        """Returns the paths of the files with one of the extensions, by their names."""
        return [self.path(name) for name in self.names(frozenset(extensions))]

    def path(self, name: str) -> Path:
        """Returns the path of a name."""
        return self.root / name


def extension_of(name: str) -> str:
    """Returns the extension of a name in lower case, with its dot; empty where it has none."""
    stem, dot, extension = name.rpartition(".")
    return f".{extension.lower()}" if dot and stem else ""


def walk(root: Path, *, seconds: float = SECONDS) -> Tree:
    """Returns what lies below a folder, as far as `seconds` and `MAX_FILES` go.

    Hidden names, caches of forebay and links in circles are passed over; a folder that cannot be read is empty.
    """
    clock, found, folders, count = Clock(seconds), defaultdict[str, list[str]](list), set(), 0
    todo, is_whole = deque([("", 0)]), True
    while todo and is_whole:
        folder, depth = todo.popleft()
        entries = list(_entries(root / folder, clock))
        if {entry.name for entry in entries} >= _CACHE_FILES:  # a cache of forebay is no raw data
            continue
        below = []
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith(".") or entry.name in _PASSED_OVER:
                continue
            if not entry.is_dir(follow_symlinks=False) and not (entry.is_symlink() and os.path.isdir(entry.path)):
                found[extension_of(entry.name)].append(name)
                count += 1
            elif not leads_up(entry.path, root):
                below.append((name, depth + 1))
        if len(below) < len(entries):
            folders.add(folder)
        is_whole = count < MAX_FILES and not clock.is_over() and not (depth >= MAX_DEPTH and below)
        todo += sorted(below)
    names = {extension: sorted(found[extension]) for extension in sorted(found)}
    return Tree(root, names, frozenset(folders), is_whole=is_whole)


def _entries(folder: Path, clock: Clock) -> Iterator[os.DirEntry[str]]:
    """Yields the entries of a folder, of a huge one those that the bounds of a walk allow."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            yield entry
            if number % 4096 == 4095 and (number >= MAX_FILES or clock.is_over()):
                return


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

    def while_left(self, values: Iterable[T]) -> Iterator[T]:
        """Yields the values until the time is up; the first one always."""
        for number, value in enumerate(values):
            if number and self.is_over():
                return
            yield value


def text_head(path: Path) -> str:
    """Returns the beginning of a file as text; an empty one where it cannot be read."""
    try:
        head = head_of(path)
    except ManifestError:
        return ""
    return head.decode("utf-16" if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig", "replace")


def split_of(stem: str) -> str:
    """Returns which split a name says: `train`, `dev`, `test`, or an empty text for none of them."""
    return next((split for split, pattern in _SPLITS.items() if pattern.search(stem.lower())), "")


@dataclass(frozen=True, slots=True)
class TrainFiles:
    """The files that are read: those below `folders`, which are relative to the root. others: of other splits.

    counts: how many files lie in each folder.
    """

    names: list[str]
    counts: Counter[str]
    folders: list[str]
    others: list[str]

    @classmethod
    def among(cls, names: list[str]) -> TrainFiles:
        """Returns the files of the train split where the first folders are called after splits, else all.

        names: of files, relative to the root.
        """
        counts = Counter(name.rpartition("/")[0] for name in names)
        top = os.path.commonpath(list(counts)) if counts else ""
        firsts = {folder: os.path.join(top, _below(folder, top).partition("/")[0]).rstrip("/") for folder in counts}
        splits = {folder: split_of(folder.rpartition("/")[2]) for folder in firsts.values()}
        own = sorted(folder for folder, split in splits.items() if split == "train")
        if not own or set(splits.values()) == {"train"}:
            return cls(names, counts, [""], [])
        kept = Counter({folder: count for folder, count in counts.items() if firsts[folder] in own})
        rest = sorted(folder for folder in splits if folder not in own)
        return cls([name for name in names if name.rpartition("/")[0] in kept], kept, own, rest)

    def with_text(self, texts: Iterable[str]) -> list[str]:
        """Returns those names of texts that stand beside a file of their name."""
        stems = {name.rpartition(".")[0] for name in self.names}
        return [name for name in texts if name.rpartition(".")[0] in stems]

    @property
    def deepest(self) -> list[str]:
        """The folder of the one split, or where there are no splits the deepest one that all files lie below."""
        if len(self.folders) > 1:
            return self.folders
        return [os.path.commonpath(list(self.counts)) if self.counts else ""]

    def by_first(self, folders: Sequence[str]) -> Counter[str]:
        """Returns how many files lie below each first folder that follows one of `folders`; below "" those in none."""
        found: Counter[str] = Counter()
        for folder, count in self.counts.items():
            base = next((each for each in folders if not each or folder == each or folder.startswith(f"{each}/")), None)
            found["" if base is None else _below(folder, base).partition("/")[0]] += count
        return found

    @property
    def notes(self) -> list[str]:
        """Notes on files of other splits."""
        return [f"Other splits are left out: {', '.join(self.others)}."] if self.others else []


def _below(folder: str, top: str) -> str:
    """Returns the way to a folder from one above it."""
    return folder.removeprefix(top).lstrip("/")


def config_name(paths: Sequence[Path]) -> str:
    """Returns a name for what is found at some paths: of the first one or of a folder above that says something."""
    names = list(dict.fromkeys(name_of(path) for path in paths))
    if len(names) > 1:
        above = {path.parent for path in paths}
        if len(above) == 1 and (common := name_of(above.pop() / "data")) and common != "data":
            return common
    return "-".join(names)[:_LONGEST_NAME].strip("-._") or "data"


def name_of(path: Path) -> str:
    """Returns the name of a path, or of a folder above it where its own says nothing; letters of any script stay."""
    own = path.name if os.path.isdir(path) else path.stem
    for part in (own, *(parent.name for parent in list(path.parents)[:3])):
        name = _as_folder(re.sub(r"-\d{5}(-of-\d{5})?$", "", part))
        if name and not _MEANS_NOTHING.fullmatch(name):
            return name
    return _as_folder(own) or "data"


def _as_folder(text: str) -> str:
    """Returns a text as the name of a folder: letters, digits, and `.`, `_`, `-` between them.

    Marks that stand on letters (vowel signs, for example) are left out, for a config's name has none.
    """
    shown = unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode("utf-8"))
    letters = [c for c in shown if not unicodedata.category(c).startswith("M")]
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in letters)
    return re.sub(r"-{2,}", "-", kept)[:_LONGEST_NAME].strip("-._")
