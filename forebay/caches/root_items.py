"""Everything under a cache root is an item of one kind; `forebay.caches.kinds` has the table of the kinds.

A root is held open: by its resolved path, and never a folder that a person keeps other things in. Files below it are
found by descriptors: no link is followed and no other mount is entered.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forebay.config.remote import RemoteConfig, is_url, parse_url
from forebay.errors import CacheNotFoundError, ConfigError
from forebay.store.memo import Use
from forebay.store.remote.small_files import RemoteRoot

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


Inode = tuple[int, int]
_DEEPEST = 16
"""Folders within folders; forebay writes three."""
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


@dataclass(frozen=True, kw_only=True)
class Root:
    """An opened cache root. folder: its resolved path; descriptor: of that very folder, whatever its path becomes.

    remote: the URL that the folder stands for on this node, where it does.
    """

    folder: Path
    descriptor: int
    device: int
    remote: RemoteRoot | None = None

    @property
    def place(self) -> str:
        """The folder or URL that names it."""
        return str(self.remote.url if self.remote else self.folder)


@contextmanager
def opened_root(place: str | Path, settings: RemoteConfig | None = None) -> Iterator[Root]:
    """Yields a cache root; of a URL what stands for that URL on this node.

    Raises CacheNotFoundError where it is no folder, ConfigError for `/`, a home folder, or a folder that holds one.
    """
    remote = RemoteRoot.at(parse_url(str(place)), settings or RemoteConfig()) if is_url(str(place)) else None
    if remote is not None:
        remote.prepare()
    resolved = Path(os.path.realpath(remote.folder if remote else place))
    home = Path(os.path.realpath(Path.home()))
    if resolved == home or resolved in home.parents:
        what = "the root of the file system" if resolved == Path("/") else "a home folder, or holds it"
        raise ConfigError(
            f"{resolved} is {what}, and no cache root; name the folder of the caches: forebay cache ls DIR"
        )
    try:
        descriptor = os.open(resolved, FOLDER)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheNotFoundError(
            f"{place} is no folder, so no cache is there; name a cache root, as run.cache_root of a config does: "
            "forebay cache ls DIR"
        ) from err
    try:
        yield Root(folder=resolved, descriptor=descriptor, device=os.fstat(descriptor).st_dev, remote=remote)
    finally:
        os.close(descriptor)


@contextmanager
def entered(name: str | Path, *, within: int | None = None) -> Iterator[int]:
    """Yields the descriptor of a folder, by its path or in an opened one; no link is followed. Raises OSError."""
    descriptor = os.open(name or ".", FOLDER, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class File(NamedTuple):
    """A file. name: its path in the folder. kind: `file`, `folder`, or `other`: a link, a pipe, another mount."""

    name: str
    kind: str
    inode: Inode
    size_bytes: int
    num_links: int
    changed_ns: int
    read_ns: int


@dataclass(kw_only=True)
class RootContents:
    """The contents of a folder."""

    files: list[File] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The paths of all that is no folder."""
        return [file.name for file in self.files if file.kind != "folder"]

    @property
    def changed_ns(self) -> int:
        """When a file was written last; 0 where there is none."""
        return max((file.changed_ns for file in self.files if file.kind == "file"), default=0)


def contents_of(descriptor: int, *, device: int) -> RootContents:
    """Returns all that lies below an opened folder. device: the disk of the root; another one is not entered."""
    return RootContents(files=list(_walk(descriptor, "", device, 0)))


def file_of(name: str, status: os.stat_result, *, device: int) -> File:
    """Returns what a stat, of no target of a link, says of a file."""
    kind = "other"
    if status.st_dev == device:
        kind = "file" if stat.S_ISREG(status.st_mode) else "folder" if stat.S_ISDIR(status.st_mode) else "other"
    return File(
        name=name,
        kind=kind,
        inode=(status.st_dev, status.st_ino),
        size_bytes=status.st_size if kind == "file" else 0,
        num_links=status.st_nlink,
        changed_ns=status.st_mtime_ns,
        read_ns=status.st_atime_ns,
    )


def _walk(descriptor: int, prefix: str, device: int, depth: int) -> Iterator[File]:
    with os.scandir(descriptor) as entries:
        found = [
            (entry.name, file_of(prefix + entry.name, entry.stat(follow_symlinks=False), device=device))
            for entry in entries
        ]
    for name, file in found:
        yield file
        if file.kind == "folder" and depth < _DEEPEST:
            with entered(name, within=descriptor) as below:
                yield from _walk(below, f"{file.name}/", device, depth + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The bytes of files. exclusive_bytes: of files whose links are all among them; shared_bytes: of the others."""

    exclusive_bytes: int
    shared_bytes: int

    @property
    def size_bytes(self) -> int:
        """All of them, a file of several links once."""
        return self.exclusive_bytes + self.shared_bytes


def sizes_of(files: Iterable[File]) -> Sizes:
    """Returns what files take together; the exclusive bytes are what removing all of them frees."""
    exclusive = shared = 0
    links: dict[Inode, list[int]] = {}
    for file in files:
        if file.kind != "file":
            continue
        if file.num_links == 1:
            exclusive += file.size_bytes
        else:
            links.setdefault(file.inode, [0, file.num_links, file.size_bytes])[0] += 1
    for here, all_links, size_bytes in links.values():
        if here >= all_links:
            exclusive += size_bytes
        else:
            shared += size_bytes
    return Sizes(exclusive_bytes=exclusive, shared_bytes=shared)


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
        return [*([] if self.is_folder else [self.file]), *self.contents.files, *self.beside]

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


def moment(ns: int) -> str:
    """Returns a time as people write it, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(ns / 1e9)) if ns > 0 else "unknown"


def ago(seconds: float) -> str:
    """Returns how long ago something was, in its largest unit."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
