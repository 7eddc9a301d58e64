"""Everything under a cache root is an item of one kind; `forebay.caches.kinds` has the table of the kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from forebay.caches.root_files import File, Root, RootContents, Sizes, sizes_of
from forebay.store.memo import Use
from forebay.store.remote.root import RemoteRoot

_READ_ENDS = (".tdz", ".media", ".image")
"""Ends of the files that readers of samples read."""
_MADE_NS = 60 * 10**9
"""Sealing reads shards too."""

Read = Callable[[Path, int], tuple[Mapping[str, Any], int]]
"""(folder, descriptor of it) -> what it says of itself, and when it was written. Raises CacheError, OSError."""
Check = Callable[[int, Path], Callable[[str], bool]]
"""(descriptor of a folder, the folder) -> whether a path in it is forebay's. Raises CacheError, OSError."""
Verdict = Callable[["RootItem", "Survey", Sequence["RootItem"]], tuple[bool, str]]
"""(item, survey, the caches that stay) -> whether an item goes by the rule of its kind, and why."""
Told = tuple[Mapping[str, Any], str, str]
"""What `ls` says of an item: facts for the document, how much is in it, and what it is."""
Tell = Callable[[Mapping[str, Any], Mapping[str, str]], Told]
"""(what an item says of itself, folders of tokenizers by their digests) -> what `ls` says of it."""


@dataclass(frozen=True)
class Inside:
    """The contents of a folder of a kind. read: None if the folder says nothing of itself.

    check: which files in it are forebay's. is_folder: the same of folders.
    """

    read: Read | None
    check: Check
    is_folder: Callable[[str, RootContents], bool] = lambda *_: False


@dataclass(frozen=True)
class Kept:
    """One kind of what is kept under a root.

    name, words: of one and of all, as `du` prints them. folder: below the root; empty: the root itself. names: the
    pattern of what they are called there; None: anything. form: of one. beside: how files end that go with one, and
    that are leftovers without it. inside: None, where anything may lie in one.

    lock: the file that its readers or builders hold a shared lock on. builders: the unfinished builds that work with
    one. is_growing: it is used by being written. is_noted: hosts note its use. verdict: of the rule of `prune --kind`.
    rule: which other rule takes it: those that choose caches, or `--leftovers`. told: None, where `ls` lists none.
    one: of them, in messages, where that is not its name.
    """

    name: str
    words: str
    folder: str = ""
    names: str | None = None
    form: Literal["file", "folder"] = "folder"
    beside: tuple[str, ...] = ()
    inside: Inside | None = None
    lock: str | None = None
    builders: Literal["itself", "of its key", "any"] | None = None
    is_growing: bool = False
    is_noted: bool = False
    verdict: Verdict | None = None
    rule: Literal["caches", "leftovers"] | None = None
    told: Tell | None = None
    one: str = ""

    @property
    def read(self) -> Read | None:
        """Reads what one says of itself; None where it says nothing."""
        return None if self.inside is None else self.inside.read

    def is_named(self, name: str) -> bool:
        """Returns whether one may be called so."""
        return self.names is None or re.fullmatch(self.names, name) is not None


@dataclass(kw_only=True)
class RootItem:
    """Something under a root. name: its path there, which people call it by.

    inode: of the folder or file. beside: other files of the root that go with it. document: what it says of itself.
    problem: why it is foreign. uses: noted ones, the latest first. made_ns: when it was finished. remote: the root
    below whose URL it lies, where it lies in a store.
    """

    kept: Kept
    name: str
    file: File
    contents: RootContents = field(default_factory=RootContents)
    beside: Sequence[File] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    uses: Sequence[Use] = ()
    made_ns: int = 0
    remote: RemoteRoot | None = None

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return self.kept.name

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.file.kind == "folder"

    @cached_property
    def files(self) -> list[File]:
        """All files of it."""
        own = [] if self.is_folder else [self.file]
        return [*own, *self.contents.files, *self.beside]

    @cached_property
    def sizes(self) -> Sizes:
        """The bytes that the item takes."""
        return sizes_of(self.files)

    @cached_property
    def used_ns(self) -> int:
        """When it was used last: the last note, when a shard was read or anything written, or when it was made.

        A process that opens a cache by itself notes nothing; many disks keep to a day when a file was read last.
        """
        noted = self.uses[0].used_ns if self.uses else 0
        written = self.contents.changed_ns if self.kept.is_growing else 0
        read = max((file.read_ns for file in self.contents.files if file.name.endswith(_READ_ENDS)), default=0)
        return max(noted, written, read, self.made_ns)

    @property
    def is_used(self) -> bool:
        """Whether it was used after it was made, as far as that is known."""
        return bool(self.uses) or self.used_ns > self.made_ns + _MADE_NS


@dataclass(kw_only=True)
class Survey:
    """All items of a root. origin: the URL that the root stands for on this node."""

    root: Root
    items: list[RootItem]
    origin: str | None = None

    def of(self, *kinds: str) -> list[RootItem]:
        """Returns the items of these kinds."""
        return [item for item in self.items if item.kind in kinds]

    @property
    def caches(self) -> list[RootItem]:
        """The sealed caches."""
        return self.of("cache")

    def files(self) -> Iterator[File]:
        """Yields every file of every item."""
        for item in self.items:
            yield from item.files
